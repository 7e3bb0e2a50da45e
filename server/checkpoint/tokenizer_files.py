"""transformers' tokenizer of a checkpoint folder, or one line that says why there is none and what helps."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import read_json

# Where two threads import transformers at once, one of them may get half a module (an ImportError).
_importing = threading.Lock()
# The files that a tokenizer can be made of. Without any of them transformers makes an empty one for some model types.
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.json", "vocab.txt")
_NEED_PACKAGES = ("*.model", "*.tiktoken")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a checkpoint's folder, of transformers' classes; no code of the checkpoint is run.

    Raises CheckpointError with one line that names the folder or file.
    """
    _check_files(folder)
    try:
        with _importing:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as e:
        _check_config(folder)
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: {_reason(folder, e)}") from e
    # Multimodal checkpoints of transformers 4.x have the template in a file that only their processors read.
    template = folder / "chat_template.json"
    if not tokenizer.chat_template and template.exists():
        tokenizer.chat_template = read_json(template).get("chat_template")
    return tokenizer


def added_tokens(definition: str) -> tuple[list[dict[str, Any]], int, int]:
    """The added tokens in a tokenizer.json, and where their array stands; the file itself may have tens of megabytes."""
    found = re.search(r'"added_tokens"\s*:\s*(?=\[)', definition)
    if found is None:
        return [], 0, 0
    tokens, end = json.JSONDecoder().raw_decode(definition, found.end())
    return tokens, found.end(), end


def tokenizers_end(folder: Path) -> int | None:
    """Id of the token that ends a text to the tokenizer, which fine-tunes change without the model's configuration."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        end = read_json(folder / name).get("eos_token") if (folder / name).exists() else None
        text = end.get("content") if isinstance(end, dict) else end
        if isinstance(text, str):
            tokens, *_ = added_tokens(file.read_text(encoding="utf-8"))
            return next((token["id"] for token in tokens if token["content"] == text), None)
    return None


def check_same_vocabulary(folder: Path, other: Path) -> None:
    """Raise CheckpointError where the tokens of two checkpoint folders differ in a text or in an id."""
    mine, theirs = load_tokenizer(folder).get_vocab(), load_tokenizer(other).get_vocab()
    if mine == theirs:
        return
    different = {text for text, _ in mine.items() ^ theirs.items()}
    example = min(different, key=lambda text: (min(mine.get(text, 1 << 62), theirs.get(text, 1 << 62)), text))
    raise CheckpointError(
        f"{other}: its tokenizer is not that of {folder}, which a draft model needs: {len(different)} tokens differ, among"
        f" them {example!r} ({mine.get(example, 'none')} there, {theirs.get(example, 'none')} here)"
    )


def _check_files(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).exists():
            read_json(folder / name)
    if any((folder / name).exists() for name in _VOCABULARIES):
        return
    if not any(True for pattern in _NEED_PACKAGES for _ in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder}: it has no tokenizer (tokenizer.json); copy the tokenizer's files of the model that it was made from"
        )


def _check_config(folder: Path) -> None:
    """Raise CheckpointError for a config.json that transformers refuses, which it reads for a tokenizer, too."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as e:
        if not (folder / "config.json").exists() or "model type" in str(e):
            return  # a type that transformers does not know is no matter to a tokenizer
        reason = " ".join(str(e).split())
        raise CheckpointError(f"{folder / 'config.json'}: transformers cannot read it: {reason[:300]}") from e


def _reason(folder: Path, error: Exception) -> str:
    """Why the tokenizer cannot be loaded, and what helps where that is known."""
    packed = [file for pattern in _NEED_PACKAGES for file in sorted(folder.glob(pattern))]
    if packed and not (folder / "tokenizer.json").exists():
        package = "tiktoken" if _is_tiktoken(packed[0]) else "sentencepiece"
        try:
            __import__(package)
        except ImportError:
            return (
                f"there is only {packed[0].name}, which another package reads: pip install {package}, or copy the"
                " tokenizer.json of the model that it was made from"
            )
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _is_tiktoken(file: Path) -> bool:
    """Whether a vocabulary is tiktoken's lines of base64 and ranks, not SentencePiece's protocol buffer."""
    try:
        with file.open("rb") as stream:
            words = stream.readline(4096).split()
    except OSError:
        return False
    return len(words) == 2 and words[1].isdigit()
