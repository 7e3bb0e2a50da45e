"""Constants that all plans share with csrc/params.h: the workspace, and limits of a launch."""

from __future__ import annotations

WORKSPACE_BYTES = 32 << 20
"""Partial sums and tiled activations of a launch, allocated once for each stream."""
COUNTERS = 1 << 16
"""int32 counters beside them, zero between two launches."""
NORM_K = 16384
"""The longest rows of x that a launch normalises: NF4_NORM_K of csrc/params.h."""
