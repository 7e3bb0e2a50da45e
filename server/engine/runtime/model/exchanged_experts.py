"""Exchanges of a mixture's ranks: one sum behind a layer's experts and shared expert, where the model adds these up."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.experts.module import NF4Experts
from server.engine.runtime import exchange
from server.engine.runtime.model.decoder import decoder_layers

logger = logging.getLogger(__name__)

TOKENS = 2
"""Tokens with which it is tried what a block does."""


class ReducedExperts(nn.Module):
    """Experts of which each rank has a part of the features: the ranks' results are added up."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: torch.Tensor, *choices: torch.Tensor) -> torch.Tensor:
        """As NF4Experts: [tokens, hidden]."""
        return exchange.all_reduce(self.experts(hidden_states, *choices))


class ReducedBlock(nn.Module):
    """A block of experts and a shared expert whose sum is each rank's part of the layer's: these are added up."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """As the block: a tensor [..., hidden], or a tuple that begins with it."""
        found = self.block(hidden_states)
        exchange.all_reduce(_output(found))
        return found


def exchange_experts(model: PreTrainedModel, partial: Sequence[str]) -> set[str]:
    """Make a shard's experts exchange; returns those partial layers whose results are in these exchanges, too.

    partial: the names of the linear layers whose results are partial sums.
    """
    summed: set[str] = set()
    adds: dict[tuple[object, ...], bool] = {}
    layers = list(decoder_layers(model))
    experts = [name for name, module in model.named_modules() if isinstance(module, NF4Experts)]
    for name in experts:
        parent = name.rpartition(".")[0]
        shared = [other for other in partial if other.startswith(f"{parent}.")]
        block = model.get_submodule(parent)
        kind = (type(block), *(other.removeprefix(parent) for other in shared))
        if block in layers:  # Gemma 4 has experts next to an MLP in the layer itself, with norms between
            adds[kind] = False
        elif shared and kind not in adds:
            adds[kind] = _adds(block, [other.removeprefix(f"{parent}.") for other in (name, *shared)], model)
            if not adds[kind]:
                logger.info("%s: its ranks exchange twice, since it does more than add up", type(block).__name__)
        if shared and adds[kind]:
            model.set_submodule(parent, ReducedBlock(block))
            summed.update(shared)
        else:
            model.set_submodule(name, ReducedExperts(model.get_submodule(name)))
    return summed


class _Given(nn.Module):
    """Gives a result that does not depend on its input."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: torch.Tensor, *choices: torch.Tensor) -> torch.Tensor:
        # Experts, which are called with their tokens' choices, give [tokens, hidden] whatever x is.
        return self.result if choices else self.result.view(*x.shape[:-1], -1)


@torch.inference_mode()
def _adds(block: nn.Module, names: Sequence[str], model: PreTrainedModel) -> bool:
    """Whether a block's output is additive in the results of the modules of these names: found by trying.

    Then the sum over the ranks of its outputs is its output for the sums.
    """
    hidden = model.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(0)

    def numbers() -> torch.Tensor:
        return torch.randn(TOKENS, hidden, generator=generator).to(model.device, model.dtype)

    x = numbers().unsqueeze(0)
    first, second = ([numbers() for _ in names] for _ in range(2))
    outputs = []
    for results in (first, second, [a + b for a, b in zip(first, second, strict=True)]):
        with _giving(block, dict(zip(names, results, strict=True))):
            outputs.append(_output(block(x)).float())
    tolerance = 16 * torch.finfo(model.dtype).eps * float(outputs[2].abs().max())
    return torch.allclose(outputs[0] + outputs[1], outputs[2], rtol=0.0, atol=tolerance)


@contextmanager
def _giving(block: nn.Module, results: dict[str, torch.Tensor]) -> Iterator[None]:
    """While entered, the modules of these names within block give these results."""
    own = {name: block.get_submodule(name) for name in results}
    for name, result in results.items():
        block.set_submodule(name, _Given(result))
    try:
        yield
    finally:
        for name, module in own.items():
            block.set_submodule(name, module)


def _output(found: Any) -> torch.Tensor:
    output: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return output
