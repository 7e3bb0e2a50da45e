"""Products that take along the norm before them and the sum after: where, where not, and the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import nf4_kernels.ops
from server.engine.runtime import lora
from server.engine.runtime.fusion import FusedProducts, Fuses, fused_products
from server.engine.runtime.lora import AdapterTable, adding_masked
from server.engine.runtime.projections import NF4Linear, replace_projections
from tests.engine.models import tiny_model

BF16 = torch.bfloat16


def always(*_: object) -> bool:
    return True


def count(graph: Graph) -> Counter[str]:
    """The products of a graph by what they take along, and the norms."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node.target is torch.ops.nf4.fused_linear.default:
            residual, weight = node.args[9], node.args[10]
            found[" ".join(["norm"] * (weight is not None) + ["residual"] * (residual is not None))] += 1
        found["plain"] += node.target is torch.ops.nf4.linear.default
        found["rsqrt"] += node.target is torch.ops.aten.rsqrt.default
    return +found


@contextmanager
def fusing(fuses: Fuses = always) -> Iterator[list[Counter[str]]]:
    """While entered, graphs are fused; gives what is in each of them."""
    found: list[Counter[str]] = []
    hooks = {
        "post_grad_custom_pre_pass": FusedProducts(fuses),
        "post_grad_custom_post_pass": lambda graph: found.append(count(graph)),
        "force_disable_caches": True,
    }
    torch._dynamo.reset()
    with config.patch(hooks):
        yield found


def passes_only(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """inductor without its code generator, which takes seconds: graphs run as its passes leave them."""

    def inner(module: GraphModule, *_: object, **__: object) -> GraphModule:
        post_grad_passes(module, is_inference=True)
        return module

    compiled: Callable[..., Any] = compile_fx(module, inputs, inner_compile=inner)
    return compiled


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, **{"fullgraph": True, "dynamic": False, "backend": passes_only, **options})


def nf4(k: int, n: int, dtype: torch.dtype = BF16, weight: torch.Tensor | None = None) -> Linear4bit:
    layer = Linear4bit(k, n, bias=False, compute_dtype=dtype, quant_type="nf4")
    values = torch.randn(n, k) * 0.15 if weight is None else weight
    layer.weight = Params4bit(values.to(dtype), requires_grad=False, quant_type="nf4")
    moved: Linear4bit = layer.to("cpu")
    return moved


def nf4_model(family: str, dtype: torch.dtype = BF16, **overrides: Any) -> PreTrainedModel:
    """Of one layer, with norms that matter."""
    model = tiny_model(family, **{"num_hidden_layers": 1, "rms_norm_eps": 0.3, **overrides}).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 2)
    for parent in list(model.get_decoder().layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, nf4(child.in_features, child.out_features, dtype, child.weight.data))
    assert replace_projections(model) == 7
    return model


def logits(model: PreTrainedModel, tokens: int) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=False).logits
    return found


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within a few roundings to bfloat16."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm()) < 0.02


@torch.inference_mode()
def counts_of(model: PreTrainedModel, tokens: int = 5, fuses: Fuses = always) -> Counter[str]:
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
def test_every_product_of_a_layer_takes_something_along(family: str, tokens: int, other_norms: int) -> None:
    expected = {"norm": 2, "residual": 2, "rsqrt": other_norms}
    assert counts_of(nf4_model(family), tokens) == +Counter(expected)


def test_norms_of_another_form_stay() -> None:
    model = nf4_model("gemma3_text", layer_types=["full_attention"])
    assert counts_of(model) == {"plain": 4, "rsqrt": 6}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_bfloat16_is_fused(dtype: torch.dtype) -> None:
    assert counts_of(nf4_model("llama", dtype)) == {"plain": 4, "rsqrt": 2}


def test_only_what_has_a_launch_is_fused() -> None:
    asked: list[tuple[Any, ...]] = []

    def fuses(*question: Any) -> bool:
        asked.append(question)
        return question[3] in ([192, 64], [64, 64])

    assert counts_of(nf4_model("llama"), 7, fuses) == {"norm": 1, "residual": 1, "plain": 2, "rsqrt": 1}
    shapes = [([128, 64], False), ([64, 64], True), ([192, 64], False), ([64, 96], True)]
    without = [(torch.device("cpu"), BF16, 7, shape, 64, nested, False) for shape, nested in shapes]
    assert asked == [*without, (torch.device("cpu"), BF16, 7, [192, 64], 64, False, True)]


def test_a_norm_may_have_no_launch_where_a_residual_has() -> None:
    def fuses(*question: Any) -> bool:
        return not question[-1]

    assert counts_of(nf4_model("llama"), 7, fuses) == {"residual": 2, "plain": 2, "rsqrt": 2}


def test_kernels_say_what_has_a_launch() -> None:
    """And there is none for CPUs."""
    model = nf4_model("llama")
    layer = model.get_decoder().layers[0]
    wanted = logits(model, 3)
    layer.forward = compiled(layer.forward)
    with torch.inference_mode(), fusing() as graphs, config.patch(post_grad_custom_pre_pass=None), fused_products():
        assert close(logits(model, 3), wanted)
    assert graphs == [{"plain": 4, "rsqrt": 2}]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj", "o_proj", "up_proj", "down_proj"), {"plain": 4, "rsqrt": 2}),
        (("o_proj",), {"norm": 2, "residual": 1, "plain": 1}),
        (("v_proj",), {"norm": 1, "residual": 2, "plain": 1, "rsqrt": 1}),
    ],
)
def test_products_with_adapters_stay(targets: tuple[str, ...], expected: dict[str, int]) -> None:
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


class Around(nn.Module):
    """A product with a norm and a residual around it, put together by function(self, h)."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.norm = LlamaRMSNorm(64, 0.3).to(BF16).requires_grad_(False)
        self.norm.weight.uniform_(0.5, 2)
        self.first, self.second = NF4Linear(nf4(64, 64)), NF4Linear(nf4(64, 64))

    def forward(self, h: torch.Tensor) -> Any:
        return self.function(self, h)


def _views(m: Any, h: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = h + m.first(m.norm(h).view(-1, 64)).view(h.shape)
    return out


def _norm_read_twice(m: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    normalized = m.norm(h)
    return m.first(normalized), m.second(normalized.view(-1, 64))


def _norm_also_given(m: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    normalized = m.norm(h)
    return m.first(normalized), normalized.view(-1, 64)


def _norm_is_the_residual(m: Any, h: torch.Tensor) -> Any:
    normalized = m.norm(h)
    return normalized + m.first(normalized)


def _product_read_twice(m: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = m.first(h)
    return h + y, y.sum(-1)


def _twice_itself(m: Any, h: torch.Tensor) -> Any:
    y = m.first(h)
    return y + y


def _other_scale(m: Any, h: torch.Tensor) -> Any:
    return torch.add(h, m.first(h), alpha=2)


def _other_shape(m: Any, h: torch.Tensor) -> Any:
    return h[0, :1] + m.first(h)


def _not_contiguous(m: Any, h: torch.Tensor) -> Any:
    return h.transpose(0, 1).contiguous().transpose(0, 1) + m.first(h)


def _x_not_contiguous(m: Any, h: torch.Tensor) -> Any:
    return h.transpose(0, 1).contiguous() + m.first(h.transpose(0, 1))


def _other_dtype(m: Any, h: torch.Tensor) -> Any:
    return h.float() + m.first(h)


def _other_order(m: Any, h: torch.Tensor) -> Any:
    wide = h.float()
    return h + m.first((torch.rsqrt(0.3 + wide.pow(2).mean(2, keepdim=True)) * wide).to(h.dtype) * m.norm.weight)


def _normalised(m: Any, h: torch.Tensor, squared: torch.Tensor, dim: int, weight: torch.Tensor) -> Any:
    """Like the norm, for other arguments."""
    return m.first(weight * (h.float() * torch.rsqrt(squared.mean(dim, keepdim=True) + 0.3)).to(h.dtype))


def _over_rows(m: Any, h: torch.Tensor) -> Any:
    return _normalised(m, h, h.float().pow(2), 1, m.norm.weight)


def _of_another(m: Any, h: torch.Tensor) -> Any:
    return _normalised(m, h, (h * 2).float().pow(2), -1, m.norm.weight)


def _other_power(m: Any, h: torch.Tensor) -> Any:
    return _normalised(m, h, h.float().pow(4), -1, m.norm.weight)


def _one_weight(m: Any, h: torch.Tensor) -> Any:
    return _normalised(m, h, h.float().pow(2), -1, m.norm.weight[:1])


def _part(m: Any, h: torch.Tensor) -> Any:
    return m.first(m.norm(h.repeat(1, 1, 2)[..., :64]))


def _norm_and_norm_of_it(m: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    normalized = m.norm(h)
    return m.first(m.norm(normalized)), m.second(normalized)


def _two_residuals(m: Any, h: torch.Tensor) -> Any:
    return h * 2 + (m.first(h) + h)


def _heads(m: Any, h: torch.Tensor) -> Any:
    return m.first((m.norm.weight[:16] * _rms(h.view(2, 3, 4, 16))).view(h.shape))


def _rms(h: torch.Tensor) -> torch.Tensor:
    wide = h.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 0.3)).to(h.dtype)


def _wide_weight(m: Any, h: torch.Tensor) -> Any:
    return m.first((m.norm.weight.float() * _rms(h)).to(h.dtype))


def _computed_weight(m: Any, h: torch.Tensor) -> Any:
    return m.first((1 + m.norm.weight) * _rms(h))


def _written_between(m: Any, h: torch.Tensor) -> Any:
    residual = h * 2
    y = m.first(h)
    residual.mul_(3)
    torch.ops.nf4_server_lora.add(residual, h, m.a, m.b)
    out = residual + y
    residual.zero_()
    return out


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda m, h: m.first(m.norm(h)) + h, {"norm residual": 1}),
        (_views, {"norm residual": 1}),
        (_other_order, {"norm residual": 1}),
        (_norm_and_norm_of_it, {"norm": 1, "plain": 1, "rsqrt": 1}),
        (_two_residuals, {"residual": 1}),
        (lambda m, h: m.second(m.norm(h + m.first(h))), {"residual": 1, "norm": 1}),
        (lambda m, h: m.first(h) + m.second(h), {"residual": 1, "plain": 1}),
        (_norm_read_twice, {"norm": 2}),
        (_norm_also_given, {"plain": 1, "rsqrt": 1}),
        (_norm_is_the_residual, {"residual": 1, "rsqrt": 1}),
        (lambda m, h: m.first(m.norm(m.norm(h))), {"norm": 1, "rsqrt": 1}),
        (_product_read_twice, {"plain": 1}),
        (_twice_itself, {"plain": 1}),
        (_other_scale, {"plain": 1}),
        (_other_shape, {"plain": 1}),
        (_other_dtype, {"plain": 1}),
        (_not_contiguous, {"plain": 1}),
        (_x_not_contiguous, {"plain": 1}),
        *((form, {"plain": 1, "rsqrt": 1}) for form in (_over_rows, _of_another, _other_power, _one_weight, _part)),
        *((form, {"plain": 1, "rsqrt": 1}) for form in (_heads, _wide_weight, _computed_weight)),
        (_written_between, {"residual": 1}),
    ],
)
@pytest.mark.filterwarnings("error:erase_node")
@torch.inference_mode()
def test_forms(function: Callable[..., Any], expected: dict[str, int]) -> None:
    module = Around(function)
    module.a, module.b = torch.randn(2, 4, 64, dtype=BF16), torch.randn(2, 4, 64, dtype=BF16)
    h = torch.randn(2, 3, 64, dtype=BF16)
    with adding_masked(torch.arange(6)[:, None] % 2 == torch.arange(2)), fusing() as graphs:
        wanted, found = module(h.clone()), compiled(module)(h.clone())
    for one, other in zip(found, wanted, strict=True):
        assert close(one, other)
    assert graphs == [expected]


@torch.inference_mode()
def test_sizes_that_vary_are_not_fused() -> None:
    module = Around(lambda m, h: m.first(m.norm(h)) + h)
    h = torch.randn(1, 3, 64, dtype=BF16)
    torch._dynamo.decorators.mark_unbacked(h, 1)
    with fusing() as graphs:
        assert close(compiled(module, dynamic=None)(h), module(h))
    assert graphs == [{"plain": 1, "rsqrt": 1}]


@pytest.mark.parametrize("between", [True, False])
def test_nothing_is_fused_behind_a_write(between: bool) -> None:
    """Graphs that inductor's passes see have none; make_fx leaves them in."""
    product = NF4Linear(nf4(64, 64))

    def function(h: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = product(h)
        if between:
            residual.add_(1)
        return residual + y

    h = torch.randn(3, 64, dtype=BF16)
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(h, h.clone()).graph
    FusedProducts(always)(graph)
    assert count(graph) == ({"plain": 1} if between else {"residual": 1})


@torch.inference_mode()
def test_code_that_inductor_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4_kernels.ops, "fuses", always)
    module = Around(lambda m, h: m.second(m.norm(h.transpose(0, 1) + m.first(h.transpose(0, 1)))))
    h = torch.randn(3, 1, 64, dtype=BF16)
    with fusing() as graphs, config.patch(post_grad_custom_pre_pass=None), fused_products():
        assert close(compiled(module, backend="inductor")(h), module(h))
    assert graphs == [{"residual": 1, "norm": 1}]


def test_the_hook_is_set_only_while_entered_and_only_if_it_is_free() -> None:
    with fused_products():
        own = config.post_grad_custom_pre_pass
        # Or inductor keeps no code on disk.
        assert isinstance(own, CustomGraphPass)
        assert own.uuid() == FusedProducts().uuid() is not None
        with fused_products():
            assert config.post_grad_custom_pre_pass is own
    assert config.post_grad_custom_pre_pass is None
    assert FusedProducts(always).uuid() is None
    other = FusedProducts(always)
    with config.patch(post_grad_custom_pre_pass=other), fused_products():
        assert config.post_grad_custom_pre_pass is other
