"""Private names of dependencies: each is there, and each row's file still uses it.

A new version of a dependency that drops one fails here by name, before anything is compiled or served.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

# (the file that uses it, the module, the name in it). A name behind ":" is set by the class's own methods.
NAMES = (
    ("nf4_kernels/bnb.py", "torch", "_C._get_tracing_state"),
    ("nf4_kernels/bnb.py", "torch", "_C._len_torch_dispatch_stack"),
    ("nf4_kernels/bnb.py", "torch", "_C._functorch.peek_interpreter_stack"),
    ("nf4_kernels/bnb.py", "bitsandbytes.nn.modules", "fix_4bit_weight_quant_state_from_module"),
    ("nf4_kernels/bnb.py", "bitsandbytes.backends.default.ops", "_gemm_4bit_default_impl"),
    ("server/checkpoint/classes.py", "transformers", "PreTrainedModel._is_stateful"),
    ("server/checkpoint/quantizer.py", "transformers.quantizers.auto", "AUTO_QUANTIZER_MAPPING"),
    ("server/checkpoint/quantizer.py", "transformers.conversion_mapping", "get_model_conversion_mapping"),
    ("server/checkpoint/quantizer.py", "transformers.core_model_loading", "WeightRenaming"),
    ("server/checkpoint/quantizer.py", "transformers.core_model_loading", "rename_source_key"),
    ("server/checkpoint/sharding/sharded.py", "transformers", "PreTrainedModel._keep_in_fp32_modules_strict"),
    (
        "server/api/http/connection.py",
        "uvicorn.protocols.http.httptools_impl",
        "HttpToolsProtocol:timeout_keep_alive_task",
    ),
    (
        "server/api/http/connection.py",
        "uvicorn.protocols.http.httptools_impl",
        "HttpToolsProtocol._unset_keepalive_if_required",
    ),
    ("server/api/http/connection.py", "uvicorn.protocols.http.httptools_impl", "HttpToolsProtocol.send_400_response"),
    ("server/api/http/connection.py", "uvicorn.protocols.http.httptools_impl", "HttpToolsProtocol:pipeline"),
)


@pytest.mark.parametrize(("file", "module", "name"), NAMES, ids=[f"{module}.{name}" for _, module, name in NAMES])
def test_a_private_name_is_there_and_used(file: str, module: str, name: str) -> None:
    found: Any = importlib.import_module(module)
    path, _, attribute = name.partition(":")
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    if attribute:
        assert f"self.{attribute}" in inspect.getsource(found)
    last = name.replace(":", ".").rpartition(".")[2] or module.rpartition(".")[2]
    assert last in (ROOT / file).read_text(encoding="utf-8"), f"{file} no longer uses {last}: remove the row"
