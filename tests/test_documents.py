"""The documents name what exists: files of the tree, and every decision in the decisions' list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Where a path in docs/architecture.md begins that is not written out from the root of the repository.
PLACES = (
    *(".", "server", "server/text", "server/checkpoint", "server/engine", "server/engine/scheduling"),
    *("server/engine/runtime", "nf4_kernels", "nf4_kernels/csrc/cuda"),
)


def _named_paths(text: str) -> set[str]:
    """The files and folders in backquotes; a name without a folder is a file of the place that its paragraph is about."""
    names = re.findall(r"`([\w./-]+)`", text)
    return {name for name in names if name.endswith("/") or (re.search(r"\.(py|cu|cuh|cpp|h)$", name) and "/" in name)}


@pytest.mark.parametrize("name", sorted(_named_paths(ARCHITECTURE)))
def test_what_the_architecture_names_exists(name: str) -> None:
    assert any((ROOT / place / name).exists() for place in PLACES), name


def test_the_map_names_every_folder_of_modules() -> None:
    named = {(ROOT / place / name) for place in PLACES for name in _named_paths(ARCHITECTURE)}
    found = {path.relative_to(ROOT) for path in named if path.exists()}
    # A folder counts as named where the map names it or a file in it.
    folders = found | {path.parent for path in found if path.suffix}
    # nf4_kernels/build is left by `pip install ./nf4_kernels`.
    modules = {path.relative_to(ROOT) for top in ("server", "nf4_kernels") for path in (ROOT / top).rglob("*.py")}
    parents = {path.parent for path in modules if path.parts[:2] != ("nf4_kernels", "build")}
    assert sorted(str(parent) for parent in parents - folders) == []


def test_the_list_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "adr"
    titles = []
    for path in sorted(folder.glob("0*.md")):
        number, title = path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ").split(". ", 1)
        assert path.name.startswith(f"{int(number):04d}-")
        titles.append(f"* [{path.name[:4]}]({path.name}) {title}")
    listed = [line for line in (folder / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("* ")]
    assert listed == titles


PAGES = (
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("nf4_kernels/*.md"),
    *ROOT.glob(".github/**/*.md"),
)


def _anchors(text: str) -> set[str]:
    """The addresses that a page's headings have."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        path = page.parent / name if name else page
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path.read_text(encoding="utf-8")), target
