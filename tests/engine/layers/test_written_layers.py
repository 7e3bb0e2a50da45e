"""Written decoder layers against transformers' own, over the paged cache and with every launch that they may make."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn

from nf4_kernels import ops
from server.checkpoint.loading import load_model
from server.config import EngineConfig
from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions
from server.engine.runtime.attention.graph_backend import DecodeForm
from server.engine.runtime.layers import projection
from server.engine.runtime.layers.decoder import DecoderLayer
from server.engine.runtime.layers.experts import Experts, ModuleRouter, SigmoidRouter, SoftmaxRouter, read_router
from server.engine.runtime.layers.norm import RmsNorm, read_rms_norm
from server.engine.runtime.layers.parts import UnknownLayerError
from server.engine.runtime.layers.rotary_functions import angle_step
from server.engine.runtime.layers.spec import read_layer
from server.engine.runtime.model.cpu_linear import use_cpu_kernels
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.model.latents import keep_latents
from server.engine.runtime.model.projections import replace_projections
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation import written_layers
from server.engine.runtime.preparation.cache import CacheSpec
from server.engine.runtime.preparation.trial_steps import TrialSteps
from server.engine.runtime.trials import DifferenceError
from tests.checkpoint.families import COMMON, SERVED
from tests.engine.models import nf4, tiny_model
from tests.moe_checkpoints import FAMILIES as MIXTURES
from tests.moe_checkpoints import save_moe, separate_experts, tiny_moe, unsloth_gpt_oss

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=64, max_num_seqs=5, enforce_eager=True)
WRITTEN = (
    "apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "granite", "helium", "hunyuan_v1_dense", "hyperclovax", "internlm3", "jais2", "llama", "ministral",
    "ministral3", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss",
    "smollm3", "stablelm", "starcoder2", "vaultgemma",
)  # fmt: skip
"""Families whose layers are written ones; docs/models.md says so of the same."""


def paged_of(family: str, **overrides: Any) -> tuple[PagedModel, list[AttentionOptions]]:
    # Two layers, none of which shares another one's keys and values.
    shared = {"num_kv_shared_layers": 0} if family.startswith("gemma") else {}
    model = tiny_model(family, **{**COMMON, **SERVED[family], **shared, **overrides})
    spec = CacheSpec.of(model, CONFIG)
    return PagedModel(model, spec.backend(40), CONFIG.block_size), spec.options


@pytest.mark.parametrize("family", sorted(SERVED))
@torch.inference_mode()
def test_which_families_have_written_layers(family: str) -> None:
    paged, options = paged_of(family)
    assert bool(written_layers.write_layers(paged, options)) == (family in WRITTEN)


@pytest.mark.parametrize("shares_values", [False, True])
@torch.inference_mode()
def test_layers_of_gemma_4_without_inputs_of_their_own(shares_values: bool) -> None:
    paged, options = paged_of("gemma4_text", hidden_size_per_layer_input=0, attention_k_eq_v=shares_values)
    for index, layer in enumerate(paged.model.get_decoder().layers):
        layer.layer_scalar.fill_(0.5 + index)
    written = written_layers.write_layers(paged, options)
    assert [layer.mixer.value_norm is None for layer in written] == [False] * len(options)
    assert any(len(layer.mixer.qkv.projections) == 2 for layer in written) == shares_values


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "olmo2", "granite"])
@torch.inference_mode()
def test_a_layer_that_a_rule_gets_wrong_runs_by_its_own_code(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paged, options = paged_of(family)
    steps = TrialSteps(paged)
    expected = steps.run(9)

    def misread(module: nn.Module) -> RmsNorm | None:
        found = read_rms_norm(module)
        return None if found is None else RmsNorm(found.weight, found.eps, 1.0 - found.offset)

    monkeypatch.setattr("server.engine.runtime.layers.norm.read_rms_norm", misread)
    assert not written_layers.write_layers(paged, options)
    assert torch.equal(steps.run(9), expected)


@torch.inference_mode()
def test_one_layer_that_differs_is_found_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    paged, options = paged_of("llama", num_hidden_layers=8)
    options[5] = AttentionOptions(options[5].scaling * 1.5)
    assert not written_layers.write_layers(paged, options)


@pytest.mark.parametrize(("family", "step"), [("llama", 0), ("phi", 0), ("gpt_oss", 0), ("glm4", 1), ("cohere", 2)])
def test_pairs_of_rotary_embeddings_are_told_apart(family: str, step: int) -> None:
    assert angle_step(tiny_model(family).get_decoder().layers[0].self_attn) == step


def test_norms_are_told_apart() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for norm, offset in ((LlamaRMSNorm(48, 1e-5), 0.0), (Gemma3RMSNorm(48, 1e-6), 1.0)):
            norm.weight.data.normal_(1, 0.3)
            found = read_rms_norm(norm.to(dtype))
            assert found is not None
            assert (found.offset, found.eps) == (offset, getattr(norm, "eps", 1e-5))
    layer_norm = nn.LayerNorm(48, bias=False)
    assert read_rms_norm(layer_norm) is None


def test_a_layer_with_a_part_that_no_rule_knows_is_named() -> None:
    model = tiny_model("llama")
    layer = model.get_decoder().layers[1]
    layer.self_attn.gate = nn.Linear(64, 4)
    with pytest.raises(UnknownLayerError, match=r"LlamaAttention has gate"):
        read_layer(layer, 1, AttentionOptions(0.25))


class Rotating(AttentionBackend):
    """Attention to the tokens of the pass alone, whose results may be tiled."""

    def begin(self, batch: Any) -> None:
        pass

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        wide = (x.float().transpose(0, 1) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True, scale=options.scaling)
        return out.transpose(0, 1).to(query.dtype).contiguous()

    def tiles_result(self, tokens: int) -> bool:
        return True


def nf4_layers(model: nn.Module, dtype: torch.dtype) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and "layers" in name:
            layer = nf4(module.in_features, module.out_features, dtype, module.weight.data)
            assert isinstance(layer, Linear4bit)
            model.set_submodule(name, layer)
    replace_projections(model)


@pytest.mark.parametrize(
    ("fuses", "gates", "tile"), [(True, True, 32), (True, False, 0), (False, True, 0), (False, False, 0)]
)
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text"])
@torch.inference_mode()
def test_all_launches_that_a_layer_may_make_compute_the_same(
    family: str, copies: bool, fuses: bool, gates: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches are the oracle's here: what is tested is which of them a layer makes, of what."""
    from server.engine.runtime.attention.calls import IMPLEMENTATION, attending

    def yes_to(answer: object) -> Any:
        return lambda *_: answer

    monkeypatch.setattr(ops, "can_fuse", yes_to(fuses))
    monkeypatch.setattr(ops, "can_gate", yes_to(gates))
    monkeypatch.setattr(ops, "token_tile", yes_to(tile))
    wide: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
    own = {"layer_types": ["full_attention"]} if family == "gemma3_text" else {}
    model = tiny_model(family, **wide, **own).to(torch.bfloat16)
    nf4_layers(model, torch.bfloat16)
    model.set_attn_implementation(IMPLEMENTATION)
    (layer,) = model.get_decoder().layers
    gemms = [module for module in layer.modules() if hasattr(module, "expand")]
    for gemm in gemms if copies else ():
        gemm.expand(torch.bfloat16)
        gemm.fused_up_to = 8
    ids = torch.randint(0, 128, (1, 40))
    written = read_layer(layer, 0, AttentionOptions(layer.self_attn.scaling))
    called: list[str] = []
    watched = {name: _watched(name, called) for name in ("fused_linear", "gated_linear", "tiled_linear")}
    monkeypatch.setattr(projection, "ops", SimpleNamespace(**vars(ops) | watched))
    results: list[Sequence[torch.Tensor]] = []

    def hook(_: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        results.append((written(args[0].clone(), **kwargs), output, args[0]))

    layer.register_forward_hook(hook, with_kwargs=True)
    with attending(Rotating()):
        model(input_ids=ids, use_cache=False)
    ((found, expected, x),) = results
    assert (found - expected).float().norm() < 0.02 * (expected - x).float().norm()
    by_codes = not copies
    assert ("gated_linear" in called) == (gates and by_codes)
    assert called.count("tiled_linear") == (by_codes and tile > 0) * (1 + gates)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_forms_of_attention_by_sequences(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "token_tile", lambda *_: 32)
    model = tiny_model(family, hidden_size=256, head_dim=64, num_hidden_layers=1)
    nf4_layers(model, torch.bfloat16)
    (layer,) = model.get_decoder().layers
    attention, norms = read_layer(layer, 0, AttentionOptions(1.0)).mixer, family == "qwen3"
    assert [attention.form(count, torch.bfloat16) for count in (1, 4)] == [DecodeForm(False, False, 0)] * 2
    assert attention.form(8, torch.bfloat16) == DecodeForm(True, norms, 32)
    layer.self_attn.o_proj.expand(torch.bfloat16)
    assert attention.form(129, torch.bfloat16) == DecodeForm(True, norms, 0)


def _watched(name: str, called: list[str]) -> Any:
    def watched(*args: Any) -> Any:
        called.append(name)
        return getattr(ops, name)(*args)

    return watched


WRITTEN_MIXTURES = (
    "deepseek_v2", "deepseek_v3", "gemma4_text", "glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_moe",
)  # fmt: skip


@pytest.mark.parametrize("family", sorted(MIXTURES))
@torch.inference_mode()
def test_which_mixtures_have_written_layers(family: str, tmp_path: Path) -> None:
    renames = {"gpt_oss": unsloth_gpt_oss, "llama4_text": separate_experts}
    save_moe(tmp_path, tiny_moe(family), **({"rename": renames[family]} if family in renames else {}))
    model = load_model(tmp_path, torch.device("cpu"), torch.float32, lambda *_: None)
    replace_projections(model)
    use_cpu_kernels(model)
    keep_latents(model)
    spec = CacheSpec.of(model, CONFIG)
    paged = PagedModel(model, spec.backend(40), CONFIG.block_size)
    assert bool(written_layers.write_layers(paged, spec.options)) == (family in WRITTEN_MIXTURES)


def test_the_page_of_models_says_which_have_written_layers() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    lists = re.findall(r"^\* (?:dense|mixtures): ((?:.|\n  )+)", page, re.MULTILINE)
    dense, mixtures = (set(re.findall(r"`(\w+)`", names)) for names in lists)
    assert dense == set(WRITTEN)
    assert mixtures == set(WRITTEN_MIXTURES)


@pytest.mark.parametrize(
    ("mlp", "differing", "fails"),
    [
        (False, [1, 0, 0, 0], True),
        (True, [0, 0, 0, 0], False),
        (True, [8, 4, 4, 0], False),
        (True, [9, 0, 0, 0], True),
        (True, [8, 8, 2, 0], True),
    ],
)
def test_single_tokens_may_choose_other_experts(mlp: bool, differing: Sequence[int], fails: bool) -> None:
    """Rounding alone decides between experts that are nearly equal; without a mixture no token may differ."""
    x, expected = torch.randn(1, 17, 8), torch.randn(1, 17, 8)
    comparisons = []
    for index, count in enumerate(differing):

        def written(_: torch.Tensor, count: int = count) -> torch.Tensor:
            found = expected.clone()
            found[:, :count] *= 2
            return found

        written.mlp = Experts(lambda y: (y, y), nn.Identity()) if mlp else None
        comparison = written_layers._Comparison(index, cast(DecoderLayer, written), torch.float32)
        comparison.hook(nn.Identity(), (x,), {}, expected)
        comparisons.append(comparison)
    with pytest.raises(DifferenceError, match="layer 0 by") if fails else nullcontext():
        written_layers._check(comparisons)


def test_logits_of_mixtures_are_compared_by_the_median_token() -> None:
    steps = TrialSteps(paged_of("llama")[0])
    expected = torch.randn(7, 64)
    found = expected.clone()
    found[:3] = torch.randn(3, 64)
    assert steps.difference(found, expected, 1)
    steps.is_mixture = True
    assert steps.difference(found, expected, 1) is None
    found[3] = torch.randn(64)
    assert steps.difference(found, expected, 1)


def test_routers_are_told_apart() -> None:
    kinds = {
        family: read_router(_router(family)) for family in ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe")
    }
    softmax = [kinds[family] for family in ("qwen3_moe", "mixtral", "gpt_oss", "olmoe")]
    assert [router.normalised for router in softmax if isinstance(router, SoftmaxRouter)] == [True, True, True, False]
    assert type(kinds["glm4_moe"]) is ModuleRouter
    router = decoder_layers(tiny_moe("llama4_text"))[-1].get_submodule("feed_forward.router")
    with pytest.raises(UnknownLayerError, match="Llama4Router does not give weights and experts"):
        read_router(router)


@torch.inference_mode()
def test_a_router_with_a_bias_takes_the_softmax_of_the_greatest_logits() -> None:
    module = _router("gpt_oss")
    module.get_parameter("bias").normal_()
    x = torch.randn(50, 64)
    _, expected, chosen = module(x)
    weights, experts = read_router(module)(x)
    assert torch.equal(experts.long(), chosen)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("normalised", [True, False])
@torch.inference_mode()
def test_a_router_of_sigmoids_without_groups(family: str, normalised: bool) -> None:
    """The bias is in the choice, and not in the weights."""
    sizes = {"n_group": 1, "norm_topk_prob": normalised, "routed_scaling_factor": 1.8, "num_experts_per_tok": 3}
    module = _router(family, **sizes)
    module.get_buffer("e_score_correction_bias").normal_(0, 0.3)
    router = read_router(module)
    assert isinstance(router, SigmoidRouter)
    x = torch.randn(50, 64)
    _, expected, chosen = module(x)
    weights, experts = router(x)
    order, own_order = chosen.argsort(-1), experts.argsort(-1)
    assert torch.equal(experts.gather(-1, own_order).long(), chosen.gather(-1, order).long())
    torch.testing.assert_close(weights.gather(-1, own_order), expected.gather(-1, order))


@torch.inference_mode()
def test_a_router_whose_weight_is_in_float32() -> None:
    """It computes in it in a model of 16 bits."""
    module = _router("deepseek_v2", n_group=1, topk_group=1)
    x = torch.randn(20, 64).bfloat16()
    _, expected, chosen = module(x)
    weights, experts = read_router(module)(x)
    order, own_order = chosen.argsort(-1), experts.argsort(-1)
    assert torch.equal(experts.gather(-1, own_order).long(), chosen.gather(-1, order).long())
    torch.testing.assert_close(weights.gather(-1, own_order), expected.gather(-1, order))


def _router(family: str, **sizes: Any) -> nn.Module:
    block = tiny_moe(family, **sizes).get_decoder().layers[1].mlp
    router = block.router if family == "gpt_oss" else block.gate
    for name, parameter in router.named_parameters():
        assert parameter.std() > 0 or name == "bias"
    return router
