"""A small model with random weights and 65536 tokens of context, for clients whose own prompts are long."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.numpy import save_file

CONTEXT = 65536
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip


def write_random_model(
    folder: Path, source: Path, http: dict[str, object] | None = None, *, brief: bool = False, hybrid: bool = False
) -> Path:
    """Put a model with the tokenizer and template of another into a folder; returns the configuration to serve it with.

    brief: one token in twenty ends an answer, for clients that set no limit; without it, random answers go on for ever.
    hybrid: the model is one of Qwen3.5's.
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
    if hybrid:
        config |= HYBRID
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
