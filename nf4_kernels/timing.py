"""Clocks of the NF4 work in this process: seconds spent in dequantization, and in linear layers as a whole.

CPU: monotonic wall time, taken by the library around every call. dequant counts dequantize calls and, within linear, the
stages that expand weights into a panel of their own; kernels for few rows decode weights in the registers of the product
and count under linear only. linear counts linear calls from end to end.
"""

from __future__ import annotations

from nf4_kernels import cpu


def read() -> tuple[float, float]:
    """(dequant seconds, linear seconds) since the process began; take the difference of two readings."""
    return cpu.clock()
