"""The pictures of docs/lab/performance.md are drawn from the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.tables.results import RESULTS

pytest.importorskip("matplotlib", reason="the extra plots is not installed")

from bench.plot import plot_engines, plot_kernels


@pytest.mark.parametrize(("name", "draw"), [("kernels", plot_kernels), ("e2e", plot_engines)])
def test_a_picture_of_each_result(name: str, draw: object, tmp_path: Path) -> None:
    target = tmp_path / "plot.png"
    assert callable(draw)
    draw(json.loads((RESULTS / f"{name}-nvidia-h200.json").read_text()), target)
    assert target.read_bytes().startswith(b"\x89PNG")
