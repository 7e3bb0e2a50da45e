"""This machine before anything is installed: python deploy/machine.py check, gpu, nvcc, or torch-index [URL].

check ends with a line about what is missing and exit status 1. gpu warns of each GPU that cannot be used. nvcc prints the
path of an nvcc that is new enough. torch-index prints pip's option for torch without CUDA, which is 2.4 GB less to
download, or nothing if that index does not answer within seconds. It runs with any Python 3.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import urllib.request

PROJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "pyproject.toml")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TIMEOUT_S = 4
LEAST_CAPABILITY = (8, 0)
LEAST_DRIVER = 580
LEAST_NVCC = 13
"""Of CUDA 13, which PyPI's torch is made for."""


def python_range(project=PROJECT):
    """The oldest minor version of Python 3 that the project takes, and the first that it does not."""
    with open(project, encoding="utf-8") as file:
        found = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', file.read())
    return int(found.group(1)), int(found.group(2))


def missing(version=sys.version_info):
    """Name what this machine lacks for a build, in one line; None if it has everything."""
    oldest, first_above = python_range()
    if not (3, oldest) <= tuple(version[:2]) < (3, first_above):
        return (
            f"{sys.executable} is Python {version[0]}.{version[1]}, and 3.{oldest} to 3.{first_above - 1} work: "
            f"name another, such as PYTHON=python3.{oldest + 1} make serve"
        )
    # Not find_spec(), which setuptools takes for the beginning of pip: it then leaves distutils to Python.
    if not any(importlib.metadata.distributions(name="pip")):
        return f"{sys.executable} has no pip (Debian: apt-get install python3-pip)"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r} (Debian: apt-get install g++)"
    return None


def output(*command):
    """Print of a command; empty if it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def unusable():
    """Lines about what keeps the server from a GPU of this machine."""
    query = "--query-gpu=driver_version,compute_cap,name"
    found = [line.split(", ", 2) for line in output("nvidia-smi", query, "--format=csv,noheader").splitlines()]
    for driver in sorted({words[0] for words in found if len(words) == 3}):
        if driver.partition(".")[0].isdigit() and int(driver.partition(".")[0]) < LEAST_DRIVER:
            yield f"NVIDIA's driver {driver} is older than {LEAST_DRIVER}, which torch for CUDA 13 needs: update it"
    for _, capability, name in (words for words in found if len(words) == 3):
        parts = capability.split(".")
        if all(part.isdigit() for part in parts) and tuple(map(int, parts)) < LEAST_CAPABILITY:
            yield f"{name} has compute capability {capability}, and 8.0 or newer is needed: it is not used"


def nvcc():
    """Path of the nvcc that a build would find first, if it is new enough; else None."""
    home = os.environ.get("CUDA_HOME")
    places = [home and os.path.join(home, "bin", "nvcc"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    first = next((place for place in places if place and os.access(place, os.X_OK)), None)
    release = re.search(r"release (\d+)\.", output(first, "--version")) if first else None
    return first if release and int(release.group(1)) >= LEAST_NVCC else None


def answers(index, timeout_s=TIMEOUT_S):
    """Whether a package index has torch and says so in time, the look-up of its name included."""
    found = []

    def ask():
        try:
            with urllib.request.urlopen(index.rstrip("/") + "/torch/", timeout=timeout_s) as answer:
                found.append(answer.status == 200)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found == [True]


def main(command, *rest):
    """Run a command; return the exit status."""
    if command == "check":
        line = missing()
        if line is not None:
            print("error: " + line, file=sys.stderr)
            return 1
    elif command == "gpu":
        for line in unusable():
            print("== warning: " + line, file=sys.stderr)
    elif command == "nvcc":
        print(nvcc() or "")
    elif platform.system() == "Linux":  # elsewhere PyPI's torch has no CUDA
        index = rest[0] if rest else TORCH_INDEX
        if answers(index):
            print("--extra-index-url " + index)
        else:
            print(
                f"== {index} does not answer: PyPI's torch brings CUDA's libraries, 2.4 GB more",
                file=sys.stderr,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
