"""Results that bench.e2e leaves in its file."""

from __future__ import annotations

import json
from pathlib import Path

from bench.e2e import results


def test_rows_that_were_not_measured_again_stay(tmp_path: Path) -> None:
    path = tmp_path / "e2e.json"
    decode = {"model": "b", "mode": "decode", "batch": 8, "ours_tok_s": 1.0}
    served = {"model": "b", "mode": "http", "rate": 4.0, "ours_tok_s": 2.0}
    other = {"model": "a", "mode": "start", "ready_s": 3.0}
    results.write(path, "gpu", [served, decode])
    results.write(path, "gpu", [other, {**decode, "ours_tok_s": 5.0}, {**decode, "batch": 1}])
    rows = json.loads(path.read_text())["rows"]
    assert rows == [other, {**decode, "batch": 1}, {**decode, "ours_tok_s": 5.0}, served]


def test_speeds_of_transformers_stay_when_a_row_is_measured_again_without_them(tmp_path: Path) -> None:
    path = tmp_path / "e2e.json"
    decode = {"model": "m", "mode": "decode", "batch": 8}
    start = {"model": "m", "mode": "start"}

    def measured(*rows: dict[str, object]) -> list[dict[str, object]]:
        results.write(path, "gpu", list(rows))
        return json.loads(path.read_text())["rows"]  # type: ignore[no-any-return]

    both = {**decode, "ours_tok_s": 4.0, "hf_generate_tok_s": 2.0, "hf_generate_batch_tok_s": 1.0}
    measured(both, {**start, "ready_s": 3.0, "weights_gib": 9.0})
    kept = {**both, "ours_tok_s": 6.0, "ours_beside_hf_tok_s": 4.0}
    again = [{**decode, "ours_tok_s": 6.0}, {**start, "ready_s": 2.0}]
    assert measured(*again) == [kept, {**start, "ready_s": 2.0, "weights_gib": 9.0}]
    assert measured({**decode, "ours_tok_s": 7.0})[0] == {**kept, "ours_tok_s": 7.0}
    assert measured({**both, "ours_tok_s": 8.0})[0] == {**both, "ours_tok_s": 8.0}
    failed = {**decode, "ours_tok_s": 9.0, "hf_generate_tok_s": None, "hf_generate_error": "OutOfMemoryError: "}
    assert measured(failed)[0] == failed
    assert measured(both)[0] == both


def test_rows_name_the_state_of_the_code_they_are_of(tmp_path: Path) -> None:
    path = tmp_path / "e2e.json"
    rows = [{"model": "a", "mode": "start"}, {"model": "b", "mode": "start"}]
    results.write(path, "gpu", rows, "1234567")
    results.write(path, "gpu", rows[:1], "89abcde+")
    assert [row["commit"] for row in json.loads(path.read_text())["rows"]] == ["89abcde+", "1234567"]
