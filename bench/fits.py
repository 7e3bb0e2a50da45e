"""What models take of a GPU's memory, counted as a start counts it: python -m bench.fits writes bench/results/fits.json.

Weights, keys and values are counted by the server's own functions, from the shapes of bench/models/. A largest step,
which the server measures, is estimated here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from server.checkpoint.inspection import CheckpointInfo
from server.engine.runtime.attention.base import LayerShape
from server.engine.runtime.attention.kernels.kv_cache import bytes_per_token
from server.engine.runtime.limits import SEQUENCE_LIMITS, TOKEN_BUDGETS

MODELS = Path(__file__).resolve().parent / "models"
RESULT = Path(__file__).resolve().parent / "results" / "fits.json"


def footprint(name: str) -> dict[str, Any]:
    """Bytes of a model of bench/models/ on a GPU: weights, of one token in the KV cache by its dtype, of a largest step.

    weights_cpu: the weights on a CPU, where what is not in NF4 is in 32 bits.
    """
    config = AutoConfig.from_pretrained(MODELS / name, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    info = CheckpointInfo(MODELS / name, config.model_type, "", "none", {n: ("BF16", s) for n, s in shapes.items()})
    text = config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    shape = LayerShape(text.num_key_value_heads, width, width, heads)
    layers = text.num_hidden_layers
    caches = {kind: layers * bytes_per_token(shape, dtype) for kind, dtype in _CACHES.items()}
    return {
        "model": name,
        "weights": info.loaded_bytes(2),
        "weights_cpu": info.loaded_bytes(4),
        "token": caches,
        "step": _step_bytes(text, max(rows * columns for rows, columns in _matrices(shapes))),
        "context": text.max_position_embeddings,
    }


_CACHES = {"auto": torch.bfloat16, "int8": torch.int8}


def _matrices(shapes: dict[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [shape for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name and "head" not in name]


def _step_bytes(text: Any, largest_weight: int) -> int:
    """About what a largest step holds: activations of a layer, one weight in 16 bits, logits in 32."""
    inner = text.intermediate_size
    if experts := getattr(text, "num_experts_per_tok", None):
        inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
    activations = TOKEN_BUDGETS["cuda"] * (3 * inner + 6 * text.hidden_size) * 2
    return int(activations + 2 * largest_weight + 12 * SEQUENCE_LIMITS["cuda"] * text.vocab_size)


def main() -> int:
    """Write the result."""
    rows = [footprint(path.name) for path in sorted(MODELS.iterdir())]
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(row["model"], *(f"{row[key] / 2**30:.2f}" for key in ("weights", "weights_cpu", "step")), row["token"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
