"""Steps of few tokens on CPU as one C call for all layers, made of written layers.

A layer is eight calls of C functions. Python and torch's dispatch between them take as long as the GEMMs do for few tokens.
So the calls are put together once for a number of tokens, with buffers that stay where they are; what changes from step to
step is copied into them or, for attention, read from the backend's description of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nf4_kernels import cpu
from nf4_kernels.cpu import PreparedLinear
from server.engine.runtime import pointwise
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend
from server.engine.runtime.batch import Batch
from server.engine.runtime.layers.attention import Attention
from server.engine.runtime.layers.decoder import DecoderLayer
from server.engine.runtime.layers.mlp import IN_LAUNCH, GatedMlp
from server.engine.runtime.layers.norm import Norm, RmsNorm, read_rms_norm
from server.engine.runtime.layers.outer import fixed_frequencies
from server.engine.runtime.layers.projection import JoinedProjection, ModuleProjection, Projection
from server.engine.runtime.model.cpu_linear import CpuNF4Linear
from server.engine.runtime.model.decoder import outer_modules
from server.engine.runtime.pointwise import Call, Calls

MAX_TOKENS = 64
"""Larger steps are computed layer by layer: what is between their GEMMs is a small part of them."""


class UnsuitableError(Exception):
    """A model has something that no C function here computes; the message says what."""


class SmallSteps:
    """Computes steps of up to MAX_TOKENS tokens without the model's class."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[DecoderLayer], backend: PagedCpuBackend) -> None:
        """Raises UnsuitableError."""
        config: Any = model.config.get_text_config()
        self._backend = backend
        self._layers = [_Layer(layer) for layer in layers]
        self._embedding: Any = model.get_input_embeddings()
        self._head: Any = model.get_output_embeddings()
        outer = outer_modules(model)
        norms = [norm for norm in map(read_rms_norm, outer) if norm is not None]
        angles = [found for found in map(fixed_frequencies, outer) if found is not None]
        if len(outer) != 2 or len(norms) != 1 or len(angles) != 1:
            raise UnsuitableError(f"around its layers the model has {', '.join(type(m).__name__ for m in outer)}")
        self._norm, (self._frequencies, self._scaling) = norms[0], angles[0]
        self._width = int(config.hidden_size)
        # By tokens and threads, which calls have among their arguments.
        self._programs: dict[tuple[int, int], _Program] = {}
        # Without an instruction set of their own more tokens are torch's GEMMs.
        self._max_tokens = MAX_TOKENS if cpu.isa() != "portable" else min(MAX_TOKENS, cpu.DEQUANTIZED_FROM - 1)
        if not pointwise.computes(self._norm.weight):
            raise UnsuitableError(f"the model is in {self._norm.weight.dtype}")

    def takes(self, batch: Batch) -> bool:
        """Whether run() computes a batch."""
        return batch.num_tokens <= self._max_tokens and batch.images is None and not batch.spans.adapted

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [batch.sampled_rows, vocabulary] in float32 of a batch that takes() has taken; writes the cache."""
        self._backend.begin(batch)
        size = batch.num_tokens, torch.get_num_threads()
        program = self._programs.get(size)
        if program is None:
            program = self._programs[size] = self._program(batch.num_tokens)
        program.positions.copy_(batch.positions)
        program.hidden.copy_(self._embedding(batch.ids))
        program.calls.make()
        logits: torch.Tensor = self._head(program.result[batch.sampled_rows]).float()
        return logits

    def _program(self, tokens: int) -> _Program:
        program = _Program(tokens, self._width, self._frequencies, self._scaling)
        for layer in self._layers:
            layer.add_to(program, self._backend)
        program.end(self._norm)
        return program


class _Program:
    """The calls of a step of a number of tokens, and the buffers between them."""

    def __init__(self, tokens: int, width: int, frequencies: torch.Tensor, scaling: float) -> None:
        columns = 2 * frequencies.shape[0]
        self._tokens = tokens
        self.positions = torch.zeros(tokens, dtype=torch.int64)
        self.hidden = torch.zeros(tokens, width)
        """The residual stream."""
        self.normalised, self.result = torch.zeros(tokens, width), torch.zeros(tokens, width)
        self.cos, self.sin = torch.zeros(tokens, columns), torch.zeros(tokens, columns)
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._list = [pointwise.angles(self.positions, frequencies, scaling, self.cos, self.sin)]
        self._addend: torch.Tensor | None = None
        self.calls: Calls

    def buffer(self, name: str, columns: int) -> torch.Tensor:
        """[tokens, columns], which all layers share."""
        key = name, columns
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(self._tokens, columns)
        return self._buffers[key]

    def add(self, call: Call) -> None:
        """Add a call."""
        self._list.append(call)

    def normalise(self, norm: RmsNorm, out: torch.Tensor) -> None:
        """out = norm(hidden), once what is to be added to hidden has been added."""
        addend, self._addend = self._addend, None
        self.add(pointwise.norm(self.hidden, norm.weight, norm.eps, norm.offset, out, addend=addend))

    def linear(self, prepared: PreparedLinear, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = the GEMM of x."""
        function, arguments = prepared.call_of(x, out)
        self.add(Call(function, arguments, (prepared, x, out)))

    def add_to_hidden(self, y: torch.Tensor, norm: RmsNorm | None) -> None:
        """hidden += y, or norm(y)."""
        if norm is None:
            self._addend = y
        else:
            self.add(pointwise.norm(y, norm.weight, norm.eps, norm.offset, self.hidden, residual=self.hidden))

    def end(self, norm: RmsNorm) -> None:
        """Give norm(hidden) as the result."""
        self.normalise(norm, self.result)
        self.calls = Calls(self._list)


class _Layer:
    """A written layer whose parts all have C functions."""

    def __init__(self, layer: DecoderLayer) -> None:
        """Raises UnsuitableError."""
        attention, mlp = layer.mixer, layer.mlp
        blocks = layer.mixer_block, layer.mlp_block
        if not isinstance(attention, Attention) or attention.has_gate:
            raise UnsuitableError("layers have states, latents, or attention with gates")
        if any(block.multiplier != 1.0 for block in blocks) or layer.scale is not None:
            raise UnsuitableError("layers multiply what they add, or their result")
        if not isinstance(mlp, GatedMlp) or mlp.activation not in IN_LAUNCH:
            raise UnsuitableError("layers have no gates, or an activation of their own")
        others = attention.row_norms, attention.value_norm, None if attention.is_rotary else attention.head_norms
        if attention.angles_once or attention.rotates_first or any(norms is not None for norms in others):
            raise UnsuitableError("heads are rotated or normalised in another way")
        self._attention: Attention = attention
        self._activation: str = mlp.activation
        self._norms = [_before(blocks[0].before), _before(blocks[1].before)]
        self._after = [_after(block.after) for block in blocks]
        self._qkv, self._output = _prepared_all(attention.qkv), _prepared(attention.output)
        self._gate_up, self._down = _prepared(mlp.gate_up), _prepared(mlp.down)

    def add_to(self, program: _Program, backend: PagedCpuBackend) -> None:
        """Add the layer's calls to a program."""
        attention, x = self._attention, program.normalised
        program.normalise(self._norms[0], x)
        heads = self._heads(program, x)
        if attention.is_rotary:
            for rows, norm in zip(heads, attention.head_norms or (None, None), strict=False):
                given = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.offset)
                program.add(pointwise.rotate(rows, program.cos, program.sin, *given))
        attended = program.buffer("attended", self._output.k)
        out = attended.unflatten(-1, (heads[0].shape[1], -1))
        query, key, value = heads
        function, arguments, kept = backend.call_of(attention.layer, query, key, value, out)
        program.add(Call(function, arguments, (kept, query, key, value, out)))
        self._linear_to_hidden(program, self._output, attended, 0)
        program.normalise(self._norms[1], x)
        gate_up = program.buffer("gate_up", self._gate_up.n)
        program.linear(self._gate_up, x, gate_up)
        inner = program.buffer("inner", self._gate_up.n // 2)
        program.add(pointwise.gate(gate_up, self._activation, inner))
        self._linear_to_hidden(program, self._down, inner, 1)

    def _heads(self, program: _Program, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values [T, heads, dim]."""
        attention = self._attention
        rows = []
        for index, prepared in enumerate(self._qkv):
            rows.append(program.buffer(f"qkv {index}", prepared.n))
            program.linear(prepared, x, rows[-1])
        if len(rows) == 1:
            rows = list(rows[0].split(attention.qkv.sizes, -1))
        return [part.unflatten(-1, (-1, attention.head_dim)) for part in rows]

    def _linear_to_hidden(self, program: _Program, prepared: PreparedLinear, x: torch.Tensor, place: int) -> None:
        y = program.buffer(f"to hidden {place}", prepared.n)
        program.linear(prepared, x, y)
        program.add_to_hidden(y, self._after[place])


def _before(norm: Norm | None) -> RmsNorm:
    if not isinstance(norm, RmsNorm):
        raise UnsuitableError(f"layers have {type(norm).__name__} before their parts")
    return norm


def _after(norm: Norm | None) -> RmsNorm | None:
    return None if norm is None else _before(norm)


def _prepared(projection: Projection | JoinedProjection) -> PreparedLinear:
    module: nn.Module | None = projection.module if isinstance(projection, ModuleProjection) else None
    if not isinstance(module, CpuNF4Linear):
        raise UnsuitableError(f"a projection is of class {type(module or projection).__name__}")
    return module.prepared


def _prepared_all(joined: JoinedProjection) -> list[PreparedLinear]:
    return [_prepared(projection) for projection in joined.projections]
