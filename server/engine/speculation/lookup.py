"""One sequence's draft tokens by lookup: what followed its newest tokens earlier in its text, and how likely it is right."""

from __future__ import annotations

from server.engine.speculation.suffixes import SuffixIndex

_LONGEST = 24
# Suffixes from one of these lengths up to the next share one learned rate.
_STEPS = (1, 2, 3, 4, 6, 9, 14, 22)
# How often the token is right that followed the longest suffix before, until the sequence's own answer says otherwise: in
# the embedded model's answers to bench.speculation.texts' tasks.
_PRIORS = (0.2, 0.4, 0.5, 0.65, 0.75, 0.82, 0.9, 0.95)
_CLASS = tuple(sum(length >= step for step in _STEPS) for length in range(_LONGEST + 1))
# Their places among the rates for a suffix of some length and the longer ones that accepted tokens make of it.
_LATER = tuple(tuple(_CLASS[min(length + more, _LONGEST)] for more in range(16)) for length in range(_LONGEST + 1))
_LEARNING_RATE = 1 / 8
# What is less likely than this adds nothing that counts.
_UNLIKELY = 0.01


class _Rates:
    """The share of draft tokens that were right lately, by the length of the suffix."""

    def __init__(self) -> None:
        self._rates = [0.0, *_PRIORS]

    def learn(self, match: int, right: bool) -> None:
        kind = _CLASS[min(match, _LONGEST)]
        self._rates[kind] += (right - self._rates[kind]) * _LEARNING_RATE

    def survival(self, match: int, count: int) -> list[float]:
        """Probability, for each of up to 16 draft tokens after a suffix, that it and all before it are right."""
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


class LookupProposer:
    """Follows a sequence's tokens. Whether a draft token would have been right counts at every token, proposed or not."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._index = SuffixIndex()
        self._rates = _Rates()

    @property
    def known(self) -> int:
        """Tokens that have been followed."""
        return len(self._index.tokens)

    def follow(self, tokens: list[int], known: int, most: int) -> int:
        """Follow tokens[:known], at most `most` tokens more than so far; returns how many were followed."""
        index = self._index
        begin = len(index.tokens)
        for token in tokens[begin : min(known, begin + most)]:
            if index.match and len(index.tokens) >= self._num_prompt:
                self._rates.learn(index.match, index.tokens[index.end] == token)
            index.append(token)
        return len(index.tokens) - begin

    def survival(self, count: int) -> list[float]:
        """Probability, for each of the next count draft tokens, that it and all before it are accepted."""
        return self._rates.survival(self._index.match, count) if self._index.match else []

    def promise(self, unknown: int, count: int) -> float:
        """Mean number of accepted ones among up to count draft tokens; unknown: 1 if the newest token is not known yet."""
        return self._rates.promise(self._index.match, unknown, count) if self._index.match else 0.0

    def propose(self, count: int) -> list[int]:
        """The next count tokens, as far as there is a proposal."""
        return self._index.following(count)
