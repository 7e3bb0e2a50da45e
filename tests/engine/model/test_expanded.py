"""16-bit copies of NF4 weights: which layers get them, which steps use them, and that both give the same GEMM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from nf4_kernels import ops
from server.checkpoint.dummy import dummy_model
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.limits import EngineConfigError
from server.engine.runtime.model import expanded
from server.engine.runtime.model.expanded import copy_bytes, expand_weights, expanded_bytes
from server.engine.runtime.model.projections import NF4Linear, replace_projections
from server.engine.runtime.preparation import expansion
from server.engine.runtime.preparation.assembly import build_runner
from server.types import GenerateRequest, SamplingParams
from tests.nf4_kernels.cuda.cuda_weights import HOPPER

MODEL = Path(__file__).parents[3] / "bench" / "models" / "qwen3-8b"
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 128,
    "num_key_value_heads": 1, "vocab_size": 500, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FEW, MANY = NF4Linear.EXPANDED_FROM - 1, NF4Linear.EXPANDED_FROM
"""The most tokens that are multiplied by the codes, the fewest by the copies."""
CUDA = torch.device("cuda", 0)


def small_model(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    settings = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **SMALL}))
    return dummy_model(folder, device, dtype, lambda *_: None, seed=3)


def linears_of(model: PreTrainedModel) -> list[list[NF4Linear]]:
    return [
        [module for module in layer.modules() if isinstance(module, NF4Linear)] for layer in model.get_decoder().layers
    ]


def first_linear(folder: Path) -> NF4Linear:
    """A layer without a copy, in float32 on CPU."""
    model = small_model(folder, torch.device("cpu"), torch.float32)
    replace_projections(model)
    return linears_of(model)[0][0]


def test_whole_decoder_layers_are_expanded_as_far_as_the_bytes_go(tmp_path: Path) -> None:
    model = small_model(tmp_path, torch.device("cpu"), torch.bfloat16)
    replace_projections(model)
    layers = linears_of(model)
    each = sum(copy_bytes(module, torch.bfloat16) for module in layers[0])
    # q, k, v, o, gate, up and down of 256, 128, 128, 256, 512, 512 and 256 rows.
    assert each == 2 * (256 * 256 + 2 * 128 * 256 + 256 * 256 + 3 * 512 * 256)
    assert expand_weights(model, 3 * each - 1) == 2 * each == expanded_bytes(model)
    assert [all(m.expanded is not None for m in layer) for layer in layers] == [True, True, False, False]
    assert not any(m.expanded is not None for layer in layers[2:] for m in layer)


@pytest.mark.parametrize("tokens", [1, FEW, MANY, 300])
def test_copies_are_used_from_their_token_count_on(tokens: int, tmp_path: Path) -> None:
    module = first_linear(tmp_path)
    x = torch.randn(1, tokens, module.in_features)
    by_codes = module(x)
    module.expand(torch.float32)
    assert module.expanded is not None
    by_copy = linear(x, module.expanded)
    assert torch.equal(module(x), by_copy if tokens >= MANY else by_codes)
    assert (by_copy - by_codes).norm() < 1e-4 * by_codes.norm()


@pytest.mark.parametrize(
    ("tokens", "most", "by_codes"), [(MANY, 256, True), (256, 256, True), (257, 256, False), (MANY, FEW, False)]
)
def test_layers_of_large_weights_use_the_codes_for_more_tokens(
    tokens: int, most: int, by_codes: bool, tmp_path: Path
) -> None:
    module = first_linear(tmp_path)
    x = torch.randn(1, tokens, module.in_features)
    codes = module(x)
    module.expand(torch.float32)
    assert module.expanded is not None
    module.expanded.mul_(2)  # so that it shows which of both a run takes
    module.fused_up_to = most
    assert module.uses_copy(tokens) is not by_codes
    assert torch.equal(module(x), codes if by_codes else linear(x, module.expanded))


@pytest.mark.parametrize(
    ("dtype", "large", "tile", "most"),
    [
        (torch.bfloat16, 512 * 256, 128, expanded.LARGE_UP_TO),
        (torch.bfloat16, 512 * 256 * 2 + 1, 128, FEW),
        (torch.bfloat16, 512 * 256, 0, FEW),
        (torch.float16, 512 * 256, 128, FEW),
    ],
)
def test_what_is_multiplied_by_the_codes(
    dtype: torch.dtype, large: int, tile: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a large weight, in the dtype and on the devices whose launches are fused."""
    model = small_model(tmp_path, torch.device("cpu"), dtype)
    replace_projections(model)
    layers = linears_of(model)
    each = sum(copy_bytes(module, dtype) for module in layers[0])
    monkeypatch.setattr(expanded, "LARGE", large)
    monkeypatch.setattr(ops, "token_tile", lambda *_: tile)
    expand_weights(model, each)
    assert [{module.fused_up_to for module in layer} for layer in layers] == [{most}, {FEW}, {FEW}, {FEW}]


@pytest.mark.parametrize(
    ("settings", "free", "expected"),
    [
        ({"expanded_weights": "off"}, 100, 0),
        ({"expanded_weights": 0}, 100, 0),
        ({}, 103, 25),
        ({"kv_cache_bytes": 2**20}, 103 + 2**20, 50),
        ({"expanded_weights": 40}, 103, 40),
        ({"batch_invariant": True}, 103, 0),
    ],
)
def test_the_bytes_for_copies(
    settings: dict[str, object], free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 100))
    assert expansion.expansion_budget(CUDA, EngineConfig(**settings)) == expected


@pytest.mark.parametrize(("kept", "expected"), [(0, 25), (75, 25), (80, 20), (200, 0)])
def test_copies_leave_what_a_useful_cache_needs(kept: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (103, 100))
    assert expansion.expansion_budget(CUDA, EngineConfig(), kept) == expected
    assert expansion.expansion_budget(CUDA, EngineConfig(expanded_weights=40), kept) == 40


def test_copies_that_cannot_be_used_or_do_not_fit_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expansion.expansion_budget(torch.device("cpu"), EngineConfig()) == 0
    with pytest.raises(EngineConfigError, match=r"engine\.expanded_weights .* need CUDA"):
        expansion.expansion_budget(torch.device("cpu"), EngineConfig(expanded_weights=1))
    with pytest.raises(EngineConfigError, match=r"engine\.expanded_weights .* batch_invariant is on"):
        expansion.expansion_budget(CUDA, EngineConfig(expanded_weights=1, batch_invariant=True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (103, 100))
    with pytest.raises(EngineConfigError, match=r"is 101 bytes; .* 100 are free"):
        expansion.expansion_budget(CUDA, EngineConfig(expanded_weights=101))


@pytest.mark.gpu
@pytest.mark.parametrize(("large", "used_from"), [(expanded.LARGE, MANY), pytest.param(1, 257, marks=HOPPER)])
def test_steps_with_copies_give_what_steps_by_codes_give(
    large: int, used_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts of 300 tokens, and decode steps of 150 sequences: log-probabilities are those without copies.

    Of large weights the graph of 160 sequences is by the codes.
    """
    monkeypatch.setattr(expanded, "LARGE", large)
    caplog.set_level("INFO")
    scores, seconds, tokens = [], [], []
    for wanted in ("off", 1 << 30):
        config = EngineConfig(
            device="cuda", max_num_seqs=192, max_num_batched_tokens=512, max_model_len=512, kv_cache_bytes=1 << 28,
            expanded_weights=wanted,
        )  # fmt: skip
        runner = build_runner(small_model(tmp_path, CUDA, torch.bfloat16), config)
        assert (runner.expanded_weight_bytes > 0) == (wanted != "off")
        engine = Engine(runner, config)
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
        for index in range(150):
            prompt = [(index * 37 + place * 11) % 490 + 3 for place in range(300 if index == 0 else 5)]
            engine.add(GenerateRequest(str(index), prompt, sampling))
        found: dict[str, list[tuple[int, float]]] = {str(index): [] for index in range(150)}
        while engine.has_work:
            for output in engine.step().outputs:
                assert output.error is None
                for entry in output.logprobs or ():
                    found[output.request_id].append((entry.token_id, entry.logprob))
        ordered = list(found.values())
        tokens.append(torch.tensor([one[0][0] for one in ordered]))
        scores.append(torch.tensor([one[0][1] for one in ordered]))
        seconds.append(torch.tensor([one[1][1] for one in ordered]))
    assert f"steps of {used_from} tokens and more use them" in caplog.text
    assert (scores[0] - scores[1]).square().mean().sqrt() < 0.02
    # The second tokens' steps are those of graphs. They are the same steps where the first tokens are.
    same = tokens[0] == tokens[1]
    assert same.float().mean() > 0.8
    assert (seconds[0] - seconds[1])[same].square().mean().sqrt() < 0.02
