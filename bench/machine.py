"""The processor, its cores, the versions and the commit that a result was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def cpu_name() -> str:
    """The processor's name, as the operating system's kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_in_file_names() -> str:
    """The name of torch's current GPU as it stands in the names of result files."""
    import torch

    return torch.cuda.get_device_name().lower().replace(" ", "-")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute, and the kernel library's variant on this machine."""
    import nf4_kernels

    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "bitsandbytes")},
        "nf4_kernels": nf4_kernels.capabilities()["cpu"],
    }


def current_commit() -> str | None:
    """The commit that is checked out, with a + where files differ from it; None where there is no repository."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
