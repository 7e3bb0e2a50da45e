"""enable() and disable() on transformers models with bitsandbytes layers, alone and beside PEFT's LoRA."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes import matmul_4bit
from bitsandbytes.functional import dequantize_blockwise, quantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import nf4_kernels
from nf4_kernels import bnb, reference
from nf4_kernels.format import Weight
from tests.nf4_kernels.weights import is_close


@pytest.fixture
def enabled() -> Iterator[None]:
    nf4_kernels.enable()
    yield
    nf4_kernels.disable()


def tiny(folder: Path, quant_type: str = "nf4") -> Any:
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32).eval()


def exact(model: Any) -> Any:
    """A copy whose layers never take bitsandbytes' lossy CPU path."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return other


def test_an_unmodified_model_generates_the_same_tokens(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    plain = exact(model)
    ids = torch.randint(3, 128, (2, 9))
    expected = plain.generate(ids, max_new_tokens=12, do_sample=False)
    nf4_kernels.enable()
    try:
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)
        with torch.inference_mode():
            ours = model(ids).logits
    finally:
        nf4_kernels.disable()
    with torch.inference_mode():
        assert torch.allclose(ours, plain(ids).logits, atol=1e-4)
    layers = [m for m in model.modules() if isinstance(m, Linear4bit)]
    assert not any(getattr(m.weight.quant_state, "packing_format_for_cpu", False) for m in layers)


def test_enable_and_disable_swap_the_forward_and_can_be_repeated() -> None:
    original = Linear4bit.forward
    nf4_kernels.enable()
    nf4_kernels.enable()
    assert Linear4bit.forward is not original
    nf4_kernels.disable()
    nf4_kernels.disable()
    assert Linear4bit.forward is original


def test_what_vllm_calls_goes_through_the_op_that_is_replaced_on_cuda() -> None:
    """vLLM's layers call matmul_4bit() with a slice of the packed weight, transposed."""
    packed, state = quantize_4bit(torch.randn(256, 128, dtype=torch.bfloat16), blocksize=64, quant_type="nf4")
    for tokens in (1, 40):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            matmul_4bit(torch.randn(tokens, 128, dtype=torch.bfloat16), packed[:].t(), state)
        assert "bitsandbytes::gemm_4bit" in {event.name for event in profiled.events()}


def test_a_saved_model_has_bitsandbytes_layout_while_enabled(tmp_path: Path, enabled: None) -> None:
    model = tiny(tmp_path / "a")
    ids = torch.randint(3, 128, (1, 5))
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert torch.equal(again(ids).logits, expected)


def test_fp4_layers_stay_with_bitsandbytes(tmp_path: Path, caplog: pytest.LogCaptureFixture, enabled: None) -> None:
    model = exact(tiny(tmp_path, "fp4"))
    monkey = bnb._said.copy()
    bnb._said.clear()
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        ours = model(torch.arange(3, 9)[None]).logits
    bnb._said.update(monkey)
    assert any("fp4" in record.getMessage() for record in caplog.records)
    nf4_kernels.disable()
    with torch.inference_mode():
        assert torch.equal(model(torch.arange(3, 9)[None]).logits, ours)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_as_bitsandbytes_has_them(tmp_path: Path, given: torch.dtype, enabled: None) -> None:
    layer = tiny(tmp_path).model.layers[0].mlp.up_proj
    x = torch.randn(3, 128).to(given)
    out = layer(x)
    assert out.dtype == given
    weight = Weight.from_quant_state(layer.weight, layer.weight.quant_state)
    expected = reference.linear(x.float(), weight)
    assert torch.allclose(out.float(), expected, rtol=1e-2, atol=1e-4)


def test_a_layer_compiles_into_one_graph(tmp_path: Path, enabled: None) -> None:
    layer = tiny(tmp_path).model.layers[0].self_attn.q_proj
    x = torch.randn(4, 128)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(x), layer(x))


def test_lora_beside_the_kernels_forward_and_backward(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, settings)
    ids = torch.randint(3, 128, (2, 7))

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        adapted.zero_grad()
        out = adapted(ids, labels=ids)
        out.loss.backward()
        return out.logits.detach(), {n: p.grad.clone() for n, p in adapted.named_parameters() if p.grad is not None}

    for module in adapted.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    logits, gradients = run()
    nf4_kernels.enable()
    try:
        ours, our_gradients = run()
    finally:
        nf4_kernels.disable()
    assert gradients.keys() == our_gradients.keys()
    assert len(gradients) == 2 * 2 * 2
    assert is_close(ours, logits)
    for name, gradient in gradients.items():
        assert is_close(our_gradients[name], gradient, 1e-3), name


def oracle(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weight = Weight.from_quant_state(layer.weight, layer.weight.quant_state)
    return reference.linear(x, weight, layer.bias)


@torch.inference_mode()
def test_a_layer_that_has_run_sees_its_parts_replaced(tmp_path: Path, enabled: None) -> None:
    layer, other = (tiny(tmp_path).model.layers[i].self_attn.q_proj for i in (0, 1))
    x = torch.randn(2, 128)
    first = layer(x)
    assert is_close(layer(x), oracle(layer, x))
    layer.bias = torch.nn.Parameter(torch.randn(128), requires_grad=False)
    assert is_close(layer(x), oracle(layer, x))
    layer.bias.data = torch.randn(128)
    assert is_close(layer(x), oracle(layer, x))
    layer.bias.mul_(2)
    assert is_close(layer(x), oracle(layer, x))
    layer.weight = other.weight
    assert is_close(layer(x), oracle(layer, x))
    packed, state = quantize_4bit(torch.randn(128, 128), quant_type="nf4", compress_statistics=True)
    layer.weight.data, layer.weight.quant_state = packed, state
    assert is_close(layer(x), oracle(layer, x))
    layer.weight.data = packed.flip(0)
    assert is_close(layer(x), oracle(layer, x))
    layer.compute_dtype = torch.bfloat16
    assert not is_close(layer(x), oracle(layer, x))
    assert layer(x).dtype == torch.float32
    assert not torch.allclose(layer(x), first, atol=1e-2)


@torch.inference_mode()
def test_layers_that_have_run_are_copied_and_pickled(tmp_path: Path, enabled: None) -> None:
    layer = tiny(tmp_path).model.layers[0].self_attn.q_proj
    x = torch.randn(2, 128)
    expected = layer(x)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(x), expected)
        again.weight.data.zero_()
        assert not torch.equal(again(x), expected)
    assert torch.equal(layer(x), expected)


@torch.inference_mode()
def test_without_kernels_layers_stay_with_bitsandbytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, enabled: None
) -> None:
    monkeypatch.setattr(bnb, "_said", set())
    monkeypatch.setitem(bnb._LOAD_ERRORS, "cpu", lambda: "no compiler")
    layer = exact(tiny(tmp_path)).model.layers[0].self_attn.q_proj
    x = torch.randn(2, 128)
    called: list[torch.Tensor] = []

    def theirs(self: Any, x: torch.Tensor) -> torch.Tensor:
        called.append(x)
        return x * 2

    monkeypatch.setattr(bnb, "_original_forward", theirs)
    with caplog.at_level(logging.WARNING):
        assert all(torch.equal(layer(x), x * 2) for _ in range(2))
    assert len(called) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "Linear4bit on cpu stays on bitsandbytes' own kernels, not on nf4_kernels: no compiler"
    ]
    # The oracle is for who asks for the ops.
    compiled = torch.compile(layer, backend="aot_eager")
    assert torch.equal(compiled(x), x * 2)
    monkeypatch.setitem(bnb._LOAD_ERRORS, "cpu", lambda: None)
    assert is_close(layer(x), oracle(layer, x))


@torch.inference_mode()
def test_one_layer_in_several_threads_at_once(tmp_path: Path, enabled: None) -> None:
    layer = tiny(tmp_path).model.layers[0].mlp.up_proj
    inputs = [torch.randn(1 + i % 3, 128) for i in range(8)]
    expected = [layer(x) for x in inputs]

    def many(index: int) -> bool:
        with torch.inference_mode():
            return all(torch.equal(layer(inputs[index]), expected[index]) for _ in range(100))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(many, range(8)))


@torch.inference_mode()
def test_tracers_see_the_op(tmp_path: Path, enabled: None) -> None:
    layer = tiny(tmp_path).model.layers[0].self_attn.q_proj
    x = torch.randn(2, 128)
    layer(x)
    graph = make_fx(layer)(x).graph
    assert any(node.target is torch.ops.nf4.linear.default for node in graph.nodes)


@pytest.mark.parametrize("nested", [True, False])
def test_a_layer_that_bitsandbytes_repacked_is_unpacked(
    nested: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = tiny(tmp_path).model.layers[0].self_attn.q_proj
    if not nested:
        state = layer.weight.quant_state
        plain = dequantize_blockwise(state.absmax, state.state2) + state.offset
        state.absmax, state.nested, state.state2, state.offset = plain, False, None, None
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("bitsandbytes repacks weights only on CPUs with AVX512-BF16")
    monkeypatch.setattr(bnb, "_said", set())
    x, packed = torch.randn(2, 128), layer.weight.data.clone()
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        nf4_kernels.enable()
        ours = [layer(x) for _ in range(2)]
        nf4_kernels.disable()
        theirs = layer(x)
        assert layer.weight.quant_state.packing_format_for_cpu
        nf4_kernels.enable()
        try:
            again = [layer(x) for _ in range(2)]
            assert torch.equal(layer.weight.data, packed)
            state = layer.weight.quant_state
            # The weights are those that bitsandbytes computed with: its codes, and scales in bfloat16.
            weight = nf4_kernels.dequantize_4bit(layer.weight, state, torch.float32)
        finally:
            nf4_kernels.disable()
        repacked_again = layer(x)
    assert torch.equal(again[0], again[1])
    assert (again[0] - x @ weight.T).norm() < 3e-4 * again[0].norm()
    assert (again[0] - ours[0]).norm() < 4e-3 * ours[0].norm()
    assert torch.equal(repacked_again, theirs)
    assert sum("ran before enable()" in record.getMessage() for record in caplog.records) == 1
    assert isinstance(layer.weight, Params4bit)
