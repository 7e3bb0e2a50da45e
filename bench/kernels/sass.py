"""Whether two builds of the CUDA kernels are the same machine code: python -m bench.kernels.sass BEFORE AFTER.

BEFORE and AFTER are cubins or objects of nvcc for one GPU target (`nvcc ... -cubin -gencode=arch=compute_90a,code=sm_90a`).
Kernels are paired by name (--rename OLD=NEW) and by the types and values of their template arguments; structs that group
these, and their names, do not count. Instructions, registers, stack (spills) and static shared memory are compared. Needs
cuobjdump, nvdisasm and c++filt on PATH.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kernel:
    """One kernel's machine code: its instructions in order, and what cuobjdump says of its resources."""

    instructions: tuple[str, ...]
    resources: str


def kernels(path: Path) -> dict[str, Kernel]:
    """The kernels of a cubin by their mangled names. RuntimeError where cuobjdump cannot read it."""
    usage = _run("cuobjdump", "-res-usage", str(path))
    resources = dict(re.findall(r"Function (\S+):\n\s*(.*)", usage))
    found = {}
    _, *blocks = _run("cuobjdump", "-sass", str(path)).split("Function : ")
    for block in blocks:
        name, body = block.split("\n", maxsplit=1)
        instructions = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", body, re.MULTILINE)
        found[name] = Kernel(tuple(instructions), resources.get(name, ""))
    if not found:
        raise RuntimeError(f"{path} holds no kernels")
    return found


def key(demangled: str, renamed: dict[str, str]) -> tuple[str, ...]:
    """A kernel's own name and its template arguments' types and values, without the names of what groups them."""
    plain = demangled.replace("(anonymous namespace)::", "").removeprefix("void ")
    start = re.match(r"(?:\w+::)*(\w+)(<?)", plain)
    if start is None:
        return (demangled,)
    arguments = _inside(plain[start.end() :]) if start[2] else ""
    values = re.findall(r"__half|__nv_bfloat16|\bfloat\b|\btrue\b|\bfalse\b|(?<!\w)\d+", arguments)
    return (renamed.get(start[1], start[1]), *values)


def _inside(text: str) -> str:
    """The part of text up to the > that closes the bracket opened in front of text."""
    depth = 1
    for place, character in enumerate(text):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if depth == 0:
            return text[:place]
    return text


def differences(before: Kernel, after: Kernel) -> list[str]:
    """What differs, a line each; empty where the two are the same."""
    found = []
    if before.resources != after.resources:
        found.append(f"resources: {before.resources} -> {after.resources}")
    if before.instructions == after.instructions:
        return found
    old, new = len(before.instructions), len(after.instructions)
    opcodes = Counter(map(_opcode, after.instructions))
    opcodes.subtract(map(_opcode, before.instructions))
    changed = {name: count for name, count in opcodes.items() if count}
    pairs = enumerate(zip(before.instructions, after.instructions, strict=False))
    first = next((place for place, (was, now) in pairs if was != now), min(old, new))
    return [*found, f"instructions: {old} -> {new}, first other at {first}, opcodes {changed or 'the same counts'}"]


def _opcode(instruction: str) -> str:
    words = instruction.split()
    return words[1] if words[0].startswith("@") and len(words) > 1 else words[0]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _by_key(path: Path, renamed: dict[str, str]) -> dict[tuple[str, ...], Kernel]:
    found = kernels(path)
    names = subprocess.run(["c++filt"], input="\n".join(found), capture_output=True, text=True, check=True)
    pairs = zip(names.stdout.splitlines(), found.values(), strict=True)
    keyed: dict[tuple[str, ...], Kernel] = {}
    for name, kernel in pairs:
        if keyed.setdefault(key(name, renamed), kernel) is not kernel:
            raise RuntimeError(f"{path} holds two kernels {key(name, renamed)}")
    return keyed


def main() -> int:
    """Compare, print a line a kernel that differs; 0 where none does."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels.sass", description="Compare two builds' machine code."
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="a kernel's name then and now")
    options = parser.parse_args()
    renamed = dict(pair.split("=", 1) for pair in options.rename)
    before, after = _by_key(options.before, renamed), _by_key(options.after, {})
    different = 0
    for pair in sorted(before.keys() & after.keys()):
        for line in differences(before[pair], after[pair]):
            different += 1
            print(f"{' '.join(pair)}: {line}")
    alone = [
        (side, pair)
        for side, pairs in (("before", before.keys() - after.keys()), ("after", after.keys() - before.keys()))
        for pair in sorted(pairs)
    ]
    for side, pair in alone:
        print(f"{' '.join(pair)}: only {side}")
    print(
        f"{len(before.keys() & after.keys())} kernels on both sides, {different} differences, {len(alone)} on one side alone"
    )
    return 1 if different or alone else 0


if __name__ == "__main__":
    sys.exit(main())
