"""Errors between text and tokens."""

from __future__ import annotations


class TokenizerError(Exception):
    """The checkpoint's tokenizer cannot be used; the message is one line."""


class PromptError(Exception):
    """A client's messages cannot be made into a prompt; the message is for the client."""
