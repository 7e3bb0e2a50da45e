"""Libraries and their object files: compile only what has changed, and keep what is done when a build is interrupted.

An object's record, NAME.json next to NAME.o, holds its command and the digests of the files that it was made of, which the
compiler lists in a depfile. The record is written last, so that an object without one is not complete. The library's own
record names the link command and the objects' records.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

Report = Callable[[str], None]


def say(line: str) -> None:
    """Print a line at once, into a pipe too."""
    print(line, flush=True)


class BuildError(RuntimeError):
    """A compiler was missing or failed; the message holds the command and what it printed."""


@dataclass(frozen=True)
class Compiler:
    """The first words of every command, and the compiler's version, a change of which compiles everything again."""

    command: list[str]
    version: str

    @classmethod
    def of(cls, path: str, *flags: str) -> Compiler:
        """The compiler at path. Raises BuildError if it cannot be run."""
        path = os.path.abspath(path)
        return cls([path, *flags], run([path, "--version"], Path.cwd()))


@dataclass(frozen=True)
class ObjectFile:
    """One source's object file. command: how it is compiled in the sources' folder, without its output."""

    path: Path
    source: str
    command: list[str]
    version: str

    @property
    def record(self) -> Path:
        """The file that says what the object was made of."""
        return self.path.with_suffix(".json")

    def is_current(self, digests: Mapping[str, str]) -> bool:
        """Whether the record names this command and these digests of the sources, by their paths."""
        try:
            record = json.loads(self.record.read_text())
        except (OSError, ValueError):
            return False
        if record["command"] != self.command or record["version"] != self.version:
            return False
        return all(digests.get(name) == digest for name, digest in record["files"].items())

    def compile(self, sources: Path, digests: Mapping[str, str]) -> None:
        """Compile the object and write its record. Raises BuildError."""
        self.record.unlink(missing_ok=True)
        depfile = self.path.with_suffix(".d")
        messages = run([*self.command, "-MMD", "-MF", str(depfile), "-o", str(self.path)], sources)
        if messages.strip():
            print(messages.rstrip(), file=sys.stderr)
        # A compiler that lists nothing may have read anything.
        used = set(_dependencies(depfile)) & set(digests) if depfile.exists() else set(digests)
        files = {name: digests[name] for name in sorted(used | {self.source})}
        self.record.write_text(json.dumps({"command": self.command, "version": self.version, "files": files}))
        depfile.unlink(missing_ok=True)


def build_library(
    output: Path,
    sources: Path,
    compiler: Compiler,
    commands: Mapping[str, list[str]],
    link: list[str],
    *,
    force: bool = False,
    keep_objects: bool = True,
    report: Report = say,
) -> Path:
    """Compile and link the library at output if anything that it is made of has changed; return output.

    commands: by each source's path in the folder sources, its flags; link: those of the link command. keep_objects: leave
    the objects for the next build. report: receives a line for each compiled source. Raises BuildError.
    """
    folder = output.with_suffix(".objects")
    folder.mkdir(parents=True, exist_ok=True)
    objects = [
        ObjectFile(
            folder / ("-".join(Path(source).with_suffix("").parts) + ".o"),
            source,
            [*compiler.command, *flags, "-c", source],
            compiler.version,
        )
        for source, flags in commands.items()
    ]
    # Another process that builds at the same time waits here, and then finds the library.
    with output.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Read before anything is compiled: a file that is saved during the build counts as changed in the next one.
        digests = source_digests(sources)
        stale = [o for o in objects if force or not o.is_current(digests)]
        record = output.with_suffix(".json")
        if not stale and output.exists() and record.exists() and record.read_text() == _link_record(link, objects):
            return output
        _compile([o for o in objects if o in stale or not o.path.exists()], sources, digests, report)
        unfinished = output.with_suffix(".partial")
        run([compiler.command[0], *link, *(str(o.path) for o in objects), "-o", str(unfinished)], sources)
        unfinished.replace(output)
        record.write_text(_link_record(link, objects))
        kept = {path for o in objects for path in ((o.path, o.record) if keep_objects else (o.record,))}
        for path in set(folder.iterdir()) - kept:
            path.unlink()
    return output


def source_digests(sources: Path) -> dict[str, str]:
    """The SHA-256 digest of every file in the folder sources, by its path there."""
    files = (path for path in sorted(sources.rglob("*")) if path.is_file())
    return {path.relative_to(sources).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run(command: list[str], folder: Path) -> str:
    """Run a compiler in a folder and return what it printed. Raises BuildError if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as e:
        raise BuildError(f"{command[0]}: {e.strerror or e}") from e
    if done.returncode:
        raise BuildError(f"in {folder}: {shlex.join(command)}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout + done.stderr


def _compile(stale: list[ObjectFile], sources: Path, digests: Mapping[str, str], report: Report) -> None:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        try:
            running = {pool.submit(o.compile, sources, digests): o.source for o in stale}
            for count, future in enumerate(as_completed(running), 1):
                future.result()
                report(f"nf4_kernels: compiled {count} of {len(stale)}: {running[future]}")
        except BaseException:
            pool.shutdown(cancel_futures=True)  # the first error is enough, and an interrupt waits for no more
            raise


def _link_record(link: list[str], objects: Iterable[ObjectFile]) -> str:
    records = [[o.path.name, o.record.read_text()] for o in objects]
    return hashlib.sha256(json.dumps([link, records]).encode()).hexdigest()


def _dependencies(depfile: Path) -> Iterable[str]:
    """The files that a depfile lists, by their paths from the folder where the compiler ran."""
    _, _, listed = depfile.read_text().replace("\\\n", " ").partition(": ")
    return (os.path.normpath(name) for name in shlex.split(listed))
