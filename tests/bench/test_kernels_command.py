"""The command that owners of a GPU are asked for exists."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from bench.kernels import __main__ as command
from bench.kernels import measure
from bench.kernels.measure import Row
from nf4_kernels import cuda

TEMPLATES = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE"


def test_the_report_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing else: rows that are shown as they come are not in the file that owners send."""
    row = Row("linear", "Llama-3.1-8B", "up", 28672, 4096, 1, 75.0, 100.0, 290.0, 70.0)
    monkeypatch.setattr(cuda, "load_error", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    monkeypatch.setattr(measure, "Bench", lambda _: SimpleNamespace(copy_bytes_per_us=9e5, flops_per_us=7e7))
    monkeypatch.setattr(measure, "Tree", lambda: None)
    monkeypatch.setattr(measure, "random_weight", lambda *_: None)
    monkeypatch.setattr(measure, "dequantize_rows", lambda *_: [])
    monkeypatch.setattr(measure, "linear_rows", lambda *_: [row])
    monkeypatch.setattr(sys, "argv", ["bench.kernels", "--json", "--models", "Llama-3.1-8B"])
    assert command.main() == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["device"], report["rows"][0]["ours_us"]) == ("A card", 75.0)
    assert said.err.splitlines()[-1].startswith("linear Llama-3.1-8B up 28672x4096 M=1: 75.0 us")
    assert "python -m bench.kernels --json" in (TEMPLATES / "gpu.yml").read_text()


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.yml")), ids=lambda path: path.name)
def test_templates_have_what_forms_need(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name != "config.yml":
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "attributes"} <= part.keys() for part in form["body"])
