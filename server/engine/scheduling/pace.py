"""Prefill budget: tokens of prompts that a step has with decoding sequences without taking longer than configured."""

from __future__ import annotations

FIRST_TOKENS = 256
"""Tokens of prompts in a step before any step has been timed."""
LEAST_TOKENS = 16
"""Tokens of prompts that a step may always have, so that prompts go on however slow the model is."""
_STEP = 16
# A step's speed depends on its context, so later chunks of a prompt are slower; slower steps therefore count at once.
_FASTER = 0.3
_DECODE = 0.2
# Chunks grow by this factor at most: a step of few tokens says little about one of many.
_GROWTH = 2


class PrefillPace:
    """Learns from the steps that have run. limit_s: how long a step with prompts' tokens may take while others decode."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._decode_s = 0.0
        self._token_s = 0.0
        self._most = FIRST_TOKENS

    @property
    def tokens(self) -> int:
        """Tokens of prompts that a step may have beside decoding sequences: a multiple of 16."""
        if not self._token_s:
            return FIRST_TOKENS
        # A step whose decode alone takes too long is not made shorter by starving the prompts.
        left = max(self._limit_s - self._decode_s, self._limit_s / 4)
        fitting = min(int(left / self._token_s), _GROWTH * self._most)
        return max(LEAST_TOKENS, fitting // _STEP * _STEP)

    def note(self, prefill_tokens: int, seconds: float) -> None:
        """Note how long a step took, and how many tokens of prompts it had."""
        if prefill_tokens == 0:
            self._decode_s += _DECODE * (seconds - self._decode_s) if self._decode_s else seconds
        elif prefill_tokens >= LEAST_TOKENS:
            found = max(seconds - self._decode_s, seconds / 2) / prefill_tokens
            slower = found > self._token_s
            self._token_s += (1.0 if slower else _FASTER) * (found - self._token_s)
            self._most = max(FIRST_TOKENS, prefill_tokens)
