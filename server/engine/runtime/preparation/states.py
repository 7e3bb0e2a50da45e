"""Layers with states: the sequences that their memory allows, and mixers in the places of transformers' own."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.loading import available_bytes
from server.checkpoint.states import NARROW_INPUTS, STATE_MODULES, has_states
from server.config import EngineConfig
from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.layers.gated_delta import StateLayers, read_gated_delta, read_rule
from server.engine.runtime.limits import CPU_CACHE_BYTES, EngineConfigError, sequence_limit
from server.engine.runtime.memory import RESERVED_SHARE
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.model.projections import NF4Linear
from server.engine.runtime.states.pool import StatePool

logger = logging.getLogger(__name__)

_KV_TOKENS = 1024
"""Tokens for which every sequence should find room in the KV cache, before more sequences get states."""
_STEP_SHARE = 0.1
"""The share of the free memory that is left for a step, on CUDA, where what it takes is measured later."""


def keep_in_16_bits(model: PreTrainedModel) -> None:
    """Expand the projections with one output for each head, if they are in NF4: kernels compute no fewer than 64 rows."""
    for module in _mixers(model):
        for name in NARROW_INPUTS:
            linear = getattr(module, name)
            if isinstance(linear, Linear4bit):
                setattr(module, name, _expanded(linear, model.dtype))


def _expanded(linear: Linear4bit, dtype: torch.dtype) -> nn.Linear:
    state = linear.weight.quant_state
    if state.quant_type == "nf4":
        weight = torch.ops.nf4.dequantize(*NF4Linear.of(linear).weight.arguments(), dtype)
    else:
        weight = dequantize_4bit(linear.weight.data, state).to(dtype)
    with torch.device("meta"):
        plain = nn.Linear(linear.in_features, linear.out_features, bias=False)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    return plain


def make_states(model: PreTrainedModel, bytes_per_block: int, config: EngineConfig) -> StateLayers | None:
    """The layers of a model that have states, which these compute from here on; None: there are none.

    The model's projections are in their final form. bytes_per_block: of the KV cache. Raises UnsupportedModelError, and
    EngineConfigError where the memory holds no state.
    """
    if not has_states(model.config.get_text_config()):
        return None
    modules = _mixers(model)
    rules = [read_rule(module) for module in modules]
    found = [rule for rule in rules if rule is not None]
    if len(found) < len(modules):
        other = modules[rules.index(None)]
        names = ", ".join(name for name, _ in other.named_children())
        raise UnsupportedModelError(f"{type(other).__name__} has {names}, which no rule describes")
    kinds = [rule.kind for rule in found]
    count = _sequences(sum(kind.nbytes for kind in kinds), bytes_per_block, model.device, config)
    pool = StatePool(kinds, count, model.device)
    mixers = {
        module: read_gated_delta(module, rule, pool, index)
        for index, (module, rule) in enumerate(zip(modules, found, strict=True))
    }
    states = StateLayers(pool, mixers)
    for module, mixer in mixers.items():
        module.forward = mixer.by_modules().forward
    _report(states, len(decoder_layers(model)))
    return states


def _mixers(model: PreTrainedModel) -> list[nn.Module]:
    """transformers' modules that keep a state, in the order of the layers."""
    own = (getattr(layer, name, None) for layer in decoder_layers(model) for name in STATE_MODULES)
    return [module for module in own if isinstance(module, nn.Module)]


def _report(states: StateLayers, layers: int) -> None:
    pool = states.pool
    names = " and ".join(f"{count} {name}" for name, count in Counter(kind.name for kind in pool.kinds).items())
    each = sum(kind.nbytes for kind in pool.kinds)
    attending = layers - len(pool.kinds)
    logger.info(
        "%s layers of %.3g MB a sequence, %d of attention; states of %d sequences take %.2f GiB",
        names, each / 1e6, attending, pool.max_num_seqs, pool.nbytes / 2**30,
    )  # fmt: skip


def _sequences(state: int, bytes_per_block: int, device: torch.device, config: EngineConfig) -> int:
    """How many sequences run at a time, of which each takes `state` bytes beside its KV blocks.

    Fewer than configured if states would leave them less than _KV_TOKENS each.
    """
    wanted = sequence_limit(config, device)
    free = available_bytes(device)
    per_token = bytes_per_block / config.block_size
    if device.type == "cuda":
        usable = int(free * (1 - _STEP_SHARE) - torch.cuda.mem_get_info(device)[1] * RESERVED_SHARE)
        cache = config.kv_cache_bytes
    else:
        usable, cache = free // 2, config.kv_cache_bytes or CPU_CACHE_BYTES
    if cache is not None:
        possible = (usable - cache) // state
    else:
        # The longest sequence has to fit, too.
        alone = int((config.max_model_len or _KV_TOKENS) * per_token)
        possible = min(int(usable / (state + _KV_TOKENS * per_token)), (usable - alone) // state)
    if possible < 1:
        raise EngineConfigError(
            f"a sequence's states take {state / 2**20:.0f} MiB, and with the weights and the KV cache there is no memory for"
            f" them on {device}"
        )
    if possible < wanted:
        logger.warning(
            "engine.max_num_seqs is %d instead of %d: a sequence's states take %.0f MiB",
            possible,
            wanted,
            state / 2**20,
        )
    return min(wanted, possible)


@contextmanager
def own_mixers(states: StateLayers | None) -> Iterator[None]:
    """While entered, layers with states compute by transformers' own code, with torch alone: a sequence from its begin on.

    Other kernels, which transformers uses where it finds them, compile for a minute.
    """
    mixers = {} if states is None else states.mixers
    with ExitStack() as kept:
        for module in mixers:
            kept.callback(setattr, module, "forward", module.forward)
            del module.forward
            _choose_torch(module)
        for source in {sys.modules[type(module).__module__] for module in mixers}:
            for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"):
                function = getattr(source, name, None)
                if hasattr(function, "__wrapped__"):
                    kept.callback(setattr, source, name, function)
                    setattr(source, name, getattr(function, "__wrapped__"))  # noqa: B009 - mypy knows no such attribute
        yield


def _choose_torch(module: nn.Module) -> None:
    """Make a module of transformers 5.17, which holds its functions, call torch's; newer ones wrap these functions."""
    source = sys.modules[type(module).__module__]
    for name in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule"):
        if hasattr(module, name):
            setattr(module, name, getattr(source, f"torch_{name}"))
    if hasattr(module, "causal_conv1d_fn"):
        module.causal_conv1d_fn = None  # type: ignore[assignment]
