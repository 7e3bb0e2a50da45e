"""The experts of one layer in NF4, in the place of transformers' module of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import nf4_kernels  # noqa: F401 - registers torch.ops.nf4
from nf4_kernels import Weight


class StackedWeight(nn.Module):
    """One projection of all experts, [experts, n, k] in NF4. bias is [experts, n] in the model's dtype.

    All of the ops' arguments are buffers, so that one compiled function serves all layers.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    absmax_8bit: torch.Tensor | None
    absmax_code: torch.Tensor | None
    absmax_offset: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, weight: Weight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.shape = [int(size) for size in weight.shape]
        self.blocksize = weight.blocksize
        tensors = (weight.packed, weight.absmax, *weight.nested, bias)
        names = ("packed", "absmax", "absmax_8bit", "absmax_code", "absmax_offset", "bias")
        for name, tensor in zip(names, tensors, strict=True):
            self.register_buffer(name, tensor, persistent=False)

    @property
    def weight(self) -> Weight:
        """The weight as the kernels' library has it."""
        return Weight(self.packed, tuple(self.shape), self.absmax, self.blocksize, *self.nested)

    @property
    def codes(self) -> tuple[Any, ...]:
        """The ops' arguments after x that describe the weight."""
        return self.packed, self.shape, self.absmax, self.blocksize

    @property
    def nested(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The ops' last arguments."""
        return self.absmax_8bit, self.absmax_code, self.absmax_offset

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(tensor.nbytes for tensor in (self.packed, self.absmax, *self.nested) if tensor is not None)


class NF4Experts(nn.Module):
    """A layer's experts: down(activation(gate x) * up x) of the experts that each token's router chose, weighted.

    gate_up [experts, 2 f, hidden] has f rows of gates, then f of ups; down is [experts, hidden, f].
    """

    def __init__(self, gate_up: StackedWeight, down: StackedWeight, activation: str) -> None:
        super().__init__()
        self.num_experts = gate_up.shape[0]
        self.activation = activation
        self.gate_up = gate_up
        self.down = down

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden], the others [tokens, top_k]: [tokens, hidden].

        Each expert's output is rounded to the dtype of hidden_states, as transformers does; their weighted sum is float32,
        rounded once.
        """
        experts = top_k_index.to(torch.int32)
        gate_up, down = self.gate_up, self.down
        inner = torch.ops.nf4.moe_gated_linear(
            hidden_states, *gate_up.codes, experts, self.activation, gate_up.bias, *gate_up.nested
        )
        out: torch.Tensor = torch.ops.nf4.moe_linear(
            inner, *down.codes, experts, down.bias, top_k_weights.float(), *down.nested, follows_gated=True
        )
        return out

    def extra_repr(self) -> str:
        """What print(model) says of it."""
        return f"experts={self.num_experts}, gate_up={self.gate_up.shape}, down={self.down.shape}"
