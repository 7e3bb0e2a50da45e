"""A small model with random weights and 65536 tokens of context, for clients whose own prompts are long."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.numpy import save_file

CONTEXT = 65536


def write_random_model(
    folder: Path, source: Path, http: dict[str, object] | None = None, *, brief: bool = False
) -> Path:
    """Put a model with the tokenizer and template of another into a folder; returns the configuration to serve it with.

    brief: one token in twenty ends an answer, for clients that set no limit; without it, random answers go on for ever.
    """
    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "generation_config.json", "model.safetensors"):
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    config |= {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    if brief:
        config["eos_token_id"] = [2, *range(1000, 49000, 20)]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({}, folder / "model.safetensors")
    settings = {
        "model": str(folder),
        "served_model_name": ["smollm2-135m-instruct", "second-name"],
        "http": http or {},
        "engine": {
            "load_format": "dummy", "standby": False, "enforce_eager": True, "threads": 1, "kv_cache_bytes": 400_000_000,
            "embeddings": True,
        },
    }  # fmt: skip
    path = folder / "serve.yaml"
    path.write_text(json.dumps(settings))
    return path
