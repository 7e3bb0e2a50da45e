"""Models with layers that keep states, divided among ranks: the tokens and log-probabilities of transformers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nf4_kernels import cpu
from server.checkpoint.base import CheckpointError
from server.checkpoint.dummy import dummy_shard
from server.checkpoint.sharding.shards import Shard
from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.parallel.start import load_ranks
from server.engine.runtime import exchange
from server.types import GenerateRequest, RequestOutput
from tests.adapters import save_adapter, with_adapter
from tests.checkpoint.layouts import CPU, config_of, reference_model, save_nf4
from tests.checkpoint.test_hybrids import MODELS, SKIPPED, made
from tests.engine.factories import fix_costs, make_request, run_together
from tests.engine.scored import check_outputs, check_scored
from tests.engine.speculation.engines import CHEAP
from tests.marks import with_rest
from tests.moe_checkpoints import is_projection, save_moe
from tests.nf4_kernels.weights import FIXED_POINT
from tests.parallel.rank import EAGER, answers, answers_of_ranks, check_same, prompts_of
from tests.parallel.test_workers import failed, silent

# Two of four ranks have the same KV head.
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 32
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
# Its class takes two thirds of this for its MLP.
CONVOLUTION = {"block_auto_adjust_ff_dim": True, "intermediate_size": 760}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_5": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "lfm2": CONVOLUTION,
    "lfm2_moe": EXPERTS,
}
# A KV cache of few tokens takes the least bytes that may be configured.
WIDE: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 8}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [8, 4, 4]}
TOLERANCE = 2e-2 if cpu.isa() in FIXED_POINT else 1e-3
"""Of log-probabilities, of logits with a deviation of 2.4: kernels in fixed point round (docs/adr/0027)."""


def of_type(model_type: str, **sizes: Any) -> PreTrainedModel:
    return made(model_type, **{**SIZES, **OTHERS[model_type], **sizes})


def in_nf4(name: str) -> bool:
    return is_projection(name) and "conv." not in name and "conv1d" not in name


def save(model_type: str, folder: Path, **sizes: Any) -> PreTrainedModel:
    """Save a checkpoint in NF4; transformers' own model of the same numbers in float32."""
    if "num_experts" in MODELS[model_type]:
        folder.mkdir()
        return save_moe(folder, of_type(model_type, **sizes).float(), in_nf4)
    skipped = {"llm_int8_skip_modules": SKIPPED} if model_type == "qwen3_5" else {}
    save_nf4(of_type(model_type, **sizes), folder, **skipped)
    return reference_model(folder, folder.with_name(f"{folder.name}-expanded"))


@pytest.mark.parametrize(
    ("count", "types"),
    [
        pytest.param(2, ("qwen3_5", "lfm2"), id="two", marks=pytest.mark.rest),
        pytest.param(2, ("qwen3_5_text", "qwen3_next"), id="two, a and b in NF4", marks=pytest.mark.rest),
        pytest.param(2, ("qwen3_5_moe_text", "lfm2_moe"), id="two, mixtures", marks=pytest.mark.rest),
        pytest.param(4, ("qwen3_5", "qwen3_next", "lfm2"), id="four", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ranks_answer_as_transformers_does(count: int, types: tuple[str, ...], tmp_path: Path) -> None:
    references = {model_type: save(model_type, tmp_path / model_type) for model_type in types}
    ranks = answers_of_ranks([tmp_path / each for each in types], count, tmp_path / "store")
    for model_type, reference in references.items():
        prompts = prompts_of(reference.config.get_text_config().vocab_size)
        for found in (rank[str(tmp_path / model_type)] for rank in ranks):
            assert found["written"], model_type
            for prompt in prompts[:3]:  # the others are sampled
                name = str(len(prompt))
                check_scored(reference, prompt, found["tokens"][name], found["logprobs"][name], TOLERANCE)
            assert found["tokens"] == ranks[0][str(tmp_path / model_type)]["tokens"]


@pytest.mark.rest
def test_16_bit_is_quantized_as_one_rank_does(tmp_path: Path) -> None:
    """But for the projections with one output for each head."""
    of_type("qwen3_5_text").save_pretrained(tmp_path / "model")
    expected = answers(tmp_path / "model", None, EAGER)
    (found, _) = answers_of_ranks([tmp_path / "model"], 2, tmp_path / "store")
    check_same(found[str(tmp_path / "model")], expected, "16 bit")


@pytest.fixture(scope="module", params=with_rest(["qwen3_5", "lfm2"], ["qwen3_5"]))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A checkpoint, and transformers' own model of it."""
    folder = tmp_path_factory.mktemp("model") / request.param
    axes = {"rope_parameters": AXES | {"mrope_interleaved": True}} if request.param == "qwen3_5" else {}
    return folder, save(request.param, folder, **WIDE, **axes)


@contextmanager
def engine_of(folder: Path, **changes: Any) -> Iterator[Engine]:
    """An engine of two ranks, the other one a process of its own."""
    config = EngineConfig(
        device="cpu", tensor_parallel_size=2, threads=2, block_size=4, max_model_len=160, max_num_seqs=6,
        max_num_batched_tokens=32, state_snapshot_tokens=16, state_snapshot_bytes=2**20,
        **{"kv_cache_bytes": 2**22, **changes},
    )  # fmt: skip
    runner, workers = load_ranks(folder, config, silent, failed, [])
    assert workers is not None
    try:
        yield Engine(runner, config, None, workers.device_memory)
    finally:
        workers.end()
        exchange.leave()


def test_prefixes_preemption_and_cancellation(saved: tuple[Path, PreTrainedModel]) -> None:
    """Of which slots and snapshots the first rank says, and every rank follows."""
    folder, reference = saved
    text = reference.config.get_text_config()
    # Keys and values of half the heads.
    token = text.layer_types.count("full_attention") * text.num_key_value_heads * text.head_dim * 4
    rng = random.Random(0)
    common = [rng.randrange(3, 120) for _ in range(50)]
    lengths = (0, 11, 32, 50, 50, 0, 40, 33, 50, 16)
    prompts = [common[:n] + [rng.randrange(3, 120) for _ in range(rng.choice((1, 9, 30)))] for n in lengths]
    with engine_of(folder, kv_cache_bytes=256 * token) as engine:
        pool = engine._runner.states
        assert pool is not None
        assert len(pool.snapshots) >= 2
        run_together(engine, make_request(common, max_tokens=2, ignore_eos=True))
        requests = [
            make_request(prompt, max_tokens=30, ignore_eos=True, logprobs=0, request_id=str(index))
            for index, prompt in enumerate(prompts)
        ]
        outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        for request in requests:
            engine.add(request)
        steps, cancelled = 0, set()
        while engine.has_work:
            for output in engine.step().outputs:
                outputs[output.request_id].append(output)
            steps += 1
            if steps in (9, 21):
                running = [name for name, own in outputs.items() if own and own[-1].finish_reason is None]
                cancelled.add(name := next(name for name in running if name not in cancelled))
                engine.abort([name])
        assert engine.stats().preemptions > 0
        assert engine.stats().state_snapshot_hits > 2
    assert len(cancelled) == 2
    for name, own in outputs.items():
        check_outputs(reference, prompts[int(name)], own, TOLERANCE)
        assert name in cancelled or sum(len(output.new_token_ids) for output in own) == 30


@pytest.mark.rest
def test_adapters_on_several_ranks(saved: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """Each rank has its part of the adapters of every projection."""
    folder, reference = saved
    save_adapter(reference, tmp_path / "a", 0, 0.1, r=4, target_modules="all-linear")
    module = LoraModule(name="a", path=tmp_path / "a")
    prompts = prompts_of(120)
    with engine_of(folder, lora_modules=(module,)) as engine:
        asked = [
            GenerateRequest(f"{name} {len(prompt)}", prompt, made_request.sampling, name)
            for prompt in prompts
            for name in (None, "a")
            for made_request in [make_request(prompt, max_tokens=6, ignore_eos=True, logprobs=0)]
        ]
        outputs = run_together(engine, *asked)
    for name in (None, "a"):
        oracle = reference if name is None else with_adapter(copy.deepcopy(reference), tmp_path / "a")
        for prompt in prompts:
            check_outputs(oracle, prompt, outputs[f"{name} {len(prompt)}"], TOLERANCE)


@pytest.mark.rest
def test_speculation_on_several_ranks(saved: tuple[Path, PreTrainedModel]) -> None:
    """Every rank keeps the states from before draft tokens, and goes back to them."""
    folder, reference = saved
    prompts = [[5, 6, 7, 8] * count for count in (3, 9, 14)]
    with engine_of(folder, speculation="lookup") as engine:
        fix_costs(engine, CHEAP)
        requests = [make_request(prompt, max_tokens=30, ignore_eos=True, logprobs=0) for prompt in prompts]
        outputs = run_together(engine, *requests)
        stats = engine.stats()
    assert stats.draft_tokens > sum(stats.accepted_by_place)
    for request in requests:
        check_outputs(reference, request.prompt_token_ids, outputs[request.request_id], TOLERANCE)


def test_states_are_divided(tmp_path: Path) -> None:
    """A rank keeps those of its heads alone. Random weights have the real ones' forms."""
    config = config_of("qwen3_5_text", **MODELS["qwen3_5_text"] | SIZES | DELTA)
    config.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["linear_num_value_heads"] == 8
    layer = dummy_shard(tmp_path, CPU, torch.float32, silent, Shard(1, 4)).model.model.layers[0].linear_attn
    assert (layer.num_k_heads, layer.num_v_heads) == (1, 2)
    assert layer.conv1d.weight.shape == (2 * 16 + 2 * 32, 1, 4)
    assert layer.A_log.shape == layer.dt_bias.shape == (2,)
    assert layer.in_proj_qkv.out_features == 2 * 16 + 2 * 32
    assert type(layer.in_proj_b) is torch.nn.Linear
    assert (layer.in_proj_b.out_features, layer.out_proj.in_features) == (2, 64)


def test_heads_that_do_not_divide_are_named(tmp_path: Path) -> None:
    sizes = SIZES | DELTA | {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    made("qwen3_5_text", **sizes).save_pretrained(tmp_path)
    config = EngineConfig(device="cpu", tensor_parallel_size=2)
    what = r"linear attention 3 key heads and 6 value heads of 32 features; possible: 1$"
    with pytest.raises(CheckpointError, match=what):
        load_ranks(tmp_path, config, silent, failed, [])
