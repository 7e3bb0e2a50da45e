"""Convert a GGUF file into a bitsandbytes NF4 checkpoint: python -m server.checkpoint.embedded.convert FILE.gguf FOLDER."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import gguf as gguf_files
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig


def convert(gguf: Path, target: Path) -> None:
    """Write the model in gguf to the folder target: NF4, blocks of 64, double quantization, tokenizer, template.

    transformers takes GGUF and bitsandbytes one at a time, so the weights go through a bfloat16 checkpoint beside the
    target. The result is saved before any forward pass: bitsandbytes' CPU path repacks weights lossily in place.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as plain:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        # transformers refuses to save a model that still has its GGUF quantizer.
        model.hf_quantizer = None
        model.is_quantized = False
        del model.config.quantization_config
        model.save_pretrained(plain)
        del model
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantization, dtype=torch.bfloat16)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    _compute_in_float32(target / "config.json")


def _compute_in_float32(config: Path) -> None:
    """Ask for float32 arithmetic in config.json.

    The stored numbers stay bfloat16 and NF4. In bfloat16 this small model's two best logits are often equal, so greedy
    answers would depend on the order of additions; in float32 they do not.
    """
    settings = json.loads(config.read_text())
    settings["dtype"] = "float32"
    config.write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    # transformers parses the file for the tokenizer, the configuration and the weights, and makes the map for each module:
    # a third of the conversion's time.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf_files, name, functools.cache(getattr(gguf_files, name)))
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
