"""A conversation's message, and templates of a test's choice."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from server.text.chat_template import ChatTemplate

USER = {"role": "user", "content": "What is 日本?"}


class Templated:
    """Just what a template needs of a tokenizer, with a template of our choice."""

    def __new__(cls, embedded_folder: Path, template: str | None) -> ChatTemplate:  # type: ignore[misc]
        tokenizer = copy.copy(_loaded(embedded_folder))
        tokenizer.chat_template = template
        return ChatTemplate(tokenizer)


@functools.cache
def _loaded(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)
