"""Grammars that bound what a sequence may generate: compiled by llguidance, cached, kept off the caller's thread."""

from __future__ import annotations

import functools
import json
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from server.engine.grammar_tokenizer import grammar_tokenizer
from server.engine.scheduling.errors import DataError
from server.engine.scheduling.sequence import Constraint
from server.types import LITERAL_CHARACTERS

CACHED_GRAMMARS = 256
QUICK_S = 0.0005
"""For this many seconds masks are found one after another; the remaining ones of the step are found on several threads."""
_UNFOLLOWABLE = "forced bytes: got", "NoExtensionBias", "lexer error", "oo many", "fuel", "limit", "max is"
"""Parts of llguidance's messages where no tokens make up what has to follow, and where it takes more than the limits."""
_SPECIAL = re.compile(rb"\xff\[\d+\]")
"""How llguidance writes a special token among bytes."""
THREADED_STEPS = 15
"""After a step whose masks took longer, this many steps have all their masks found on several threads."""


class GrammarError(DataError):
    """The grammar cannot be used, or the sequence left it; the message is one line."""


class UnfollowableError(GrammarError):
    """What follows a text in the grammar begins with a byte that no token has, or takes more than llguidance's limits."""


class GrammarState:
    """One sequence's position in its grammar."""

    def __init__(self, compiled: Future[LLMatcher], tokenizer: Future[LLTokenizer]) -> None:
        self._compiled = compiled
        self._tokenizer = tokenizer
        self._matcher: LLMatcher | None = None

    def permits(self, token: int) -> bool:
        """Whether this token may come next. Raises GrammarError.

        The first call waits until the grammar is compiled, which prefill has mostly hidden.
        """
        matcher = self.matcher()
        permitted = matcher.validate_tokens([token]) == 1
        check(matcher)
        return permitted

    @property
    def may_end(self) -> bool:
        """Whether what was generated so far is complete."""
        return self.matcher().is_accepting()

    @property
    def done(self) -> bool:
        """Whether nothing but the end can follow. A matcher that has failed stops, too; the next token shows that."""
        return self._matcher is not None and self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token: int) -> None:
        """Take a generated token. One that the grammar forbids shows as GrammarError when the next one is asked for."""
        self.matcher().consume_token(token)

    def permitted(self, tokens: list[int]) -> int:
        """Number of these tokens, which have not been sampled, that the grammar takes one after another."""
        try:
            matcher = self.matcher()
        except GrammarError:
            return 0  # the next sampled token says so
        # What fails must not fail the sequence.
        return 0 if matcher.is_error() else max(0, int(matcher.deep_copy().validate_tokens(tokens)))

    def ahead(self, token: int) -> GrammarState | None:
        """The state behind one more token, which has not been sampled; None where nothing can follow it."""
        if not self.permitted([token]):
            return None
        state = GrammarState(self._compiled, self._tokenizer)
        matcher = state._matcher = self.matcher().deep_copy()
        matcher.consume_token(token)
        return None if matcher.is_stopped() else state

    @property
    def vocab_size(self) -> int:
        """Tokens of the masks: at least the model's; more if the tokenizer has more."""
        size: int = self._tokenizer.result().vocab_size
        return size

    def matcher(self) -> LLMatcher:
        """The sequence's own matcher. Raises GrammarError; waits until the grammar is compiled."""
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        return self._matcher


class MaskFiller:
    """Finds the masks of many sequences: one after another while that is quick, otherwise on llguidance's threads.

    A mask takes about 10 us in a string of a JSON schema, and 2 ms in a regex that counts. Waking threads takes longer
    than all the masks of the former kind together.
    """

    def __init__(self, quick_s: float = QUICK_S) -> None:
        """quick_s: seconds after which masks that are left are found on several threads."""
        self._quick_s = quick_s
        self._threaded = 0
        """Number of first uses of the threads before the other way is tried again."""

    def fill(self, constraints: Sequence[Constraint], masks: npt.NDArray[np.int32]) -> dict[int, GrammarError]:
        """Write what each constraint allows next into its row of masks; gives the errors of the rows that have none.

        masks: int32 [constraints, ceil(vocabulary / 32)], contiguous; bit i of word i // 32 is token i. Rows with an error
        hold anything afterwards.
        """
        matchers: list[tuple[LLMatcher, int]] = []
        errors: dict[int, GrammarError] = {}
        found = masks
        for row, constraint in enumerate(constraints):
            assert isinstance(constraint, GrammarState)
            try:
                matchers.append((constraint.matcher(), row))
                words = -(-constraint.vocab_size // 32)
                if words != found.shape[1]:  # llguidance fills whole rows only
                    found = np.empty((len(masks), words), np.int32)
            except GrammarError as e:
                errors[row] = e
        self._fill(matchers, found)
        if found is not masks:
            masks[:] = found[:, : masks.shape[1]]
        for matcher, row in matchers:
            try:
                check(matcher)
            except GrammarError as e:
                errors[row] = e
        return errors

    def _fill(self, matchers: list[tuple[LLMatcher, int]], masks: npt.NDArray[np.int32]) -> None:
        done = 0
        if self._threaded:
            self._threaded -= 1
        else:
            until = time.perf_counter() + self._quick_s
            for matcher, row in matchers:
                fill_next_token_bitmask(matcher, masks, row)
                done += 1
                if time.perf_counter() > until:
                    break
            if len(matchers) - done > 1:
                self._threaded = THREADED_STEPS
        if done < len(matchers):
            fill_next_token_bitmask_par(_executor(), matchers[done:], masks)


def check(matcher: LLMatcher) -> None:
    """Raise GrammarError where a matcher can go no further."""
    if matcher.is_error():
        message = _line(matcher.get_error())
        raise (UnfollowableError if any(part in message for part in _UNFOLLOWABLE) else GrammarError)(message)


@functools.cache
def _executor() -> LLExecutor:
    """The threads that find masks."""
    return LLExecutor()


class Grammars:
    """Compiles grammars (llguidance's JSON form) for one checkpoint's tokenizer, in a thread of its own."""

    def __init__(self, folder: Path, vocab_size: int | None = None, eos_token_id: int | None = None) -> None:
        """vocab_size is the model's (None: the tokenizer's); eos_token_id stands for the end of a text.

        If the tokenizer has more tokens than the model, masks are as long as the tokenizer's vocabulary.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._cache: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = Lock()
        # Large vocabularies take a second; the first request with a grammar should not wait for it.
        self._tokenizer = self._thread.submit(_tokenizer, folder, vocab_size, eos_token_id)

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """The compiled grammar, from the cache where it is there; the future raises GrammarError."""
        with self._lock:
            compiled = self._cache.get(grammar)
            if compiled is None:
                compiled = self._cache[grammar] = self._thread.submit(self._compile, grammar)
                if len(self._cache) > CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(grammar)
        return compiled

    def start(self, grammar: str) -> GrammarState:
        """A sequence's own state in a grammar."""
        return GrammarState(self.compile(grammar), self._tokenizer)

    def close(self) -> None:
        """End the thread; work that it has not begun is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        # llguidance's limits bound time and memory of compilation and of each mask.
        matcher = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        check(matcher)
        forced: bytes = _SPECIAL.sub(b"", matcher.compute_ff_bytes())
        literals = [part.get(LITERAL_CHARACTERS, "") for part in json.loads(grammar)["grammars"]]
        for character in "".join([*literals, forced.decode(errors="ignore")]):
            if not self._token_bytes.issuperset(character.encode()):
                raise GrammarError(f"no tokens of this model make up {character!a} (U+{ord(character):04X})")
        if not self._token_bytes.issuperset(forced):
            raise GrammarError(f"no tokens of this model make up its first bytes, {forced!r}")
        # A grammar may compile and have no text at all: definitions that only name each other, for one.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"no text matches it ({_line(matcher.get_error())})")
        return matcher

    @functools.cached_property
    def _token_bytes(self) -> frozenset[int]:
        """All bytes that tokens have: vocabularies that have been cut have no token for some."""
        tokenizer = self._tokenizer.result()
        return frozenset(tokenizer.decode_bytes([*range(tokenizer.vocab_size)]))


def _tokenizer(folder: Path, vocab_size: int | None, eos_token_id: int | None) -> LLTokenizer:
    try:
        return grammar_tokenizer(folder, vocab_size, eos_token_id)
    except Exception as e:
        raise GrammarError(f"this model's tokenizer does not work with grammars: {_line(str(e))}") from e


def _line(message: str) -> str:
    return " ".join(message.split())[:400]
