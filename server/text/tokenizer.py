"""The checkpoint's tokenizer: text to ids, chat messages to ids, ids to text. Needs no torch."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from server.checkpoint.base import CheckpointError
from server.checkpoint.tokenizer_files import load_tokenizer
from server.text.chat_template import ChatTemplate
from server.text.detokenizer import ByteDetokenizer, Detokenizer, TokenBytes, WindowDetokenizer
from server.text.errors import TokenizerError
from server.text.vocabulary import Vocabulary

T = TypeVar("T")

# Shorter texts are tokenized in the event loop: that takes about 0.5 ms at most, for which a thread is not worthwhile.
INLINE_CHARACTERS = 1500


class Tokenizer:
    """One checkpoint's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizer is called directly: transformers' own call sets truncation and padding on it first, which
        # fails when another thread is encoding. Tokenizers in Python have no such object and get a lock.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._longest_token = _longest_token(self._backend)
        self.vocabulary = Vocabulary(tokenizer)
        self.chat_template = ChatTemplate(tokenizer)
        self._tables = {skip: TokenBytes(self.vocabulary, skip_special_tokens=skip) for skip in (False, True)}
        self.dialect = self.chat_template.dialect
        kept = frozenset(i for mark in self.dialect.marks if (i := self.special_id(mark)) is not None)
        self._marked_table = TokenBytes(self.vocabulary, skip_special_tokens=True, kept=kept)
        # With one thread, prompts of many megabytes take one core at most from the engine.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer files of a checkpoint folder; no code of the checkpoint is run.

        Raises TokenizerError with one line that names the folder.
        """
        # Texts are encoded one at a time; the Rust thread pool would only make processes started later complain.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            return cls(load_tokenizer(folder))
        except CheckpointError as e:
            raise TokenizerError(str(e)) from e

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; add_special_tokens puts the tokenizer's own (a BOS, most often) around it."""
        if self._backend is not None:
            # Only the backend's methods for batches let other threads run meanwhile; "fast" leaves out offsets.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return ids
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a prompt that the chat template has rendered; the template writes the special tokens itself."""
        if not self.chat_template.guard.is_marked(text):
            return self.encode(text, add_special_tokens=False)
        return self.chat_template.guard.encode(
            text, lambda piece: self.encode(piece, add_special_tokens=False), self.encode_plain
        )

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens are text, too."""
        backend = self._backend
        if backend is None:
            with self._lock:
                return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        # The pipeline without its added tokens; the switch for that is a state that all threads share.
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        splits = [text]
        if backend.pre_tokenizer is not None:
            splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for split in splits for token in backend.model.tokenize(split)]

    def special_id(self, text: str) -> int | None:
        """Id of the special token that is written so; None for other texts."""
        return self.vocabulary.special_ids_by_text.get(text)

    def mark_id(self, text: str) -> int | None:
        """Id of the token that a grammar has to name for this mark; None for a mark that is text in a grammar."""
        return self.vocabulary.mark_ids_by_text.get(text)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, found without encoding; 0 where nothing can be said."""
        return -(-len(text) // self._longest_token) if self._longest_token else 0

    async def off_loop(self, characters: int, call: Callable[[], T]) -> T:
        """Run an encoding call: here for a short text, in the tokenizer's thread for a long one."""
        if characters < INLINE_CHARACTERS:
            return call()
        context = contextvars.copy_context()  # of the request, which errors and log lines are about
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: context.run(call))

    def detokenizer(
        self, *, skip_special_tokens: bool = True, at_start: bool = True, keep_marks: bool = False
    ) -> Detokenizer:
        """A new detokenizer for one sequence.

        at_start: the text begins with this sequence, so a tokenizer that writes a space before every first word has it
        dropped; False for text that goes on from a prompt. keep_marks: the dialect's marks are written out although
        special tokens are skipped.
        """
        if self.vocabulary.kind == "other":
            return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))
        strip = at_start and self.vocabulary.strips_leading_space
        table = self._marked_table if keep_marks and skip_special_tokens else self._tables[skip_special_tokens]
        return ByteDetokenizer(table, strip_leading_space=strip)

    def hidden(self, *, keep_marks: bool) -> dict[str, int]:
        """Special tokens that leave no text where special tokens are skipped, and their ids; see detokenizer()."""
        kept = self.dialect.marks if keep_marks and self.vocabulary.kind != "other" else ()
        return {text: i for text, i in self.vocabulary.special_ids_by_text.items() if text not in kept}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence at once."""
        if self._backend is not None:
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return text
        with self._lock:
            return str(
                self._tokenizer.decode(
                    list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
                )
            )

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token (special ones written out), for log-probabilities."""
        return self._tables[False][token_id]

    def close(self) -> None:
        """End the tokenizer's thread; encodings that have not begun are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _longest_token(backend: Any) -> int | None:
    """Characters in the longest token; None when the tokenizer may shorten a text before it splits it."""
    if backend is None:
        return None
    if backend.normalizer is not None:
        state = json.loads(backend.normalizer.__getstate__())
        stages = state["normalizers"] if state["type"] == "Sequence" else [state]
        if any(stage["type"] not in ("Prepend", "NFC") and not _keeps_length(stage) for stage in stages):
            return None
    return max(map(len, backend.get_vocab(with_added_tokens=True)), default=None)


def _keeps_length(stage: dict[str, Any]) -> bool:
    pattern = stage.get("pattern", {})
    return stage["type"] == "Replace" and len(pattern.get("String", "")) == len(stage.get("content", "")) == 1
