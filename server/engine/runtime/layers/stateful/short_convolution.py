"""A short causal convolution between two gates as the mixer of a decoder layer (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from server.engine.runtime.layers.norm import Norm
from server.engine.runtime.layers.projection import projection_of
from server.engine.runtime.layers.stateful.pieces import CHUNK, Singles, pieces_of
from server.engine.runtime.layers.stateful.state_layers import JoinedMixer, in_parts
from server.engine.runtime.states.kinds import StateKind, short_convolution
from server.engine.runtime.states.pool import StatePool, StateStep

_NAMES = {"in_proj", "conv", "out_proj"}


@dataclass(frozen=True)
class ShortConvolution(JoinedMixer):
    """output(c * convolution(b * y)), where b, c and y are thirds of the input projection's columns."""

    kind: StateKind
    weight: torch.Tensor
    """float32 [C, K]."""
    bias: torch.Tensor | None
    """float32 [C]."""
    singles: Singles
    state: torch.Tensor
    """[slots, C, K - 1] of the pool: the latest inputs of the convolution, the oldest first."""

    def __call__(
        self, x: torch.Tensor, norm: Norm | None, angles: object, residual: torch.Tensor | None
    ) -> torch.Tensor:
        columns = self.input(x, norm)
        b, c, y = columns.chunk(3, -1)
        found = self._launched(columns) if columns.is_cuda else c * self._convolved(b * y)
        return self.output(found, residual=residual)

    def _launched(self, columns: torch.Tensor) -> torch.Tensor:
        """c * convolution(b * y) of columns [T, 3 C] on CUDA; the states go on by T tokens."""
        # Triton is not installed without CUDA.
        from server.engine.runtime.layers.stateful.convolution_kernels import convolve

        step = self.pool.step
        parameters = self.weight, self.bias, self.state

        def chunks(rows: torch.Tensor) -> torch.Tensor:
            (piece,) = pieces_of(step, self.kind, rows.shape[0], rows.shape[0])
            return convolve(rows, *parameters, piece, CHUNK)

        return in_parts(
            step,
            [columns],
            lambda rows: convolve(rows[0], *parameters, self.singles.piece(step.singles), 1),
            lambda rows: chunks(rows[0]),
        )

    def _convolved(self, x: torch.Tensor) -> torch.Tensor:
        """The convolution of x [T, C]; the states go on by T tokens."""
        step = self.pool.step
        return in_parts(
            step,
            [x],
            lambda rows: self._singles(rows[0], step.singles.long()),
            lambda rows: self._chunks(rows[0], step),
        )

    def _singles(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        # Padding's slot, -1, is the spare one, which is the last.
        window = torch.cat((self.state[slots], x.unsqueeze(-1)), -1)
        self.state[slots] = window[..., 1:]
        return self._sum(window.float() * self.weight, x.dtype)

    def _chunks(self, x: torch.Tensor, step: StateStep) -> torch.Tensor:
        taps, slots = self.weight.shape[1], step.chunks.long()
        if self.kind not in step.shared:
            step.shared[self.kind] = _places(step.query_start_loc.long(), x.shape[0], taps)
        of_tokens, of_states = step.shared[self.kind]
        history = self.state[slots] * step.has_state[:, None, None]
        inputs = torch.cat((history.transpose(1, 2).flatten(0, 1), x))
        self.state[slots] = inputs[of_states].transpose(1, 2)
        return self._sum(inputs[of_tokens].transpose(1, 2).float() * self.weight, x.dtype)

    def _sum(self, products: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        found = products.sum(-1)
        return (found if self.bias is None else found + self.bias).to(dtype)


def _places(bounds: torch.Tensor, tokens: int, taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a convolution's inputs, which are K - 1 earlier ones of each chunk and then all chunks' T tokens.

    int64 [T, K], the rows that each token's taps read; [S, K - 1], the rows that are each chunk's earlier ones afterwards.
    bounds: int64 [S + 1], of the chunks' rows.
    """
    count, kept = len(bounds) - 1, taps - 1
    chunk, token = (torch.arange(length, device=bounds.device) for length in (count, tokens))
    # Rows of no chunk read those of the last one.
    of_token = torch.searchsorted(bounds[1:], token, right=True).clamp(max=count - 1)
    back = torch.arange(-kept, 1, device=bounds.device)

    def rows(of: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The rows of chunks' places, of which negative ones lie before the chunk."""
        return torch.where(
            places < 0, (of * kept + kept)[:, None] + places, (count * kept + bounds[of])[:, None] + places
        )

    of_tokens = rows(of_token, (token - bounds[of_token])[:, None] + back)
    return of_tokens, rows(chunk, bounds.diff()[:, None] + back[:-1])


@dataclass(frozen=True)
class ConvolutionRule:
    """Convolution of transformers' module."""

    convolution: nn.Conv1d

    @property
    def kind(self) -> StateKind:
        channels, _, taps = self.convolution.weight.shape
        return short_convolution(channels, taps, self.convolution.weight.dtype)

    def mixer(self, module: nn.Module, pool: StatePool, index: int) -> ShortConvolution:
        parts = dict(module.named_children())
        modules = parts["in_proj"], parts["out_proj"]
        weight, bias = self.convolution.weight.detach().squeeze(1).float(), self.convolution.bias
        own = None if bias is None else bias.detach().float()
        (state,) = pool.of_layer(index)
        first, last = map(projection_of, modules)
        singles = Singles.of(pool.max_num_seqs, pool.device)
        return ShortConvolution(first, last, modules, pool, self.kind, weight, own, singles, state)


def read_convolution(module: nn.Module) -> ConvolutionRule | None:
    """The rule of transformers' module of a layer's mixer; None if it has other parts than LFM2's."""
    parts = dict(module.named_children())
    convolution = parts.get("conv")
    return ConvolutionRule(convolution) if set(parts) == _NAMES and isinstance(convolution, nn.Conv1d) else None
