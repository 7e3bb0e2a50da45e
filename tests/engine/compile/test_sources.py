"""Kept artifacts are named by the code that made them: an edit of any file of it changes the names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from server.engine.runtime import sources
from server.engine.runtime.compile.artifacts import artifact_path
from server.engine.runtime.compile.passes import fusion
from server.engine.runtime.compile.passes.fusion import FusedOperations


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """Copies of the folders that are digested, in their places."""
    copies = {}
    for name in ("RUNTIME", "KERNELS", "EXPERTS"):
        copies[name] = tmp_path / name
        shutil.copytree(
            getattr(sources, name), copies[name], ignore=shutil.ignore_patterns("lib", "csrc", "__pycache__")
        )
        monkeypatch.setattr(sources, name, copies[name])
    _forget()
    yield copies
    _forget()


def _forget() -> None:
    """What a new process would not know."""
    sources._digest.cache_clear()
    fusion._identity.cache_clear()


def _keys() -> tuple[Path, bytes | None]:
    _forget()
    return artifact_path(torch.device("cpu"), "kind"), FusedOperations().uuid()


@pytest.mark.parametrize(
    ("root", "file"),
    [
        ("RUNTIME", "attention/base.py"),
        ("RUNTIME", "runner.py"),
        ("RUNTIME", "compile/passes/norms.py"),
        ("RUNTIME", "model/lora.py"),
        ("KERNELS", "ops.py"),
        ("EXPERTS", "module.py"),
    ],
)
def test_an_edit_changes_every_key(roots: dict[str, Path], root: str, file: str) -> None:
    before = _keys()
    assert _keys() == before
    path = roots[root] / file
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert all(new != old for new, old in zip(_keys(), before, strict=True))


def test_a_renamed_file_changes_every_key(roots: dict[str, Path]) -> None:
    before = _keys()
    (roots["RUNTIME"] / "batch.py").rename(roots["RUNTIME"] / "batches.py")
    assert all(new != old for new, old in zip(_keys(), before, strict=True))


def test_the_files_are_read_once(roots: dict[str, Path]) -> None:
    before = artifact_path(torch.device("cpu"), "kind")
    shutil.rmtree(roots["RUNTIME"])
    assert artifact_path(torch.device("cpu"), "kind") == before


def test_the_roots_hold_all_of_the_runtime() -> None:
    folders = {path.parent.name for path in sources.RUNTIME.rglob("*.py")}
    assert {"runtime", "attention", "compile", "passes", "graphs", "model", "preparation", "sampling"} <= folders
    assert (sources.KERNELS / "ops.py").exists()
    assert (sources.EXPERTS / "module.py").exists()
