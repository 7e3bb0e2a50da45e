"""The server whose pages the browser looks at, and a small model for it that says plain words, fast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.adapters import save_adapter
from tests.api.conftest import MODEL
from tests.conftest import RunningServer, start_server

KEY = "secret-key"
ADAPTER = "sql-adapter"
CONTEXT = 65536
WORDS = ("the", "of", "and", "a", "house", "light", "sea", "rooms", "stairs", "lamp", "ship", "wind", "night", "storm")
# Thoughts are opened where a request asks for reasoning.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}{# </think> #}"
)


def write_words_model(folder: Path, embedded_folder: Path) -> None:
    """A Llama of two layers with the embedded model's tokenizer, that goes on with one of WORDS or with a new paragraph.

    The first feature of every embedding is large and the layers add little to it; by its sign in the output layer a token
    is a word or none. What the other features add makes the words differ.
    """
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    words = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in WORDS]
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT, eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()[:, 0] = 4
        head = model.lm_head.weight.normal_(std=0.1)
        head[:, 0] = -4
        head[[ids[0] for ids in words], 0] = 4
        head[tokenizer.encode("\n\n", add_special_tokens=False), 0] = 3.5
    model.save_pretrained(folder)
    for file in embedded_folder.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges")):
            (folder / file.name).symlink_to(file)


def write_settings(model: Path, folder: Path) -> dict[str, Any]:
    """A configuration for a model with a key, an adapter, and a template that thinks when it is asked to."""
    served = folder / "model"
    served.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (served / file.name).symlink_to(file)
    (served / "chat_template.jinja").write_text(TEMPLATE)
    # PEFT needs the layers' shapes only.
    config = AutoConfig.from_pretrained(model)
    config.quantization_config = None
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config)
    save_adapter(shapes.to_empty(device="cpu"), folder / "adapter", 1, 0.01, r=4, target_modules=["q_proj"])
    return {
        "model": str(served),
        "served_model_name": MODEL,
        "http": {"api_keys": [KEY]},
        "engine": {"lora_modules": [{"name": ADAPTER, "path": str(folder / "adapter")}]},
    }


@contextlib.contextmanager
def serve_pages(model: Path, folder: Path, *, compiled: bool = False, loading: bool = False) -> Iterator[RunningServer]:
    """A server for the pages; its settings and its log are in folder.

    compiled: as fast as users have it. loading: it listens, and its model may not be loaded.
    """
    config = write_settings(model, folder)
    with start_server(folder / "log", config=config, eager=not compiled, loading=loading) as running:
        yield running
