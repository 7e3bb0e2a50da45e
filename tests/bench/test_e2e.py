"""What bench.e2e leaves in its file."""

from __future__ import annotations

import json
from pathlib import Path

from bench import e2e


def test_rows_that_were_not_measured_again_stay(tmp_path: Path) -> None:
    path = tmp_path / "e2e.json"
    decode = {"model": "b", "mode": "decode", "batch": 8, "ours_tok_s": 1.0}
    served = {"model": "b", "mode": "http", "rate": 4.0, "ours_tok_s": 2.0}
    other = {"model": "a", "mode": "start", "ready_s": 3.0}
    e2e._write(path, "gpu", [served, decode])
    e2e._write(path, "gpu", [other, {**decode, "ours_tok_s": 5.0}, {**decode, "batch": 1}])
    rows = json.loads(path.read_text())["rows"]
    assert rows == [other, {**decode, "batch": 1}, {**decode, "ours_tok_s": 5.0}, served]
