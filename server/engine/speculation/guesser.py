"""One sequence's guesses: the tokens that followed its newest tokens earlier in its text, and how likely they are right."""

from __future__ import annotations

from server.engine.scheduling.sequence import Owner
from server.engine.speculation.shared_store import SharedStore
from server.engine.speculation.suffixes import END, IndexReader, SuffixIndex

_LONGEST = 24
# Suffixes from one of these lengths up to the next share one learned rate.
_STEPS = (1, 2, 3, 4, 6, 9, 14, 22)
# How often the token is right that followed the longest suffix before, until the sequence's own answer says otherwise: in
# the embedded model's answers to bench.speculation.texts' tasks.
_PRIORS = (0.2, 0.4, 0.5, 0.65, 0.75, 0.82, 0.9, 0.95)
# Other answers say less about this one until experience shows otherwise.
_SHARED_PRIORS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
_CLASS = tuple(sum(length >= step for step in _STEPS) for length in range(_LONGEST + 1))
# Their places among the rates for a suffix of some length and the longer ones that right guesses make of it.
_LATER = tuple(tuple(_CLASS[min(length + more, _LONGEST)] for more in range(16)) for length in range(_LONGEST + 1))
_LEARNING_RATE = 1 / 8
# What is less likely than this adds nothing that counts.
_UNLIKELY = 0.01


class _Rates:
    """The share of guesses that were right lately, by the length of the suffix."""

    def __init__(self, priors: tuple[float, ...]) -> None:
        self._rates = [0.0, *priors]

    def of(self, match: int) -> float:
        return self._rates[_CLASS[min(match, _LONGEST)]]

    def learn(self, match: int, right: bool) -> None:
        kind = _CLASS[min(match, _LONGEST)]
        self._rates[kind] += (right - self._rates[kind]) * _LEARNING_RATE

    def survival(self, match: int, count: int) -> list[float]:
        """How likely it is, for each of up to 16 guesses behind a suffix, that it and all before it are right."""
        together, found, rates = 1.0, [], self._rates
        for kind in _LATER[min(match, _LONGEST)][:count]:
            together *= rates[kind]
            found.append(together)
        return found

    def promise(self, match: int, unknown: int, count: int) -> float:
        """The sum of survival(match, unknown + count)[unknown:], without what is unlikely."""
        together, total, rates = 1.0, 0.0, self._rates
        for kind in _LATER[min(match, _LONGEST)][: unknown + count]:
            together *= rates[kind]
            if together < _UNLIKELY:
                break
            total += together
        return total - rates[_LATER[min(match, _LONGEST)][0]] if unknown and total else total


class SharedReader:
    """A sequence's guesses from the answers that a shared store has of its owner."""

    def __init__(self, store: SharedStore, owner: Owner) -> None:
        self._store = store
        self._owner = owner
        self._indices: tuple[SuffixIndex, ...] = ()
        self._readers: list[IndexReader] = []
        self.rates = _Rates(_SHARED_PRIORS)
        self.match = 0
        """Tokens of the longest suffix that some answer has, and goes on behind it."""
        self._best: IndexReader | None = None

    def refresh(self, tokens: list[int]) -> None:
        """Read the store's present indices; tokens: the sequence's so far, whose newest those that are new begin with."""
        indices = self._store.indices(self._owner)
        if indices is self._indices:
            return
        newest = tokens[-_LONGEST:]
        known = {reader.index: reader for reader in self._readers}
        self._indices, self._readers = indices, []
        for index in indices:
            reader = known.get(index)
            if reader is None:
                reader = IndexReader(index)
                for token in newest:
                    reader.append(token)
            self._readers.append(reader)
        self._choose()

    def append(self, token: int, counted: bool) -> None:
        """Go on by a token; counted: whether it tells how often guesses are right."""
        if counted and self._best is not None:
            self.rates.learn(self.match, self._best.next == token)
        for reader in self._readers:
            reader.append(token)
        self._choose()

    def following(self, count: int) -> list[int]:
        """Up to count tokens that followed."""
        return [] if self._best is None else self._best.following(count)

    def _choose(self) -> None:
        self.match, self._best = 0, None
        for reader in self._readers:
            # Of two equally long suffixes, that of the newer index counts.
            if reader.match >= self.match and reader.next != END:
                self.match, self._best = reader.match, reader


class Guesser:
    """Follows a sequence's tokens. Whether a guess would have been right is counted at every token, guessed or not."""

    def __init__(self, num_prompt: int, shared: SharedReader | None = None) -> None:
        """shared: guesses from other answers, taken where they are likelier right than those from its own text."""
        self._num_prompt = num_prompt
        self._index = SuffixIndex()
        self._rates = _Rates(_PRIORS)
        self._shared = shared

    @property
    def known(self) -> int:
        """Tokens that have been followed."""
        return len(self._index.tokens)

    def follow(self, tokens: list[int], known: int, most: int) -> int:
        """Follow tokens[:known], at most `most` tokens more than so far; returns how many were followed."""
        index, shared = self._index, self._shared
        begin = len(index.tokens)
        if shared is not None:
            shared.refresh(index.tokens)
        for token in tokens[begin : min(known, begin + most)]:
            answered = len(index.tokens) >= self._num_prompt
            if index.match and answered:
                self._rates.learn(index.match, index.tokens[index.end] == token)
            # Only the end of the prompt matters.
            if shared is not None and len(index.tokens) >= self._num_prompt - _LONGEST:
                shared.append(token, answered)
            index.append(token)
        return len(index.tokens) - begin

    def survival(self, count: int) -> list[float]:
        """How likely it is, for each of the next count guesses, that it and all before it are right."""
        shared = self._likelier_shared()
        if shared is not None:
            return shared.rates.survival(shared.match, len(shared.following(count)))
        return self._rates.survival(self._index.match, count) if self._index.match else []

    def promise(self, unknown: int, count: int) -> float:
        """How many tokens up to count guesses yield on average, where so many tokens, 0 or 1, in front are not known yet."""
        shared = self._likelier_shared()
        if shared is not None:
            return shared.rates.promise(shared.match, unknown, len(shared.following(unknown + count)) - unknown)
        return self._rates.promise(self._index.match, unknown, count) if self._index.match else 0.0

    def guesses(self, count: int) -> list[int]:
        """The next count tokens, as far as there is a guess."""
        shared = self._likelier_shared()
        return self._index.following(count) if shared is None else shared.following(count)

    def _likelier_shared(self) -> SharedReader | None:
        """The guesses from other answers, where they are likelier right."""
        shared = self._shared
        if shared is None or shared.rates.of(shared.match) <= self._rates.of(self._index.match):
            return None
        return shared
