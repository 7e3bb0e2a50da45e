"""Fetch the chat page's libraries from npm as pins.json names them, and write VENDORED.md: make page-vendor.

A new version is a new `version` and `integrity` (npm view PACKAGE@VERSION dist.integrity) in pins.json. The files stay
byte for byte what the package has. Needs npm; a package whose sha512 is not the pinned one ends the script with an error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "server/api/static/vendor"
HEAD = """# Vendored libraries of the chat page

Unchanged files of npm packages. `pins.json` pins their versions and the packages' sha512; `make page-vendor` fetches them
anew and writes this table.

| file | package | version | license | bytes | sha256 |
| --- | --- | --- | --- | ---: | --- |
"""


def fetch(pin: dict[str, Any], folder: Path) -> Path:
    """The package's tarball in folder. Raises SystemExit if it is not the one that was pinned."""
    name = f"{pin['package']}@{pin['version']}"
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), name]
    tarball = folder / subprocess.check_output(command, text=True).split()[-1]
    found = "sha512-" + base64.b64encode(hashlib.sha512(tarball.read_bytes()).digest()).decode()
    if found != pin["integrity"]:
        raise SystemExit(f"{name} has the integrity {found}, but pins.json says {pin['integrity']}")
    return tarball


def table(pins: list[dict[str, Any]]) -> str:
    """VENDORED.md for the files that are there."""
    lines = []
    for pin in pins:
        for name in pin["files"].values():
            data = (FOLDER / name).read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            source = f"[{pin['package']}](https://www.npmjs.com/package/{pin['package']})"
            lines.append(f"| {name} | {source} | {pin['version']} | {pin['license']} | {len(data)} | `{digest}` |\n")
    uses = "".join(f"* {pin['package']}: {pin['purpose']}.\n" for pin in pins)
    return HEAD + "".join(lines) + "\n" + uses


def main() -> None:
    """Fetch, check, unpack, list."""
    pins = json.loads((FOLDER / "pins.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        for pin in pins:
            with tarfile.open(fetch(pin, Path(folder))) as package:
                for source, name in pin["files"].items():
                    member = package.extractfile(f"package/{source}")
                    if member is None:
                        raise SystemExit(f"{pin['package']} has no file {source}")
                    (FOLDER / name).write_bytes(member.read())
            print(f"{pin['package']} {pin['version']}", file=sys.stderr)
    (FOLDER / "VENDORED.md").write_text(table(pins))


if __name__ == "__main__":
    main()
