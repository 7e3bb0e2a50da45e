"""The costs of steps by their number of tokens, and how many draft tokens let sequences go on fastest."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

MAX_DRAFT_TOKENS = 15
"""Draft tokens for one sequence in one step at most."""
_LEARNING_RATE = 1 / 16
# How fast the cost of verifying, while nothing is verified, falls back to what it is without the delays seen lately.
_FORGETTING_RATE = 1 / 256
# How many times what is expected of a step counts of its time at most. A step that something else held up should not count
# for long, while contexts that get longer are still learned.
_MOST_EXPECTED = 2.0
# Steps have draft tokens only if they promise sequences this many times their speed, because costs are not known more
# precisely. With a draft model most steps have some or none has, so their costs are learned from more steps.
_LEAST_GAIN, _LEAST_GAIN_DRAFTED = 1.1, 1.05
# The start times a step with draft tokens until its tokens are read; while the engine serves, the device has work from a
# draft model meanwhile.
_MOST_SAVED = 0.05


def gains_of(survivals: Iterable[float]) -> list[float]:
    """Gains of a sequence's draft tokens: what each adds to the logarithm of the tokens that a step gives it, falling.

    survivals: how likely each yields a token, which it does where it and all before it are right.
    """
    tokens, gains = 1.0, []
    for likely in survivals:
        gains.append(math.log1p(likely / tokens))
        tokens += likely
    return gains


class _Times:
    """Seconds by a number of tokens, as measured at the start, and how much longer it takes when the engine serves.

    That is the host's work, which async scheduling hides for steps without draft tokens, and attention over long contexts.
    """

    def __init__(self, seconds: Mapping[int, float], most_saved: float = 0.0) -> None:
        """most_saved: the part of its time that a step may take less when the engine serves."""
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
            raise ValueError("step costs need at least one number of tokens, each with a time above 0")
        self.sizes = sorted(seconds)
        # Fewer tokens never take more time, except for noise, which can only add time.
        self.seconds = [min(seconds[size] for size in self.sizes[i:]) for i in range(len(self.sizes))]
        self.extra = 0.0
        self._most_saved = most_saved

    def __repr__(self) -> str:
        times = ", ".join(f"{size}: {1e3 * own:.2f}" for size, own in zip(self.sizes, self.seconds, strict=True))
        return f"{{{times}}} ms + {1e3 * self.extra:.2f}"

    def of(self, tokens: int) -> float | None:
        """Seconds of a step of tokens, which takes as long as the next larger one known; None beyond the largest."""
        at = bisect_left(self.sizes, tokens)
        return self.seconds[at] + self.extra if at < len(self.sizes) else None

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from a step that served."""
        at = bisect_left(self.sizes, tokens)
        if at < len(self.sizes):
            own = self.seconds[at]
            seconds = min(seconds, _MOST_EXPECTED * (own + self.extra))
            # What is saved is saved of each size, of which none may come to cost nothing.
            least = -self.seconds[0] * self._most_saved
            self.extra += (max(least, seconds - own) - self.extra) * _LEARNING_RATE

    def forget(self) -> None:
        """Forget a part of how much longer it takes, where no step says so any more."""
        self.extra -= self.extra * _FORGETTING_RATE


class StepCosts:
    """Costs of decode steps with draft tokens and without."""

    def __init__(
        self,
        verifying: Mapping[int, float],
        plain: Mapping[int, float] | None = None,
        drafting: Mapping[int, float] | None = None,
    ) -> None:
        """verifying: seconds of a step with draft tokens by its tokens; plain: of one without; the same if None.

        drafting: seconds of a draft model's step by its sequences; None: draft tokens cost nothing. Raises ValueError where
        there are none.
        """
        self._verifying = _Times(verifying, _MOST_SAVED if drafting else 0.0)
        self._plain = _Times(verifying if plain is None else plain)
        self._drafting = None if drafting is None else _Times(drafting)

    def __repr__(self) -> str:
        drafting = "" if self._drafting is None else f"; of the draft model: {self._drafting}"
        return f"StepCosts(without draft tokens: {self._plain}; with: {self._verifying}{drafting})"

    @property
    def max_tokens(self) -> int:
        """The most tokens that a step with draft tokens may have."""
        return self._verifying.sizes[-1]

    def note(self, tokens: int, seconds: float, drafted: bool) -> None:
        """Learn from a step that served, with draft tokens or without."""
        (self._verifying if drafted else self._plain).note(tokens, seconds)
        if not drafted:
            # A few steps with draft tokens that something else held up must not end them for good.
            self._verifying.forget()

    def note_void(self) -> None:
        """Learn from a step without draft tokens that waited for the step before because it was likely to have some.

        It says nothing of what steps cost. But where there are only such steps, a plain step that was held up must not make
        them seem worth the wait for good.
        """
        self._plain.forget()
        self._verifying.forget()

    def least_gained(self, sequences: int) -> float:
        """Tokens that draft tokens have to promise at least, together, to pay in a step of `sequences` sequences."""
        plain, verifying = self._plain.of(sequences), self._verifying.of(sequences + 1)
        if plain is None or verifying is None:
            return math.inf
        return sequences * (self._least_gain * verifying / plain - 1)

    def drafting(self, sequences: int, count: int) -> float:
        """Seconds in which a draft model proposes `count` tokens for each of some sequences."""
        if self._drafting is None or not sequences:
            return 0.0
        seconds = self._drafting.of(min(sequences, self._drafting.sizes[-1]))
        assert seconds is not None
        return count * seconds

    def fastest(self, sequences: int, gains: Sequence[float], before: float = 0.0) -> tuple[int, float]:
        """Choose the number of draft tokens of a step of `sequences` sequences; give it and its gain.

        gains: what each draft token adds to the logarithm of its sequence's tokens (gains_of()), greatest first. The
        best number gives the sequences the highest speeds, in the geometric mean: a step that takes longer because of one
        sequence's draft tokens slows down all others, and none counts more for having more tokens. What it gives is how many
        times as fast they go on as without draft tokens; 0 and 0.0 where no number pays. before: seconds that it takes to
        propose them.
        """
        plain, verifying = self._plain.of(sequences), self._verifying
        if plain is None or not gains:
            return 0, 0.0
        best, most = 0, sequences * math.log(self._least_gain)
        gained, taken = 0.0, 0
        for size, seconds in zip(verifying.sizes, verifying.seconds, strict=True):
            room = min(size - sequences, len(gains))
            if room <= taken:
                continue
            gained += sum(gains[taken:room])
            taken = room
            gain = gained - sequences * math.log((seconds + verifying.extra + before) / plain)
            if gain > most:
                best, most = taken, gain
        return (best, math.exp(most / sequences)) if best else (0, 0.0)

    def may_pay(self, sequences: int) -> bool:
        """Whether draft tokens could pay in a step of `sequences` sequences if every one of them were accepted."""
        plain, verifying = self._plain.of(sequences), self._verifying
        if plain is None:
            return False
        least = self._least_gain * sequences / plain
        # A step that is full gains most, or one whose sequences have equally many draft tokens. Those with unlike
        # numbers gain a little less than this says.
        return any(
            min(size, sequences * (1 + steps)) > least * (seconds + verifying.extra + self.drafting(sequences, steps))
            for size, seconds in zip(verifying.sizes, verifying.seconds, strict=True)
            if size > sequences
            for steps in {min(MAX_DRAFT_TOKENS, own - 1) for own in (size // sequences, -(-size // sequences))}
        )

    @property
    def _least_gain(self) -> float:
        return _LEAST_GAIN if self._drafting is None else _LEAST_GAIN_DRAFTED
