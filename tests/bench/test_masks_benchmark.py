"""bench.masks times both parts of grammars, for every form and number of sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import masks


def test_every_form_and_case_is_a_line(
    embedded_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(masks, "CASES", (1, 3))
    arguments = ["masks", "--steps", "2", "--vocabulary", "49152", "--tokenizer", str(embedded_folder)]
    monkeypatch.setattr("sys.argv", arguments)
    assert masks.main() == 0
    _, *lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert [(form, int(count)) for form, count, *_ in rows] == [
        (form, count) for form in ("schema", "regex") for count in (1, 3)
    ]
    assert all(float(number) > 0 for row in rows for number in row[2:])
