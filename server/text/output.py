"""One sequence's token ids become the text that a client sees: detokenized, held back where needed, stopped."""

from __future__ import annotations

from collections.abc import Sequence

from server.text.detokenizer import Detokenizer
from server.text.stop import StopStrings


class OutputText:
    """Text of one generated sequence, a step at a time.

    Stop strings are looked for only in text from the min_tokens-th token on.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include=include_stop)
        self._exempt = max(0, min_tokens - 1)
        self.consumed = 0
        """Tokens taken so far; when a stop string matched, up to and including the one that completed it."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that may be sent after these tokens; tokens after a completed stop string are not taken."""
        if not self._stops.active:
            self.consumed += len(token_ids)
            return self._detokenizer.push(token_ids)
        pieces = []
        for token_id in token_ids:
            if self._stops.matched is not None:
                break
            self.consumed += 1
            text = self._detokenizer.push((token_id,))
            pieces.append(text if self.consumed <= self._exempt else self._stops.push(text))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, when generation ended without a stop string."""
        if self._stops.matched is not None:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        return text if self._stops.matched is not None else text + self._stops.release()
