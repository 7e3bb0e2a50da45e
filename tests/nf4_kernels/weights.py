"""Fresh random NF4 weights, quantized by bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from bitsandbytes.functional import QuantState, quantize_4bit

from nf4_kernels.format import Weight


@dataclass(frozen=True)
class Quantized:
    """One weight as bitsandbytes has it and as the ops take it."""

    packed: torch.Tensor
    state: QuantState
    weight: Weight

    @property
    def nested(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The ops' last three arguments."""
        return self.weight.nested


def quantized(
    shape: tuple[int, ...],
    blocksize: int,
    nested: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
    table: str = "nf4",
) -> Quantized:
    """A normal random weight with a few outliers, in NF4 or FP4."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 0.02
    values.view(-1)[:: max(1, values.numel() // 7)] *= 20
    packed, state = quantize_4bit(
        values.to(dtype), blocksize=blocksize, quant_type=table, compress_statistics=nested, quant_storage=torch.uint8
    )
    return Quantized(packed, state, Weight.from_quant_state(packed, state, (table,)))
