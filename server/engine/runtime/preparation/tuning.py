"""Choices of GEMMs' launches by times measured on this GPU."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from nf4_kernels import cuda, tune
from nf4_kernels.cuda.launches import use_times
from nf4_kernels.plan.measured import Times
from server.checkpoint.base import Progress
from server.config import EngineConfig
from server.engine.runtime.exchange import of_first
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.model.projections import NF4Linear
from server.engine.runtime.trials import summary

logger = logging.getLogger(__name__)


def choose_launches(model: PreTrainedModel, config: EngineConfig, progress: Progress) -> None:
    """Choose launches for the decoder layers' weights by kept times, or measure them. Before anything asks for a choice.

    All ranks call this at the same time, and take rank 0's times: the same launches, which round alike. With batch_invariant
    fitted costs choose, which are the same at every start. Nothing happens on a CPU.
    """
    if model.device.type != "cuda" or cuda.load_error() is not None:
        return
    times: dict[str, Times] = {}
    if not config.batch_invariant:
        modules = [module for layer in decoder_layers(model) for module in layer.modules()]
        weights = [module.weight for module in modules if isinstance(module, NF4Linear)]
        try:
            with torch.inference_mode():
                times = tune.tuned(tune.by_shape(weights), model.dtype, progress)
        except RuntimeError as e:
            logger.warning("launches are chosen by fitted costs, because measuring them failed: %s", summary(e))
        times = of_first(times)
    use_times(model.device, times)
