"""bench.host times every part of a decode step, on the engine's own path."""

from __future__ import annotations

import json

import pytest

from bench import host


def test_every_case_is_a_line_and_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(host, "CASES", ((4, 40), (3, 700)))
    monkeypatch.setattr("sys.argv", ["host", "--steps", "3"])
    assert host.main() == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["sequences", "context", *host.COLUMNS]
    rows = [json.loads(line) for line in lines[2:]]
    for line, row, case in zip(lines[:2], rows, host.CASES, strict=True):
        assert (row["sequences"], row["context"]) == case
        assert line.split() == [*map(str, case), *(f"{row[name]:.3f}" for name in host.COLUMNS)]
        assert all(row[name] > 0 for name in host.COLUMNS)
        assert sum(row[part] for part in host.PARTS) < 2 * row["step"]


def test_the_measured_steps_hold_all_sequences_at_their_context() -> None:
    engine, runner = host.decoding(5, 100, steps=20)
    while engine.has_work:
        engine.step()
        if runner.batch is not None:
            assert len(runner.batch.spans) == 5
            assert all(100 < span.end <= 120 for span in runner.batch.spans)
    assert "layout" in runner.seconds
