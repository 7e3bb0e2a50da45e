"""The structs that Python and the compiled libraries share: equal sizes, and what is said where they differ."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

from nf4_kernels import build, cpu, params
from nf4_kernels.cuda import library as cuda_library
from nf4_kernels.mamba2_params import Nf4Mamba2


class LongerWeight(ctypes.Structure):
    """Nf4Weight as a later version might have it."""

    _fields_ = (*params.Nf4Weight._fields_, ("more", ctypes.c_int64))


def test_every_struct_of_the_headers_is_mirrored_in_its_size() -> None:
    """The CPU library is compiled from the same header, so this needs no GPU's."""
    library = cpu.library()
    assert not isinstance(library, str), library
    assert params.size_error(library.nf4_cpu_struct_size, cuda_library.STRUCTS) is None
    assert params.size_error(library.nf4_cpu_struct_size, {"Nf4Mamba2": Nf4Mamba2}) is None
    header = "".join((build.SOURCES / name).read_text() for name in ("params.h", "gated_delta.h"))
    assert set(re.findall(r"^} (\w+);", header, re.MULTILINE)) == set(cuda_library.STRUCTS)
    assert library.nf4_cpu_struct_size(b"Nf4Nothing") == 0


def test_plans_have_the_fields_of_the_header_in_its_order() -> None:
    header = (build.SOURCES / "params.h").read_text()
    plans = dict(re.findall(r"typedef struct {([^}]*)} (\w+Plan);", header))
    assert len(plans) == 6
    for fields, name in plans.items():
        mirrored = [field[0] for field in cuda_library.STRUCTS[name]._fields_]
        assert re.findall(r"^  int32_t (\w+);", fields, re.MULTILINE) == mirrored


def test_a_cpu_library_of_another_size_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "Nf4Weight", LongerWeight)
    said = cpu.library.__wrapped__()
    assert isinstance(said, str)
    assert "Nf4Weight has 72 bytes in the library and 80 in Python; build it again" in said
    assert "\n" not in said


def test_a_cuda_library_of_another_size_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with the same functions, compiled from a header whose Nf4Linear is shorter."""
    names = re.findall(r"nf4_cuda_\w+", Path(cuda_library.__file__).read_text())
    functions = {f"{name}{end}" for name in names for end in ("", "_timed")} - {"nf4_cuda_struct_size"}
    sizes = "".join(
        f'if (!strcmp(name, "{name}")) return {ctypes.sizeof(struct) - 8 * (name == "Nf4Linear")};\n'
        for name, struct in cuda_library.STRUCTS.items()
    )
    source, library = tmp_path / "older.c", tmp_path / "older.so"
    source.write_text(
        "#include <string.h>\n"
        + "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(functions))
        + f"long long nf4_cuda_struct_size(const char* name) {{\n{sizes}return 0;\n}}\n"
    )
    compiler = [os.environ.get("CXX", "g++"), "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(compiler, check=True)
    monkeypatch.setattr(cuda_library, "cuda_library", lambda: library)
    said = cuda_library.library.__wrapped__()
    size = ctypes.sizeof(cuda_library.Linear)
    assert isinstance(said, str)
    assert f"Nf4Linear has {size - 8} bytes in the library and {size} in Python" in said
    assert "\n" not in said
    # With the size that it should have, the same library is taken.
    monkeypatch.setitem(
        cuda_library.STRUCTS,
        "Nf4Linear",
        type("Shorter", (ctypes.Structure,), {"_fields_": (("a", ctypes.c_char * (size - 8)),)}),
    )
    assert not isinstance(cuda_library.library.__wrapped__(), str)
