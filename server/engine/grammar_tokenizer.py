"""A checkpoint's tokenizer as llguidance takes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from server.checkpoint.tokenizer_files import added_tokens, load_tokenizer

_MARK = re.compile(
    r"</?(think|tool_call|arg_key|arg_value|seed:.*|minimax:.*|(start|end)_function_call|escape|TOOLCALL)>|<\|.*|.*\|>"
)
"""Tokens that models write around thoughts and calls, whether they are special ones or not."""


def grammar_tokenizer(folder: Path, vocab_size: int | None, eos_token_id: int | None) -> LLTokenizer:
    """The tokenizer of a checkpoint folder; vocab_size is the model's. Raises an error of any type if there is none."""
    file = folder / "tokenizer.json"
    definition = (
        file.read_text(encoding="utf-8") if file.is_file() else load_tokenizer(folder).backend_tokenizer.to_str()
    )
    definition, size = _without_marks(_without_prefix(definition))
    try:
        return LLTokenizer(definition, n_vocab=max(size, vocab_size or 0) or None, eos_token=eos_token_id)
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


def _without_marks(definition: str) -> tuple[str, int]:
    """The tokenizer without added tokens that are text, and with names of others that no text has; its size.

    llguidance encodes forced text with the tokenizer, and fails at a special token, which stands for no text. It takes all
    added tokens of the form <...> for special ones. A token that the vocabulary itself has is text if it is none, as Gemma's
    <table> is; marks and special tokens stay, and grammars name them by their ids.
    """
    tokens, start, end = added_tokens(definition)
    rest = definition[end:]
    texts = set(re.findall(r'"(<[^"\\]*>)"', rest))
    kept = [token for token in tokens if not _in_brackets(token) or (_is_mark(token) and token["content"] in texts)]
    size = max((token["id"] + 1 for token in tokens), default=0)
    names = {token["content"]: _hidden(token["content"]) for token in kept if _is_mark(token)}
    kept = [token | {"content": names.get(token["content"], token["content"])} for token in kept]
    if kept == tokens:
        return definition, size
    written = json.dumps(kept, ensure_ascii=False)
    return f"{_renamed(definition[:start], names)}{written}{_renamed(rest, names)}", size


def _hidden(content: str) -> str:
    """A token's name that stands in no text, of the same form."""
    return f"{content[:1]}\uf8ff{content[1:]}"


def _renamed(definition: str, names: Mapping[str, str]) -> str:
    """A part of a tokenizer.json with other names of tokens; as text, because it may have tens of megabytes."""
    literals = {
        json.dumps(name, ensure_ascii=ascii_only): hidden
        for name, hidden in names.items()
        for ascii_only in (True, False)
    }
    first = "".join({re.escape(literal[1]) for literal in literals})
    if not first:
        return definition
    return re.sub(
        rf'(?<!\\)"[{first}](?:[^"\\]|\\.)*"',
        lambda found: json.dumps(literals[found[0]], ensure_ascii=False) if found[0] in literals else found[0],
        definition,
    )


def _in_brackets(token: dict[str, Any]) -> bool:
    return bool(token["content"].startswith("<") and token["content"].endswith(">"))


def _is_mark(token: dict[str, Any]) -> bool:
    """Whether an added token is never text."""
    return bool(token["special"]) or _MARK.fullmatch(token["content"]) is not None
