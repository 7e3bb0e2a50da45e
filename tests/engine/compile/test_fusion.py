"""GEMMs of whole layers with their norms, residuals and adapters: what is fused, what not, and the same numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from transformers import PreTrainedModel

import nf4_kernels.ops
from server.engine.runtime.compile.passes.fusion import FusedOperations, fused_operations
from server.engine.runtime.compile.passes.matching import HasLaunch
from server.engine.runtime.model import lora
from server.engine.runtime.model.lora import adding_masked
from server.engine.runtime.model.lora_table import AdapterTable
from server.engine.runtime.model.projections import replace_projections
from tests.engine.compile.fusing import BF16, Around, always, close, compiled, fusing, nf4
from tests.engine.models import tiny_model


def nf4_model(family: str, dtype: torch.dtype = BF16, layers: int = 1, **overrides: Any) -> PreTrainedModel:
    """A model of a family with NF4 projections, and norms that matter."""
    model = tiny_model(family, **{"num_hidden_layers": layers, "rms_norm_eps": 0.3, **overrides}).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 2)
    for parent in list(model.get_decoder().layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, nf4(child.in_features, child.out_features, dtype, child.weight.data))
    assert replace_projections(model) == 7 * layers
    return model


def logits(model: PreTrainedModel, tokens: int) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=False).logits
    return found


@torch.inference_mode()
def counts_of(model: PreTrainedModel, tokens: int = 5, fuses: HasLaunch = always) -> Counter[str]:
    """What is in the compiled layer, which gives what it gives uncompiled."""
    wanted = logits(model, tokens)
    layer = model.get_decoder().layers[0]
    layer.forward = compiled(layer.forward)
    with fusing(fuses) as graphs:
        assert close(logits(model, tokens), wanted)
    assert len(graphs) == 1
    return graphs[0]


@pytest.mark.parametrize(
    ("family", "tokens", "other_norms"), [("llama", 5, 0), ("llama", 1, 0), ("mistral", 2, 0), ("qwen3", 5, 2)]
)
def test_every_gemm_of_a_layer_is_fused(family: str, tokens: int, other_norms: int) -> None:
    expected = {"norm": 1, "norm silu": 1, "residual": 2, "rsqrt": other_norms}
    assert counts_of(nf4_model(family), tokens) == +Counter(expected)


def test_norms_of_another_form_stay() -> None:
    model = nf4_model("gemma3_text", layer_types=["full_attention"])
    assert counts_of(model) == {"plain": 3, "gelu_tanh": 1, "rsqrt": 6}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_bfloat16_is_fused(dtype: torch.dtype) -> None:
    assert counts_of(nf4_model("llama", dtype)) == {"plain": 4, "rsqrt": 2}


def test_only_what_has_a_launch_is_fused() -> None:
    asked: list[tuple[Any, ...]] = []

    def fuses(*question: Any) -> bool:
        asked.append(question)
        return question[3] in ([192, 64], [64, 64])

    assert counts_of(nf4_model("llama"), 7, fuses) == {"norm silu": 1, "residual": 1, "plain": 2, "rsqrt": 1}
    shapes = [([128, 64], False), ([64, 64], True), ([192, 64], False), ([64, 96], True)]
    without = [(torch.device("cpu"), BF16, 7, shape, 64, nested, False) for shape, nested in shapes]
    assert asked == [*without, (torch.device("cpu"), BF16, 7, [192, 64], 64, False, True)]


def test_a_norm_may_have_no_launch_where_a_residual_has() -> None:
    def fuses(*question: Any) -> bool:
        return not question[-1]

    assert counts_of(nf4_model("llama"), 7, fuses) == {"residual": 2, "silu": 1, "plain": 1, "rsqrt": 2}


def test_kernels_say_what_has_a_launch() -> None:
    """And there is none for CPUs."""
    model = nf4_model("llama")
    layer = model.get_decoder().layers[0]
    wanted = logits(model, 3)
    layer.forward = compiled(layer.forward)
    with torch.inference_mode(), fusing() as graphs, config.patch(post_grad_custom_pre_pass=None), fused_operations():
        assert close(logits(model, 3), wanted)
    assert graphs == [{"plain": 4, "rsqrt": 2}]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj", "o_proj", "up_proj", "down_proj"), {"plain": 4, "rsqrt": 2}),
        (("o_proj",), {"norm": 1, "norm silu": 1, "residual": 1, "plain": 1}),
        (("v_proj",), {"norm silu": 1, "residual": 2, "plain": 1, "rsqrt": 1}),
        (("up_proj",), {"norm": 1, "residual": 2, "plain": 1, "rsqrt": 1}),
    ],
)
def test_gemms_with_adapters_stay(targets: tuple[str, ...], expected: dict[str, int]) -> None:
    model = nf4_model("llama")
    names = {name for name, _ in model.named_modules() if name.endswith(targets)}
    AdapterTable(model, model.get_decoder().layers, 2, 4, names)
    for module in model.modules():
        if isinstance(module, lora.AdaptedLinear):
            module.a.normal_(0, 0.3)
            module.b.normal_(0, 0.3)
    with torch.inference_mode():
        base = logits(model, 5)
    others = torch.arange(5)[:, None] % 2 == torch.arange(2)
    with adding_masked(others):
        assert not close(base, logits(model, 5))  # the adapters matter
        assert counts_of(model) == expected


@torch.inference_mode()
def test_code_that_inductor_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4_kernels.ops, "can_fuse", always)
    module = Around(lambda m, h: m.second(m.norm(h.transpose(0, 1) + m.first(h.transpose(0, 1)))))
    h = torch.randn(3, 1, 64, dtype=BF16)
    with fusing() as graphs, config.patch(post_grad_custom_pre_pass=None), fused_operations():
        assert close(compiled(module, backend="inductor")(h), module(h))
    assert graphs == [{"residual": 1, "norm": 1}]


def test_the_hook_is_set_only_while_entered_and_only_if_it_is_free() -> None:
    with fused_operations():
        own = config.post_grad_custom_pre_pass
        # Or inductor keeps no code on disk.
        assert isinstance(own, CustomGraphPass)
        assert own.uuid() == FusedOperations().uuid() is not None
        with fused_operations():
            assert config.post_grad_custom_pre_pass is own
    assert config.post_grad_custom_pre_pass is None
    assert FusedOperations(always).uuid() is None
    other = FusedOperations(always)
    with config.patch(post_grad_custom_pre_pass=other), fused_operations():
        assert config.post_grad_custom_pre_pass is other
