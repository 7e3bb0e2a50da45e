"""NF4 (bitsandbytes 4-bit) kernels for CPU and CUDA; needs torch only, works with bitsandbytes and transformers.

>>> import nf4_kernels
>>> nf4_kernels.enable()        # every bitsandbytes Linear4bit layer runs on these kernels from here on
>>> nf4_kernels.capabilities()  # which kernels run here, and why others do not
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nf4_kernels import cpu, cuda, ops
from nf4_kernels.cuda.device import capability
from nf4_kernels.format import Weight

__version__ = "0.2.0"

__all__ = [
    "Weight",
    "__version__",
    "capabilities",
    "dequantize_4bit",
    "disable",
    "enable",
    "linear_4bit",
]


def dequantize_4bit(packed: Tensor, quant_state: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The weight that a bitsandbytes QuantState (or a Weight) describes, in dtype (default: the state's own).

    Bit-exact to bitsandbytes. ValueError for FP4, for nested blocks other than 256 and for tensors that are too small.
    """
    wanted = dtype or getattr(quant_state, "dtype", torch.float32)
    out: Tensor = torch.ops.nf4.dequantize(*_weight(packed, quant_state).arguments(), wanted)
    return out


def linear_4bit(x: Tensor, packed: Tensor, quant_state: Any, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times the transposed weight [N, K] plus bias [N]: [..., N] in x's dtype (float32, bfloat16, float16).

    quant_state: a bitsandbytes QuantState or a Weight. Accumulates in float32. Raises ValueError as dequantize_4bit()
    does.
    """
    out: Tensor = torch.ops.nf4.linear(x, *_weight(packed, quant_state).arguments(), bias)
    return out


def _weight(packed: Tensor, quant_state: Any) -> Weight:
    if isinstance(quant_state, Weight):
        return replace(quant_state, packed=packed.reshape(-1).view(torch.uint8))
    return Weight.from_quant_state(packed, quant_state)


def enable() -> None:
    """Run every bitsandbytes Linear4bit layer of this process on these kernels. ImportError without bitsandbytes >= 0.50."""
    try:
        from nf4_kernels import bnb
    except ImportError as e:
        raise ImportError(f"nf4_kernels.enable() needs bitsandbytes 0.50 or newer: {e}") from e

    bnb.enable()


def disable() -> None:
    """Undo enable()."""
    from nf4_kernels import bnb

    bnb.disable()


def capabilities() -> dict[str, str]:
    """Per device type, which kernels run ("avx2") or why none do ("unavailable: ...")."""
    cpu_error, cuda_error = cpu.load_error(), cuda.load_error()
    return {
        "cpu": f"unavailable: {cpu_error}" if cpu_error else cpu.isa(),
        "cuda": f"unavailable: {cuda_error}" if cuda_error else _gpu(),
    }


def _gpu() -> str:
    own, posed = torch.cuda.get_device_capability(), capability(torch.device("cuda"))
    name = torch.cuda.get_device_name()
    return f"sm_{posed[0]}{posed[1]} ({name if posed == own else f'{name}, posing'})"


_registered = ops  # imported because it registers torch.ops.nf4
