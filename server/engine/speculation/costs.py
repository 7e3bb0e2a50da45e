"""What a step costs by its number of tokens, and how many tokens to check so that most of them come out per second."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

_LEARNING_RATE = 1 / 16


class StepCosts:
    """Seconds of decode steps: measured at the start, and how much longer steps take when they serve.

    That is the host's work, which async scheduling hides for steps without guesses, and the attention over long contexts.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """seconds: of a step by its tokens; other numbers of tokens take as long as the next larger one that is there."""
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
            raise ValueError("step costs need at least one number of tokens, each with a time above 0")
        self._sizes = sorted(seconds)
        # More tokens never take less time, but for noise.
        self._seconds = [max(seconds[size] for size in self._sizes[: i + 1]) for i in range(len(self._sizes))]
        self._extra = {False: 0.0, True: 0.0}

    @property
    def most_tokens(self) -> int:
        """The most tokens that a step with guesses may have."""
        return self._sizes[-1]

    def note(self, tokens: int, seconds: float, guessed: bool) -> None:
        """Learn from a step that served, with guesses or without."""
        at = bisect_left(self._sizes, tokens)
        if at < len(self._sizes):
            own = self._seconds[at]
            # One step that was held up by something else should not count for long.
            extra = min(max(0.0, seconds - own), own)
            self._extra[guessed] += (extra - self._extra[guessed]) * _LEARNING_RATE

    def best(self, sequences: int, survivals: Sequence[float]) -> int:
        """How many guesses a step of that many sequences should check; survivals: all there are, the likeliest first.

        A guess's survival is how likely it yields a token. The best number gives the most tokens per second.
        """
        at = bisect_left(self._sizes, sequences)
        if at == len(self._sizes) or not survivals:
            return 0
        best, most = 0, sequences / (self._seconds[at] + self._extra[False])
        gained, taken = 0.0, 0
        for size, seconds in zip(self._sizes[at:], self._seconds[at:], strict=True):
            room = min(size - sequences, len(survivals))
            gained += sum(survivals[taken:room])
            taken = max(taken, room)
            rate = (sequences + gained) / (seconds + self._extra[True])
            if taken and rate > most:
                best, most = taken, rate
        return best

    def may_pay(self, sequences: int) -> bool:
        """Whether guesses could pay for a step of that many sequences if every one of them were right."""
        at = bisect_left(self._sizes, sequences)
        if at == len(self._sizes):
            return False
        plain = sequences / self._seconds[at]
        return any(size / seconds > plain for size, seconds in zip(self._sizes[at:], self._seconds[at:], strict=True))
