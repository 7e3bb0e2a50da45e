"""The thoughts of a reasoning model, split from its answer as the text comes."""

from __future__ import annotations

from dataclasses import dataclass

from server.text.holdback import overlap, split_at


@dataclass(frozen=True)
class ReasoningMarks:
    """Marks that a model writes around its thoughts."""

    start: str
    end: str


MARKS = (ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]"))


class ReasoningSplitter:
    """Splits one text. Thoughts come first or not at all; a later start mark is text.

    opened: the prompt ends inside the thoughts, as some templates write the start mark themselves.
    """

    def __init__(self, marks: ReasoningMarks, *, opened: bool) -> None:
        self._marks = marks
        self._state = "thinking" if opened else "start"
        self._held = ""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thoughts."""
        return self._state == "thinking"

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that this text completes."""
        text, self._held = self._held + text, ""
        if self._state == "start":
            stripped = text.lstrip()
            if stripped.startswith(self._marks.start):
                self._state, text = "thinking", stripped[len(self._marks.start) :]
            elif not stripped or overlap(stripped, self._marks.start) == len(stripped):
                self._held = text
                return "", ""
            else:
                self._state = "answer"
        if self._state == "thinking":
            thoughts, mark, rest = split_at(text, (self._marks.end,))
            if mark is None:
                self._held = rest
                return thoughts, ""
            self._state = "gap"
            return thoughts, self._answer(rest)
        return "", self._answer(text)

    def finish(self) -> tuple[str, str]:
        """Give what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return (held, "") if self.thinking else ("", held)

    def _answer(self, text: str) -> str:
        """The answer without the line ends that separate it from the thoughts."""
        if self._state == "gap":
            text = text.lstrip("\n")
            if text:
                self._state = "answer"
        return text
