"""dummy_model: small versions of the benchmarked families, with every weight in place and of a sane size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit

from nf4_kernels.reference import dequantize
from server.checkpoint.base import CheckpointError
from server.checkpoint.dummy import EXPERTS_SHARE, dummy_model
from server.checkpoint.experts.module import NF4Experts
from tests.checkpoint.layouts import CPU, silent

MODELS = Path(__file__).parents[2] / "bench" / "models"
SMALL = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 7, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "moe_intermediate_size": 64, "num_experts": 8, "num_local_experts": 8,
    "n_routed_experts": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(folder.name for folder in MODELS.iterdir()))
def test_every_benchmarked_family_runs_on_random_weights(name: str, tmp_path: Path) -> None:
    settings = json.loads((MODELS / name / "config.json").read_text())
    layer_types = {"layer_types": settings["layer_types"][:7]} if "layer_types" in settings else {}
    # Every head has its own keys and values in latent attention.
    heads = {"num_key_value_heads": SMALL["num_attention_heads"]} if "kv_lora_rank" in settings else {}
    (tmp_path / "config.json").write_text(json.dumps({**settings, **SMALL, **layer_types, **heads}))
    model = dummy_model(tmp_path, CPU, torch.float32, silent, seed=1)
    layers = [m for m in model.modules() if isinstance(m, Linear4bit)]
    experts = [m for m in model.modules() if isinstance(m, NF4Experts)]
    # Layers with a state have five projections; the two narrow ones stay in 16 bits, as do those of a skip list.
    skipped = settings.get("quantization_config", {}).get("llm_int8_skip_modules", [])
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    fewer = kinds.count("linear_attention") * (1 + ("in_proj_qkv" in skipped))
    if settings.get("attention_k_eq_v"):
        fewer += kinds.count("full_attention")
    # A shared expert has three, and some a gate of their own; Gemma 4's dense part has three, and its router one.
    gated = settings.get("shared_expert_intermediate_size") or settings.get("enable_moe_block")
    shared = 4 if gated else 3 if settings.get("n_shared_experts") else 0
    attention = 5 if settings.get("q_lora_rank") else 4
    assert len(experts) == (7 - settings.get("first_k_dense_replace", 0) if experts else 0)
    assert len(layers) == 7 * attention + len(experts) * shared + (7 - len(experts)) * 3 - fewer
    for module in experts:
        for stacked, share in ((module.gate_up, 1), (module.down, EXPERTS_SHARE)):
            assert stacked.shape[0] == 8
            assert 0.015 < dequantize(stacked.weight, torch.float32).std() / share < 0.04
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
        # The one row of a shared expert's gate has too few numbers to tell as exactly.
        least = 0.015 if layer.out_features > 1 else 0.01
        assert least < dequantize_4bit(layer.weight.data, layer.weight.quant_state).std() < 0.04
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    with torch.inference_mode():
        logits = model(torch.arange(50)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.05
    again = dummy_model(tmp_path, CPU, torch.float32, silent, seed=1)
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_config_of_no_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(CheckpointError, match="no model can be made"):
        dummy_model(tmp_path, CPU, torch.float32, silent, seed=1)


def test_scores_of_attention_and_shares_of_experts_are_sane(tmp_path: Path) -> None:
    """Gemma 4 multiplies them by 1, and trained norms of keys make them small."""
    settings = json.loads((MODELS / "gemma-4-26b-a4b" / "config.json").read_text())
    own = {"global_head_dim": 64, "num_global_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**settings, **SMALL, **own}))
    for layer in dummy_model(tmp_path, CPU, torch.float32, silent, seed=1).get_decoder().layers:
        attention = layer.self_attn
        query, key = torch.randn(2, 200, attention.head_dim)
        scores = attention.q_norm(query) @ attention.k_norm(key).T * attention.scaling
        assert 0.8 < scores.std() < 1.2
        # A router that chooses another expert by rounding changes less.
        x = torch.randn(20, 128)
        assert layer.post_feedforward_layernorm_2(x).std() < 0.3 * layer.post_feedforward_layernorm_1(x).std()
