"""One sequence's guesses: what followed its newest tokens when it had them before, and how likely that is right."""

from __future__ import annotations

from server.engine.speculation.suffixes import SuffixIndex

_LONGEST = 24
# Suffixes of these lengths and up to the next share what is learned.
_STEPS = (1, 2, 3, 4, 6, 9, 14, 22)
# How often the token is right that followed the longest suffix before, until the sequence's own answer says otherwise: in
# the embedded model's answers to bench.speculation.texts' tasks.
_PRIORS = (0.2, 0.4, 0.5, 0.65, 0.75, 0.82, 0.9, 0.95)
_CLASS = tuple(sum(length >= step for step in _STEPS) for length in range(_LONGEST + 1))
_LEARNING_RATE = 1 / 8


class Guesser:
    """Follows a sequence's tokens. Whether a guess would have been right is counted at every token, guessed or not."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._index = SuffixIndex()
        self._rates = [0.0, *_PRIORS]
        """By class of the suffix's length, the share of guesses that were right lately."""

    @property
    def known(self) -> int:
        """Tokens that have been followed."""
        return len(self._index.tokens)

    def follow(self, tokens: list[int], known: int, most: int) -> int:
        """Follow tokens[:known], at most `most` tokens more than so far; returns how many were followed."""
        index, rates = self._index, self._rates
        begin = len(index.tokens)
        for token in tokens[begin : min(known, begin + most)]:
            if index.match and len(index.tokens) >= self._num_prompt:
                kind = _CLASS[min(index.match, _LONGEST)]
                rates[kind] += ((index.tokens[index.end] == token) - rates[kind]) * _LEARNING_RATE
            index.append(token)
        return len(index.tokens) - begin

    def survival(self, count: int) -> list[float]:
        """How likely it is, for each of the next count guesses, that it and all before it are right."""
        match, rates = self._index.match, self._rates
        if not match:
            return []
        together, found = 1.0, []
        for length in range(match, match + count):
            together *= rates[_CLASS[min(length, _LONGEST)]]
            found.append(together)
        return found

    def guesses(self, count: int) -> list[int]:
        """The next count tokens, as far as there is a guess."""
        return self._index.following(count)
