"""A checkpoint's tokenizer as llguidance takes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from llguidance import LLTokenizer

from server.checkpoint.tokenizer_files import load_tokenizer


def grammar_tokenizer(folder: Path, vocab_size: int | None, eos_token_id: int | None) -> LLTokenizer:
    """The tokenizer of a checkpoint folder; vocab_size is the model's. Raises an error of any type if there is none."""
    file = folder / "tokenizer.json"
    definition = (
        file.read_text(encoding="utf-8") if file.is_file() else load_tokenizer(folder).backend_tokenizer.to_str()
    )
    definition = _without_prefix(definition)
    try:
        return LLTokenizer(definition, n_vocab=vocab_size, eos_token=eos_token_id)
    except ValueError:  # it refuses a size below the tokenizer's own
        return LLTokenizer(definition, eos_token=eos_token_id)


def _without_prefix(definition: str) -> str:
    """The tokenizer without the space that byte-level ones may put in front of a text.

    llguidance encodes pieces of an answer with it, which begin no text.
    """
    if re.search(r'"add_prefix_space"\s*:\s*true', definition) is None:
        return definition  # which may have tens of megabytes
    document = json.loads(definition)
    stages = document.get("pre_tokenizer") or {}
    for stage in stages.get("pretokenizers", [stages]):
        if stage.get("type") == "ByteLevel":
            stage["add_prefix_space"] = False
    return json.dumps(document, ensure_ascii=False)
