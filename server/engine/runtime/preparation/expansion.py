"""Memory for 16-bit copies of NF4 weights."""

from __future__ import annotations

import torch

from server.config import EngineConfig
from server.engine.runtime.limits import EngineConfigError
from server.engine.runtime.memory import reserve
from server.engine.runtime.model.expanded import AUTO_SHARE, AUTO_SHARE_BESIDE_CACHE


def expansion_budget(device: torch.device, config: EngineConfig, kept: int = 0) -> int:
    """Bytes for copies on a device that holds the NF4 weights already.

    kept: bytes for what comes before copies that nobody asked for: a useful KV cache, states, adapters and a step.
    Raises EngineConfigError where the configuration asks for copies that nothing would use, or that do not fit.
    """
    wanted = config.expanded_weights
    usable = device.type == "cuda" and not config.batch_invariant
    if wanted == "off" or (wanted == "auto" and not usable):
        return 0
    if isinstance(wanted, int) and wanted > 0 and not usable:
        reason = (
            "batch_invariant is on, whose steps all have few tokens" if config.batch_invariant else "they need CUDA"
        )
        raise EngineConfigError(f"engine.expanded_weights asks for copies of the weights, and {reason}")
    if wanted == 0:
        return 0
    free, total = torch.cuda.mem_get_info(device)
    left = max(0, free - reserve(device, total) - (config.kv_cache_bytes or 0))
    if wanted == "auto":
        share = left * (AUTO_SHARE if config.kv_cache_bytes is None else AUTO_SHARE_BESIDE_CACHE)
        return int(min(share, max(0, left - kept)))
    if wanted > left:
        raise EngineConfigError(
            f"engine.expanded_weights is {wanted} bytes; beside the NF4 weights and the KV cache {left} are free"
        )
    return wanted
