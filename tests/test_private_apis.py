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
RUNTIME = "server/engine/runtime"
PASSES = f"{RUNTIME}/compile/passes"

# (the file that uses it, the module, the name in it). A name behind ":" is set by the class's own methods.
NAMES = (
    ("nf4_kernels/bnb.py", "torch", "_C._get_tracing_state"),
    ("nf4_kernels/bnb.py", "torch", "_C._len_torch_dispatch_stack"),
    ("nf4_kernels/bnb.py", "torch", "_C._functorch.peek_interpreter_stack"),
    ("nf4_kernels/bnb.py", "torch.library", "Library._destroy"),
    ("nf4_kernels/bnb.py", "bitsandbytes.nn.modules", "fix_4bit_weight_quant_state_from_module"),
    ("nf4_kernels/bnb.py", "bitsandbytes.backends.default.ops", "_gemm_4bit_default_impl"),
    ("nf4_kernels/cuda/weight_order.py", "torch.multiprocessing.reductions", "StorageWeakRef.expired"),
    (f"{RUNTIME}/attention/kernels/decode/trial.py", "torch._inductor.compile_fx", ""),
    (f"{RUNTIME}/compile/ahead.py", "torch._dynamo.config", "enable_aot_compile"),
    (f"{RUNTIME}/compile/ahead.py", "torch._dynamo.config", "specialize_float"),
    (f"{RUNTIME}/compile/ahead.py", "torch._dynamo.config", "automatic_dynamic_shapes"),
    (f"{RUNTIME}/compile/ahead.py", "torch._dynamo.config", "assume_static_by_default"),
    (f"{RUNTIME}/compile/ahead.py", "torch._dynamo.package", "SourceInfo.add_code"),
    (f"{RUNTIME}/compile/artifacts.py", "torch._dynamo.aot_compile", "AOTCompiledFunction.deserialize"),
    (f"{RUNTIME}/compile/artifacts.py", "torch._dynamo.aot_compile", "AOTCompiledFunction.serialize"),
    (f"{RUNTIME}/compile/artifacts.py", "torch._inductor.cpu_vec_isa", "valid_vec_isa_list.__wrapped__"),
    (f"{RUNTIME}/compile/artifacts.py", "torch._inductor.config", "cpp.vec_isa_ok"),
    (f"{RUNTIME}/compile/block_sizes.py", "torch._inductor.choices", "InductorChoices.should_use_persistent_reduction"),
    (
        f"{RUNTIME}/compile/block_sizes.py",
        "torch._inductor.runtime.triton_heuristics",
        "CachingAutotuner.autotune_to_one_config",
    ),
    (f"{RUNTIME}/compile/block_sizes.py", "torch._inductor.runtime.hints", "ReductionHint.INNER"),
    (f"{RUNTIME}/compile/block_sizes.py", "torch._inductor.runtime.hints", "HeuristicType.PERSISTENT_REDUCTION"),
    (f"{RUNTIME}/compile/block_sizes.py", "torch._inductor.virtualized", "V"),
    (f"{RUNTIME}/compile/block_sizes.py", "torch._inductor.config", "autotune_local_cache"),
    (f"{RUNTIME}/compile/block_sizes.py", "torch._inductor.config", "combo_kernels"),
    (f"{RUNTIME}/compile/layers.py", "torch._dynamo.decorators", "mark_unbacked"),
    (f"{RUNTIME}/compile/layers.py", "torch._inductor.config", "cpp.threads"),
    (f"{RUNTIME}/compile/layers.py", "torch._inductor.config", "triton.autotune_pointwise"),
    (f"{RUNTIME}/compile/pdl.py", "torch._inductor.config", "triton.enable_pdl"),
    (f"{RUNTIME}/compile/pdl.py", "torch._inductor.codegen.triton", "TritonKernel._filter_pdl"),
    (f"{RUNTIME}/compile/pdl.py", "torch._inductor.codegen.triton", "TritonKernel._enable_pdl_codegen"),
    (f"{RUNTIME}/compile/pdl.py", "torch._inductor.codegen.triton", "TritonKernel.GDC_WAIT"),
    (f"{RUNTIME}/compile/pdl.py", "torch._inductor.codegen.triton", "TritonKernel.GDC_LAUNCH"),
    (f"{RUNTIME}/compile/pdl.py", "torch._inductor.utils", "IndentedBuffer:_lines"),
    (f"{RUNTIME}/compile/pdl.py", "torch.compiler.config", "cache_key_tag"),
    (f"{PASSES}/exchanges.py", "torch._higher_order_ops.auto_functionalize", "auto_functionalized_v2"),
    (f"{PASSES}/fusion.py", "torch._inductor.config", "post_grad_custom_pre_pass"),
    (f"{PASSES}/fusion.py", "torch._inductor.custom_graph_pass", "CustomGraphPass.register"),
    (f"{PASSES}/matching.py", "torch", "ops.aten.add.Tensor._schema"),
    (f"{PASSES}/matching.py", "torch.fx", "Node:_erased"),
    (f"{RUNTIME}/exchange.py", "torch", "_C._distributed_c10d.FileStore"),
    (f"{RUNTIME}/graphs/captured_layers.py", "torch._dynamo.config", "recompile_limit"),
    (f"{RUNTIME}/graphs/captured_layers.py", "torch._inductor.config", "epilogue_fusion"),
    (f"{RUNTIME}/graphs/fused_launches.py", "torch.utils._python_dispatch", "TorchDispatchMode.is_infra_mode"),
    (f"{RUNTIME}/attention/masks.py", "transformers.masking_utils", "AttentionMaskInterface"),
    ("server/checkpoint/classes.py", "transformers.models.auto", "modeling_auto"),
    ("server/checkpoint/classes.py", "transformers", "PreTrainedModel._is_stateful"),
    ("server/checkpoint/experts/loading.py", "transformers", "PreTrainedModel._keys_to_ignore_on_load_unexpected"),
    ("server/checkpoint/loading.py", "transformers.core_model_loading", "tqdm"),
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
    ("server/engine/grammar.py", "llguidance", "LLMatcher.unsafe_compute_mask_ptr"),
    ("server/engine/grammar.py", "llguidance", "LLExecutor.unsafe_compute_mask_ptr"),
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
