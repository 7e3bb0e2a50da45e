"""The thoughts of a reasoning model, split from its answer as the text comes."""

from __future__ import annotations

from dataclasses import dataclass

from server.text.holdback import overlap, split_at


@dataclass(frozen=True)
class ReasoningMarks:
    """Marks that a model writes around its thoughts."""

    start: str
    end: str
    label: str = ""
    """Text that follows the start mark and is no part of the thoughts."""
    answer: tuple[str, ...] = ()
    """Marks around the answer that are no part of it."""

    @property
    def opening(self) -> str:
        """The start mark with its label."""
        return self.start + self.label


MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<|channel>", "<channel|>", "thought\n"),  # Gemma 4
    ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ReasoningMarks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
)


class ReasoningSplitter:
    """Splits one text. Thoughts come first or not at all; a later start mark is text.

    opened: the prompt ends inside the thoughts, as some templates write the start mark themselves. call: the beginning of
    a call, which ends thoughts, too, as some models forget the end mark.
    """

    def __init__(self, marks: ReasoningMarks, *, opened: bool, call: str | None = None) -> None:
        self._marks = marks
        self._ends = (marks.end,) if call is None else (marks.end, call)
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
            if stripped.startswith(self._marks.opening):
                self._state, text = "thinking", stripped[len(self._marks.opening) :]
            elif not stripped or overlap(stripped, self._marks.opening) == len(stripped):
                self._held = text
                return "", ""
            else:
                self._state = "answer"
        if self._state == "thinking":
            thoughts, mark, rest = split_at(text, self._ends)
            if mark is None:
                self._held = rest
                return thoughts, ""
            self._state = "gap"
            if mark != self._marks.end:
                rest = mark + rest
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
        if not self._marks.answer:
            return text
        pieces: list[str] = []
        mark: str | None = ""
        while mark is not None:
            piece, mark, text = split_at(text, self._marks.answer)
            pieces.append(piece)
        self._held = text
        return "".join(pieces)
