"""Make of NVIDIA's PyPI wheels a folder that looks like an installed CUDA toolkit: python docker/cuda_home.py FOLDER.

FlashInfer compiles its attention for the GPU that it meets, with the nvcc of $CUDA_HOME, and links what it finds in lib64.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

home = Path(sys.argv[1])
wheels = [Path(place) / "cu13" for place in importlib.util.find_spec("nvidia").submodule_search_locations]
toolkit = next(place for place in wheels if (place / "bin" / "nvcc").exists())
stubs = home / "lib64" / "stubs"
stubs.mkdir(parents=True)
for name in ("bin", "include", "nvvm"):
    (home / name).symlink_to(toolkit / name)
for library in (toolkit / "lib").iterdir():
    (home / "lib64" / library.name).symlink_to(library)
(home / "lib64" / "libcudart.so").symlink_to(next((toolkit / "lib").glob("libcudart.so.*")))
# The driver's library comes into the container with the GPU; until then there is one without functions to link against.
stub = ["g++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stubs / "libcuda.so"), "-x", "c++", "/dev/null"]
subprocess.run(stub, check=True)
