"""The version that runs: between two releases, the last one's with the commit."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from server import __version__


@functools.cache
def running_version() -> str:
    """The version of this process's code: "0.2.0", or "0.2.0+1a2b3c4" in a checkout with other commits than the release."""
    return version_of(Path(__file__).resolve().parents[1])


def version_of(root: Path) -> str:
    """The version of the checkout in root. A release is the commit that sets __version__; without git it is this alone."""
    if not (root / ".git").exists():
        return __version__
    commit = _git(root, "describe", "--always", "--exclude=*", "--dirty=.dirty")
    release = _git(root, "log", "-1", "--format=%h", "--", "server/__init__.py")
    return __version__ if commit in ("", release) else f"{__version__}+{commit}"


def _git(root: Path, *arguments: str) -> str:
    """Output of git, or nothing if it fails or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
