"""One sequence's token ids become the parts of the answer that a client sees: detokenized, split, stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from server.text.answer import AnswerParser, Part
from server.text.detokenizer import Detokenizer
from server.text.stop import SpecialStops, StopStrings


class OutputText:
    """Text of one generated sequence, a step at a time.

    Stop strings are looked for in the content only, neither in thoughts nor in calls. One with a special token in it bounds
    what the model writes, and is looked for everywhere. Both count only from the min_tokens-th token on.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        parser: AnswerParser | None = None,
        hidden: Mapping[str, int] | None = None,
    ) -> None:
        """parser: splits the text; without one it is content. hidden: special tokens that leave no text, and their ids."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include=include_stop)
        self._special_stops = SpecialStops(stops, hidden or {}, include=include_stop)
        self._exempt = max(0, min_tokens - 1)
        self.parser = parser or AnswerParser()
        self.consumed = 0
        """Tokens taken so far; when a stop string matched, up to and including the one that completed it."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched or self._special_stops.matched

    def push(self, token_ids: Sequence[int]) -> Part:
        """Give the text that may be sent after these tokens; tokens after a completed stop string are not taken."""
        if not self._stops.active:
            self.consumed += len(token_ids)
            return self._split(self._detokenizer.push(token_ids))
        part = Part()
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self.consumed += 1
            text = self._detokenizer.push((token_id,))
            if self.consumed <= self._exempt:
                part.add(self._split(text))
            else:
                part.add(self._bounded(self._split(self._special_stops.push(text, token_id))))
        return part

    def finish(self) -> Part:
        """Give what was held back, when generation has ended or a stop string has."""
        if self._stops.matched is not None:
            return Part()
        text = ""
        if self._special_stops.matched is None:
            text = self._special_stops.push(self._detokenizer.flush()) + self._special_stops.release()
        part = self._bounded(self._split(text))
        if self._stops.matched is None:
            part.add(self._bounded(self.parser.finish()))
        if self._stops.matched is None:
            part.content += self._stops.release()
        return part

    def _split(self, text: str) -> Part:
        return self.parser.push(text) if text else Part()

    def _bounded(self, part: Part) -> Part:
        part.content = self._stops.push(part.content)
        if self._stops.matched is not None:
            part.calls = []  # they follow the stop string
        return part
