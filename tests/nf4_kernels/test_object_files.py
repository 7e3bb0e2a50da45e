"""Builds compile what has changed and nothing else, with the system's own compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nf4_kernels.object_files import BuildError, Compiler, build_library

COMPILER = shutil.which("g++") or "g++"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Three sources, two of which include one header, one of them through another header."""
    folder = tmp_path / "sources"
    (folder / "a room").mkdir(parents=True)
    (folder / "shared.h").write_text("#define VALUE 1\n")
    (folder / "a room" / "between.h").write_text('#include "shared.h"\n')
    (folder / "alone.cpp").write_text('extern "C" int alone() { return 0; }\n')
    (folder / "direct.cpp").write_text('#include "shared.h"\nextern "C" int direct() { return VALUE; }\n')
    (folder / "a room" / "through.cpp").write_text(
        '#include "between.h"\nextern "C" int through() { return 10 * VALUE; }\n'
    )
    return folder


def build(sources: Path, *flags: str, force: bool = False, keep_objects: bool = True) -> list[str]:
    """The sources that one build compiled, as it reports them."""
    said: list[str] = []
    commands = {path.relative_to(sources).as_posix(): list(flags) for path in sorted(sources.rglob("*.cpp"))}
    compiler = Compiler.of(COMPILER, "-fPIC", "-I.")
    output = sources.parent / "lib" / "library.so"
    built = build_library(
        output, sources, compiler, commands, ["-shared"], force=force, keep_objects=keep_objects, report=said.append
    )
    assert built == output
    assert [line.partition(": compiled ")[2].partition(":")[0] for line in said] == [
        f"{i} of {len(said)}" for i in range(1, len(said) + 1)
    ]
    return sorted(line.rpartition(": ")[2] for line in said)


def result(sources: Path, name: str) -> int:
    """Result of a function of the library; a copy is loaded, as a library is loaded once."""
    copy = sources.parent / f"{time.monotonic_ns()}.so"
    shutil.copy(sources.parent / "lib" / "library.so", copy)
    return int(getattr(ctypes.CDLL(str(copy)), name)())


def test_only_what_includes_a_changed_file_is_compiled_again(sources: Path) -> None:
    assert build(sources) == ["a room/through.cpp", "alone.cpp", "direct.cpp"]
    assert build(sources) == []
    (sources / "alone.cpp").touch()  # a checkout of another branch and back
    assert build(sources) == []
    (sources / "shared.h").write_text("#define VALUE 2\n")
    assert build(sources) == ["a room/through.cpp", "direct.cpp"]
    assert (result(sources, "direct"), result(sources, "through")) == (2, 20)
    (sources / "alone.cpp").write_text('extern "C" int alone() { return 5; }\n')
    assert build(sources) == ["alone.cpp"]
    assert result(sources, "alone") == 5


def test_a_header_that_moves_a_new_command_and_force_compile_again(sources: Path) -> None:
    build(sources)
    (sources / "shared.h").rename(sources / "a room" / "shared.h")
    (sources / "direct.cpp").write_text('#include "a room/shared.h"\nextern "C" int direct() { return VALUE; }\n')
    assert build(sources) == ["a room/through.cpp", "direct.cpp"]
    assert build(sources, "-DOTHER") == ["a room/through.cpp", "alone.cpp", "direct.cpp"]
    assert build(sources, "-DOTHER", force=True) == ["a room/through.cpp", "alone.cpp", "direct.cpp"]


def test_a_source_that_goes_leaves_the_library(sources: Path) -> None:
    build(sources)
    (sources / "alone.cpp").unlink()
    assert build(sources) == []
    with pytest.raises(AttributeError):
        result(sources, "alone")
    assert not (sources.parent / "lib" / "library.objects" / "alone.o").exists()


def test_a_lost_library_is_linked_again(sources: Path) -> None:
    build(sources)
    (sources.parent / "lib" / "library.so").unlink()
    assert build(sources) == []
    assert result(sources, "direct") == 1


def test_what_was_compiled_before_an_error_is_kept(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    (sources / "direct.cpp").write_text("no C++ at all")
    with pytest.raises(BuildError, match=r"direct\.cpp"):
        build(sources)
    (sources / "direct.cpp").write_text('extern "C" int direct() { return 3; }\n')
    assert build(sources) == ["direct.cpp"]
    assert result(sources, "direct") == 3


def test_a_header_that_changes_while_it_is_compiled_counts_as_changed(sources: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "slow" / "c++"
    compiler.parent.mkdir()
    change = f"echo '#define VALUE 7' > {sources}/shared.h"
    compiler.write_text(f'#!/bin/sh\n{COMPILER} "$@" || exit 1\n[ "$1" = --version ] || {change}\n')
    compiler.chmod(0o755)
    commands: dict[str, list[str]] = {"direct.cpp": []}
    output = sources.parent / "lib" / "library.so"
    said: list[str] = []
    for _ in range(2):
        build_library(
            output, sources, Compiler.of(str(compiler), "-fPIC", "-I."), commands, ["-shared"], report=said.append
        )
    assert len(said) == 2
    assert result(sources, "direct") == 7


def test_objects_that_are_not_kept_are_not_needed(sources: Path) -> None:
    build(sources, keep_objects=False)
    assert not list((sources.parent / "lib" / "library.objects").glob("*.o"))
    assert build(sources, keep_objects=False) == []
    (sources / "alone.cpp").write_text('extern "C" int alone() { return 6; }\n')
    assert build(sources, keep_objects=False) == ["a room/through.cpp", "alone.cpp", "direct.cpp"]
    assert result(sources, "alone") == 6


def test_an_interrupted_build_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGINT to the whole group, as a terminal sends it, while the second of two sources is compiled."""
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit\nfor last; do :; done\n"
        f'[ "$(ls {tmp_path}/cache -R | grep -c json$)" = 2 ] && [ ! -e {tmp_path}/go ] && touch {tmp_path}/waits '
        '&& sleep 60\necho object > "$last"\n'
    )
    compiler.chmod(0o755)
    package = tmp_path / "nf4_kernels"
    shutil.copytree(Path(__file__).parents[2] / "nf4_kernels", package, ignore=shutil.ignore_patterns("lib"))
    (tmp_path / "cache").symlink_to(package / "lib")
    environment = os.environ | {"CXX": str(compiler)}
    command = [
        sys.executable,
        "-c",
        "import os; os.cpu_count = lambda: 1\nimport runpy, sys\n"
        "sys.argv = ['build.py', '--cpu-only']; runpy.run_path('nf4_kernels/build.py', run_name='__main__')",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "waits").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err == ""
    total = len(list((package / "csrc" / "cpu").glob("*.cpp")))
    assert out.splitlines()[-1].startswith(f"nf4_kernels: compiled 2 of {total}: ")
    (tmp_path / "go").touch()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert f"compiled 1 of {total - 2}: " in done.stdout
