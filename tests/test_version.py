"""The version says the commit between two releases."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import nf4_kernels
from server import __version__
from server.config.flags import parse
from server.version import version_of


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.check_output(["git", *identity, *arguments], cwd=root, text=True).strip()


def commit(root: Path, name: str, text: str) -> str:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", name)
    return git(root, "rev-parse", "--short", "HEAD")


def test_commits_after_a_release_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert version_of(tmp_path) == __version__  # an installed package
    git(tmp_path, "init", "-q")
    assert version_of(tmp_path) == __version__
    commit(tmp_path, "server/__init__.py", '__version__ = "1"')
    assert version_of(tmp_path) == __version__
    later = commit(tmp_path, "server/other.py", "")
    assert version_of(tmp_path) == f"{__version__}+{later}"
    (tmp_path / "server" / "other.py").write_text("edited")
    assert version_of(tmp_path) == f"{__version__}+{later}.dirty"
    monkeypatch.setenv("PATH", "")
    assert version_of(tmp_path) == __version__


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(rf"nf4-server {re.escape(__version__)}(\+\S+)?\n", capsys.readouterr().out)


def test_a_release_has_one_version() -> None:
    """The server's, the kernels', the chart's, the changelog's latest and the README's."""
    root = Path(__file__).parents[1]
    chart = yaml.safe_load((root / "deploy/kubernetes/Chart.yaml").read_text())
    assert nf4_kernels.__version__ == chart["version"] == chart["appVersion"] == __version__
    unreleased, latest = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[:2]
    assert unreleased == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} - \d{{4}}-\d\d-\d\d", latest)
    assert f"version {__version__} " in (root / "README.md").read_text()
