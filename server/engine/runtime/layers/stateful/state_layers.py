"""Layers that have states: what their mixers have in common, and all of a model's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import nn

from server.engine.runtime.layers.norm import Norm
from server.engine.runtime.layers.projection import ModuleProjection, Projection
from server.engine.runtime.states.kinds import StateKind
from server.engine.runtime.states.pool import StatePool, StateStep


class StateMixer(ABC):
    """A mixer over states in a pool: brings the tokens of each sequence together, and advances the sequences' states."""

    @abstractmethod
    def __call__(
        self, x: torch.Tensor, norm: Norm | None, angles: object, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """residual + the output for norm(x), x [T, width], whose rows are the tokens of the pool's step."""

    @abstractmethod
    def by_modules(self) -> Self:
        """This mixer, whose projections are calls of their modules, as transformers' own code makes them."""

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Hidden states [1, T, width] to the same shape, as transformers' module of it is called."""
        return self(hidden_states.view(-1, hidden_states.shape[-1]), None, None, None).view(hidden_states.shape)


@dataclass(frozen=True)
class JoinedMixer(StateMixer):
    """A mixer over states in a pool that has one projection of its input and one of its output."""

    input: Projection
    output: Projection
    modules: tuple[nn.Module, nn.Module]
    """Those of the input and of the output."""
    pool: StatePool

    def by_modules(self) -> Self:
        first, last = map(ModuleProjection, self.modules)
        return replace(self, input=first, output=last)


def in_parts(
    step: StateStep,
    rows: Sequence[torch.Tensor],
    of_singles: Callable[[list[torch.Tensor]], torch.Tensor],
    of_chunks: Callable[[list[torch.Tensor]], torch.Tensor],
) -> torch.Tensor:
    """Results [T, n] of tensors [T, columns] whose rows are a step's tokens: of sequences with one token, then of chunks."""
    singles, tokens = step.singles.shape[0], rows[0].shape[0]
    parts = []
    if singles:
        parts.append(of_singles([row[:singles] for row in rows]))
    if singles < tokens:
        parts.append(of_chunks([row[singles:] for row in rows]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class StateRule(Protocol):
    """Rule that makes a mixer of transformers' module of it."""

    @property
    def kind(self) -> StateKind:
        """State that the layer keeps of a sequence."""
        ...

    def mixer(self, module: nn.Module, pool: StatePool, index: int) -> StateMixer:
        """The mixer of the module, whose projections are in their final form. Call once for a module.

        index: of its state in the pool.
        """
        ...


@dataclass(frozen=True)
class StateLayers:
    """The layers of a model that have states."""

    pool: StatePool
    mixers: Mapping[nn.Module, StateMixer]
    """By transformers' modules of them, in order."""
