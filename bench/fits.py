"""What models take of a GPU's memory, counted as a start counts it: python -m bench.fits writes bench/results/fits.json.

All is counted by the server's own functions, from the shapes of bench/models/. A largest step is an estimate, which a start
measures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from server.checkpoint.parts import described_by
from server.config import EngineConfig
from server.config.engine import KVCacheDtype
from server.engine.runtime.limits import SEQUENCE_LIMITS, TOKEN_BUDGETS
from server.engine.runtime.preparation.estimates import step_bytes, token_bytes

MODELS = Path(__file__).resolve().parent / "models"
RESULT = Path(__file__).resolve().parent / "results" / "fits.json"


def footprint(name: str) -> dict[str, Any]:
    """Bytes of a model of bench/models/ on a GPU: weights, of one token in the KV cache by its dtype, of a largest step.

    weights_cpu: the weights on a CPU, where what is not in NF4 is in 32 bits.
    """
    config = AutoConfig.from_pretrained(MODELS / name, local_files_only=True)
    info, text = described_by(MODELS / name, config), config.get_text_config()
    return {
        "model": name,
        "weights": info.loaded_bytes(2),
        "weights_cpu": info.loaded_bytes(4),
        "token": {dtype: token_bytes(text, EngineConfig(kv_cache_dtype=dtype)) for dtype in _CACHES},
        "step": step_bytes(text, TOKEN_BUDGETS["cuda"], SEQUENCE_LIMITS["cuda"]),
        "context": text.max_position_embeddings,
    }


_CACHES: tuple[KVCacheDtype, ...] = ("auto", "int8")


def main() -> int:
    """Write the result."""
    rows = [footprint(path.name) for path in sorted(MODELS.iterdir())]
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(row["model"], *(f"{row[key] / 2**30:.2f}" for key in ("weights", "weights_cpu", "step")), row["token"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
