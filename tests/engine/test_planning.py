"""The memory plan of a start: its arithmetic for published shapes, and what errors of a lack of memory say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench.fits import MODELS
from server.checkpoint.base import CheckpointError
from server.checkpoint.parts import SKIPPED, TOWER, described_by
from server.config import EngineConfig
from server.engine import planning
from server.engine.planning import StartMemory, plan_start
from server.engine.runtime.attention.kernels.kv_cache import bytes_per_token
from server.engine.runtime.limits import EngineConfigError, MemoryTooSmallError
from server.engine.runtime.memory import RESERVED_SHARE
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.preparation.cache import CacheSpec
from server.engine.runtime.preparation.estimates import adapter_bytes, state_bytes, step_bytes, token_bytes
from server.engine.runtime.preparation.plan import Memory, MemoryPlan, decide, plan_memory, savings
from tests.checkpoint.families import COMMON as OF_FAMILIES
from tests.checkpoint.families import SERVED
from tests.engine.models import COMMON, HYBRIDS, tiny_model

GIB = 2**30
CUDA = torch.device("cuda", 0)
QWEN38_27B: dict[str, Any] = {
    "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False, "max_position_embeddings": 262144,
    "quantization_config": {
        "quant_method": "bitsandbytes", "load_in_4bit": True,
        "llm_int8_skip_modules": ["lm_head", "in_proj_a", "in_proj_b", "in_proj_qkv"],
    },
}  # fmt: skip


def planner(model: str, gib: float, tower: bool = False) -> Callable[[EngineConfig], MemoryPlan]:
    """Plans of a model on a GPU of that size. tower: whether the image tower of Qwen3.5-27B is loaded."""
    if model == "qwen3.8-27b":
        config = CONFIG_MAPPING["qwen3_5_text"](**QWEN38_27B)
    else:
        config = AutoConfig.from_pretrained(MODELS / model, local_files_only=True)
    info, total = described_by(Path(model), config), int(gib * GIB)
    if tower:
        with torch.device("meta"):
            visual = AutoModel.from_config(
                CONFIG_MAPPING["qwen3_5"](vision_config={"out_hidden_size": 5120}).vision_config
            )
        shapes = {f"model.visual.{name}": ("BF16", tuple(own.shape)) for name, own in visual.named_parameters()}
        info = replace(info, tensors=info.tensors | shapes)
    memory = Memory(total, total, int(total * RESERVED_SHARE))
    return lambda engine: plan_memory(info, config, engine, memory)


def test_experts_of_random_weights_are_in_nf4() -> None:
    """As they are made, though the configuration of a quantized checkpoint says nothing of them."""
    plan = planner("qwen3.6-35b-a3b", 24)(EngineConfig())
    experts = 40 * 256 * 3 * 2048 * 512
    assert experts / 2 < plan.parts["weights in NF4"] < 0.55 * experts + GIB
    assert plan.parts["norms and others"] < 0.1 * GIB


def test_layers_with_sizes_of_their_own() -> None:
    """Gemma 4: 25 layers of 8 key heads of 256 elements, 5 of 2 of 512."""
    text = AutoConfig.from_pretrained(MODELS / "gemma-4-26b-a4b", local_files_only=True)
    assert token_bytes(text, EngineConfig()) == 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)
    assert planner("gemma-4-26b-a4b", 24)(EngineConfig(allow_runtime_lora=True)).fits


@pytest.mark.parametrize("family", sorted(SERVED))
def test_bytes_of_a_token_are_those_that_the_cache_has(family: str) -> None:
    # Two layers, none of which shares another one's keys and values.
    shared = {"num_kv_shared_layers": 0} if family.startswith("gemma") else {}
    model = tiny_model(family, **{**OF_FAMILIES, **SERVED[family], **shared}).to(torch.bfloat16)
    config = EngineConfig(device="cpu", kv_cache_bytes=2**22, allow_runtime_lora=True)
    shapes = CacheSpec.of(model, config).shapes
    text = model.config.get_text_config()
    if "num_key_value_heads" not in type(text)().to_dict() and "per_layer_config" not in text.to_dict():
        del text.num_key_value_heads  # the class does not read it
    assert token_bytes(text, config) == sum(bytes_per_token(shape, torch.bfloat16) for shape in shapes)
    assert step_bytes(text, 64, 8) > 0
    assert adapter_bytes(text, config) > 0


def test_states_are_those_that_layers_keep() -> None:
    for family, settings in HYBRIDS.items():
        model = tiny_model(family)
        pool = build_runner(model.to(torch.bfloat16), EngineConfig(device="cpu", kv_cache_bytes=2**20)).states
        assert pool is not None
        assert sum(kind.nbytes for kind in pool.kinds) == state_bytes(model.config), settings


def test_snapshots_count_as_states() -> None:
    plan = planner("qwen3.8-27b", 80)
    whole, half, none = (
        plan(EngineConfig(max_num_seqs=4, **settings)).parts["states of layers"]
        for settings in ({}, {"state_snapshot_bytes": GIB}, {"enable_prefix_caching": False})
    )
    assert whole == pytest.approx(1.5 * none)
    assert half == none + GIB // (none // 4) * (none // 4)


@pytest.mark.parametrize(
    ("model", "gib", "tokens", "settings"),
    [
        ("qwen3-32b", 23, 8192, {}),
        ("qwen3-14b", 15, 16384, {}),
        ("gpt-oss-20b", 15, 16384, {}),
        ("qwen3.8-27b", 23, 32768, {"quantize_output_layer": "nf4", "max_num_seqs": 1}),
        ("qwen3.8-27b", 23, 32768, {"quantize_output_layer": "nf4"}),
        ("qwen3.8-27b", 23, 32768, {"quantize_skipped": True}),
        ("qwen3.8-27b", 23, 32768, {"embedding_device": "cpu"}),
    ],
)
def test_what_fits_into_small_gpus(model: str, gib: float, tokens: int, settings: dict[str, Any]) -> None:
    plan = planner(model, gib)(EngineConfig(max_model_len=tokens, **settings))
    assert plan.fits
    assert plan.tokens >= tokens


def test_an_image_tower_takes_its_part_of_a_small_gpu() -> None:
    plan, without = planner("qwen3.8-27b", 23, tower=True), planner("qwen3.8-27b", 23)
    wanted = EngineConfig(max_model_len=32768)
    assert plan(wanted).parts[TOWER] == pytest.approx(0.86 * GIB, rel=0.01)
    assert plan(wanted).needed - without(wanted).needed == plan(wanted).parts[TOWER]
    small = plan(wanted.model_copy(update={"quantize_output_layer": "nf4"}))
    assert not small.fits
    assert small.tokens > 26000
    for changes in ({"quantize_skipped": True}, {"embedding_device": "cpu"}):
        assert plan(wanted.model_copy(update=changes)).fits


@pytest.mark.parametrize(("gib", "chosen"), [(14.4, "nf4"), (14.48, "nf4"), (14.7, "off")])
def test_the_output_layer_becomes_nf4_where_the_cache_would_hardly_hold_a_context(gib: float, chosen: str) -> None:
    """On an H200 with 14.4 GiB free, gpt-oss-20b's cache held 14,912 tokens, and its plan said 16,798."""
    plan = planner("gpt-oss-20b", gib)
    decided = decide(EngineConfig(max_model_len=16384), plan)
    assert decided.quantize_output_layer == chosen
    assert plan(decided).tokens > 16384


def test_scales_of_experts_without_whole_groups_are_plain() -> None:
    """gpt-oss has 126.5 groups of 256 blocks in a projection of an expert."""
    plan = planner("gpt-oss-20b", 80)(EngineConfig())
    experts = 24 * 32 * 3 * 2880 * 2880
    assert plan.parts["weights in NF4"] == pytest.approx((0.5 + 4 / 64) * experts, rel=0.05)


def test_a_hybrids_parts_are_what_its_file_has() -> None:
    plan = planner("qwen3.8-27b", 80)(EngineConfig(max_num_seqs=1, enable_prefix_caching=False))
    gb = {name: size / 1e9 for name, size in plan.parts.items()}
    assert gb["embedding"] == pytest.approx(2.54, abs=0.01)
    assert gb["output layer"] == pytest.approx(2.54, abs=0.01)
    assert gb[SKIPPED] == pytest.approx(5.08, abs=0.05)
    assert gb["weights in NF4"] == pytest.approx(8.83 + 0.87 + 1.56, rel=0.01)
    assert gb["states of layers"] == pytest.approx(2 * 0.154, rel=0.01)
    assert plan.token == 64 * 1024


def test_copies_come_after_a_useful_cache() -> None:
    small, large = planner("qwen3-8b", 10)(EngineConfig()), planner("qwen3-8b", 80)(EngineConfig())
    assert small.parts["16-bit copies, at most"] == 0 < small.tokens
    assert large.parts["16-bit copies, at most"] > 10 * GIB
    assert large.tokens > 32768
    assert planner("qwen3-0.6b", 80)(EngineConfig()).parts["16-bit copies, at most"] < 2**30


def test_a_cache_of_configured_bytes_fits_where_these_are_left() -> None:
    plan = planner("qwen3-14b", 15)
    small = plan(EngineConfig(kv_cache_bytes=2**24))
    assert (small.fits, small.cache, small.tokens) == (True, 2**24, 2**24 // small.token)
    assert decide(EngineConfig(kv_cache_bytes=2**24), plan).quantize_output_layer == "off"
    assert not plan(EngineConfig(kv_cache_bytes=8 * GIB)).fits


def test_the_output_layer_stays_as_it_is_where_that_would_not_be_enough() -> None:
    plan = planner("qwen3-32b", 23)
    enough, more = EngineConfig(max_model_len=15000), EngineConfig(max_model_len=20000)
    assert decide(enough, plan).quantize_output_layer == "nf4"
    assert decide(more, plan).quantize_output_layer == "off"
    assert "engine.quantize_output_layer nf4" in savings(decide(more, plan), plan, devices=1)


def test_options_are_named_with_the_bytes_that_they_free() -> None:
    plan, engine = planner("qwen3-32b", 23), EngineConfig(max_model_len=32768, max_num_seqs=64)
    found = savings(engine, plan, devices=2)
    assert list(found) == sorted(found, key=lambda option: -found[option])
    assert found["engine.tensor_parallel_size 2"] > 8 * GIB
    assert found["engine.kv_cache_dtype int8"] == 32768 * (262144 - 135168)
    assert found["engine.max_num_seqs 8"] == 12 * 56 * 151936
    for option, size in found.items():
        name, value = option.removeprefix("engine.").split()
        if name != "tensor_parallel_size":
            changed = engine.model_copy(update={name: int(value) if value.isdigit() else value})
            assert plan(engine).needed - plan(changed).needed == size


def test_no_option_is_named_that_another_one_excludes() -> None:
    """Several ranks take no output layer that becomes NF4, and batch_invariant neither 8 bits nor several ranks."""
    plan = planner("qwen3.8-27b", 23)
    names = {option.split()[0] for option in savings(EngineConfig(), plan, devices=2)}
    of_one = {"engine.quantize_output_layer", "engine.quantize_skipped", "engine.embedding_device"}
    assert of_one | {"engine.kv_cache_dtype", "engine.tensor_parallel_size"} <= names
    divided = {option.split()[0] for option in savings(EngineConfig(tensor_parallel_size=2), plan, devices=2, ranks=2)}
    assert divided == names - of_one - {"engine.tensor_parallel_size"}
    invariant = {option.split()[0] for option in savings(EngineConfig(batch_invariant=True), plan, devices=2)}
    assert not invariant & {"engine.kv_cache_dtype", "engine.tensor_parallel_size"}


def test_the_output_layer_becomes_nf4_where_the_cache_would_be_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CONFIG_MAPPING["qwen3_5_text"](**QWEN38_27B).save_pretrained(tmp_path)
    cases: list[tuple[int, int | None, str]] = [(80, None, "off"), (23, None, "off"), (23, 32768, "nf4")]
    for gib, tokens, chosen in cases:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, gib=gib: (gib * GIB, gib * GIB))
        memory = plan_start(tmp_path, EngineConfig(load_format="dummy", max_model_len=tokens), CUDA)
        assert memory.config.quantize_output_layer == chosen
        assert memory.plan is not None
        assert memory.plan.fits
    off = plan_start(tmp_path, EngineConfig(load_format="dummy", quantize_output_layer="off"), CUDA)
    assert off.config.quantize_output_layer == "off"
    assert off.savings["engine.quantize_output_layer nf4"] / 1e9 == pytest.approx(2.54 - 0.66, abs=0.01)
    assert off.savings["engine.embedding_device cpu"] / 1e9 == pytest.approx(2.54, abs=0.01)
    assert off.savings["engine.quantize_skipped true"] / 1e9 == pytest.approx(5.03 - 1.30, abs=0.02)


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a model of which a GPU holds the weights and little more."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (40 * 2**20, 48 * 2**20))
    config = CONFIG_MAPPING["llama"](**COMMON | {"hidden_size": 1024, "intermediate_size": 4096})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    return tmp_path


def test_weights_that_do_not_fit_are_refused_with_what_would_help(
    small_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**20, 24 * 2**20))
    memory = plan_start(small_gpu, EngineConfig(load_format="dummy"), CUDA)
    with pytest.raises(CheckpointError, match=r"too large: its weights take .* engine\.max_num_batched_tokens 1024"):
        memory.check(small_gpu, logs=True)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("cuBLAS: CUBLAS_STATUS_ALLOC_FAILED"),
     RuntimeError("Triton Error [CUDA]: out of memory"), MemoryTooSmallError("the cache holds 3 tokens")],
)  # fmt: skip
def test_a_lack_of_memory_names_the_options(error: Exception, small_gpu: Path) -> None:
    memory = plan_start(small_gpu, EngineConfig(load_format="dummy"), CUDA)
    memory.check(small_gpu, logs=True)
    with (
        pytest.raises(EngineConfigError, match=r"engine\.max_num_batched_tokens 1024 \(0\.\d\d GiB\)"),
        memory.explained(),
    ):
        raise error


def test_a_lack_of_memory_within_another_error_is_named_too(small_gpu: Path) -> None:
    memory = plan_start(small_gpu, EngineConfig(load_format="dummy"), CUDA)
    with (
        pytest.raises(EngineConfigError, match=r"cannot be loaded.*engine\.max_num_batched_tokens"),
        memory.explained(),
    ):
        raise CheckpointError("model: cannot be loaded") from RuntimeError("CUDA error: out of memory")


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^something else$"), StartMemory(CUDA, EngineConfig()).explained():
        raise RuntimeError("something else")


def test_an_estimate_refuses_no_model(small_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> MemoryPlan:
        raise AttributeError("no num_attention_heads")

    monkeypatch.setattr(planning, "plan_memory", unknown)
    memory = plan_start(small_gpu, EngineConfig(load_format="dummy"), CUDA)
    assert (memory.plan, memory.kept, memory.savings) == (None, 0, {})


def test_a_cpu_has_no_plan(tmp_path: Path) -> None:
    memory = plan_start(tmp_path, EngineConfig(), torch.device("cpu"))
    memory.check(tmp_path, logs=True)
    assert memory.plan is None


# DeepSeek-V2-Lite's attention, and GLM-4.7-Flash's.
_LITE: dict[str, Any] = {
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_FLASH = {**_LITE, "num_hidden_layers": 47, "num_attention_heads": 20, "qk_nope_head_dim": 192, "v_head_dim": 256}


@pytest.mark.parametrize(
    ("sizes", "settings", "ranks", "token", "matrices"),
    [
        (_LITE, {}, 1, 27 * 576 * 2, 27 * 16 * 256 * 512 * 2),
        (_LITE, {}, 2, 27 * 576 * 2, 27 * 16 * 256 * 512),
        (_LITE, {"kv_cache_dtype": "int8"}, 1, 27 * 576 * 2, 27 * 16 * 256 * 512 * 2),
        (_LITE, {"allow_runtime_lora": True}, 1, 27 * 16 * (192 + 128) * 2, 0),
        (_FLASH, {}, 1, 47 * 576 * 2, 47 * 20 * 448 * 512 * 2),
        (_FLASH, {}, 2, 47 * 576 * 2, 47 * 20 * 448 * 512),
    ],
)
def test_latents_count_as_what_the_cache_keeps(
    sizes: dict[str, Any], settings: dict[str, Any], ranks: int, token: int, matrices: int
) -> None:
    config = CONFIG_MAPPING["youtu"](**{**COMMON, **sizes})
    info = described_by(Path("latent"), config)
    plan = plan_memory(info, config, EngineConfig(**settings), Memory(80 * GIB, 80 * GIB, GIB), ranks=ranks)
    assert (plan.token, plan.parts["latent attention's matrices"]) == (token, matrices)
