"""GPU memory of models, by the memory plan of a start: python -m bench.fits writes bench/results/fits.json.

All is counted by the server's own functions, from the shapes of bench/models/. A largest step is an estimate, which a start
measures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from server.checkpoint.inspection import CheckpointInfo
from server.checkpoint.parts import described_by
from server.config import EngineConfig
from server.engine.runtime.preparation.plan import MemoryPlan, decide, plan_memory
from server.fits import SIZES, idle

MODELS = Path(__file__).resolve().parent / "models"
RESULT = Path(__file__).resolve().parent / "results" / "fits.json"
LEAST_TOKENS = 2048
"""With a KV cache of fewer tokens a model counts as too large."""


def footprint(name: str) -> dict[str, Any]:
    """A model of bench/models/: bytes of its weights, and tokens in the KV cache by the memory of a GPU in GiB.

    weights_cpu: the weights on a CPU, where what is not in NF4 is in 32 bits.
    """
    config = AutoConfig.from_pretrained(MODELS / name, local_files_only=True)
    info = described_by(MODELS / name, config)
    return {
        "model": name,
        "weights": info.loaded_bytes(2),
        "weights_cpu": info.loaded_bytes(4),
        "tokens": {str(size): cached_tokens(info, config, size * 2**30, EngineConfig()) for size in SIZES},
    }


def cached_tokens(info: CheckpointInfo, config: Any, total: int, engine: EngineConfig) -> int:
    """Tokens that the KV cache holds on a GPU of `total` bytes that nobody else uses; 0: too few."""
    memory = idle(total)

    def plan(chosen: EngineConfig) -> MemoryPlan:
        return plan_memory(info, config, chosen, memory)

    tokens = plan(decide(engine, plan)).tokens
    return tokens if tokens >= LEAST_TOKENS else 0


def main() -> int:
    """Write the result."""
    rows = [footprint(path.name) for path in sorted(MODELS.iterdir())]
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(row["model"], f"{row['weights'] / 2**30:.2f}", f"{row['weights_cpu'] / 2**30:.2f}", row["tokens"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
