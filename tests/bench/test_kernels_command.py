"""The command that owners of a GPU are asked for exists."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from bench.kernels import __main__ as command
from nf4_kernels import cuda

TEMPLATES = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE"


def test_the_report_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"device": "A card", "rows": []}
    monkeypatch.setattr(cuda, "load_error", lambda: None)
    monkeypatch.setattr(command, "measure", lambda *_: report)
    monkeypatch.setattr(sys, "argv", ["bench.kernels", "--json"])
    assert command.main() == 0
    assert json.loads(capsys.readouterr().out) == report
    assert "python -m bench.kernels --json" in (TEMPLATES / "gpu.yml").read_text()


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.yml")), ids=lambda path: path.name)
def test_templates_have_what_forms_need(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name != "config.yml":
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "attributes"} <= part.keys() for part in form["body"])
