"""Tensors of experts in checkpoints: their names, how they are joined, their bytes, and what is refused by name."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import load_file
from transformers import PreTrainedModel

from nf4_kernels.reference import dequantize
from server.checkpoint.base import CheckpointError
from server.checkpoint.experts.module import NF4Experts
from server.checkpoint.experts.names import Place, described, place_of, router_of
from server.checkpoint.inspection import inspect_checkpoint
from server.checkpoint.loading import load_model
from tests.checkpoint.layouts import Tensors, change_tensors, refusal, replaced, state_with, without
from tests.marks import with_rest
from tests.moe_checkpoints import FAMILIES, is_projection, nowhere, save_moe, tiny_moe, unsloth_gpt_oss

PAGE = Path(__file__).parents[2] / "docs" / "models-experts.md"
CPU = torch.device("cpu")
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
STATE = f"{EXPERT}.quant_state.bitsandbytes__nf4"


def load(folder: Path) -> PreTrainedModel:
    return load_model(folder, CPU, torch.float32, lambda *_: None)


def experts_of(model: PreTrainedModel) -> list[NF4Experts]:
    return [module for module in model.modules() if isinstance(module, NF4Experts)]


def test_the_page_names_the_families_that_are_tested() -> None:
    rows = re.findall(r"^\| `(\w+)` \| works \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(FAMILIES)


def test_names_of_experts_are_known_in_every_form() -> None:
    layer = "model.layers.7.mlp"
    assert place_of(f"{layer}.experts.12.gate_proj.weight") == Place(7, "gate", 12, False)
    assert place_of("model.layers.7.block_sparse_moe.experts.0.w2.weight") == Place(7, "down", 0, False)
    assert place_of(f"{layer}.experts.gate_up_projs.3.bias") == Place(7, "gate_up", 3, True)
    assert place_of(f"{layer}.experts.down_proj") == Place(7, "down", None, False)
    assert place_of(f"{layer}.experts.gate_up_proj_bias") == Place(7, "gate_up", None, True)
    assert place_of("model.layers.7.block_sparse_moe.input_linear.weight") == Place(7, "gate_up", None, False)
    assert place_of("language_model.model.layers.0.feed_forward.experts.5.up_proj.weight") == Place(0, "up", 5, False)
    for other in ("shared_expert.up_proj", "shared_experts.down_proj", "up_proj"):
        assert place_of(f"{layer}.{other}.weight") is None
    assert place_of(f"{layer}.experts.12.gate_proj.weight.absmax") is None
    assert described(f"{layer}.experts.12.gate_proj.weight.nested_absmax") == f"{layer}.experts.12.gate_proj.weight"
    assert router_of(f"{layer}.gate.weight") == (7, "weight")
    assert router_of(f"{layer}.router.linear.bias") == (7, "bias")
    assert router_of(f"{layer}.shared_expert_gate.weight") is None
    assert router_of(f"{layer}.gate.e_score_correction_bias") is None


def test_nested_scales_stay_nested_where_groups_are_whole(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    save_moe(tmp_path, tiny_moe("qwen3_moe", **sizes))
    saved = load_file(tmp_path / "model.safetensors")
    experts = experts_of(load(tmp_path))[1]
    for stacked, parts in ((experts.gate_up, ("gate_proj", "up_proj")), (experts.down, ("down_proj",))):
        names = [f"model.layers.1.mlp.experts.{e}.{part}.weight" for e in range(8) for part in parts]
        assert stacked.absmax_8bit is not None
        assert torch.equal(stacked.absmax_8bit, torch.cat([saved[f"{name}.absmax"] for name in names]))
        assert torch.equal(stacked.packed, torch.cat([saved[name].view(-1) for name in names]))
        assert stacked.absmax_offset is not None
        assert stacked.absmax_offset.unique().numel() == len(names)  # each was quantized for itself
        assert stacked.nbytes < 0.53 * dequantize(stacked.weight, torch.uint8).numel()


def test_rows_of_gates_and_ups_that_take_turns_are_put_in_order_exactly(tmp_path: Path) -> None:
    model = tiny_moe("gpt_oss")
    reference = save_moe(tmp_path, model, rename=unsloth_gpt_oss)
    experts = experts_of(load(tmp_path))[0]
    theirs = reference.model.layers[0].mlp.experts
    found = dequantize(experts.gate_up.weight, torch.float32)
    expected = theirs.gate_up_proj.transpose(1, 2)
    assert torch.equal(found, torch.cat((expected[:, ::2], expected[:, 1::2]), 1))
    bias = theirs.gate_up_proj_bias
    assert torch.equal(experts.gate_up.bias, torch.cat((bias[:, ::2], bias[:, 1::2]), 1))
    assert torch.equal(experts.down.bias, theirs.down_proj_bias)


@pytest.mark.parametrize(
    ("family", "dtype"),
    with_rest(
        itertools.product(FAMILIES, (torch.bfloat16, torch.float16)),
        lambda case: (case[1] is torch.float16) == (case[0] == "mixtral"),
    ),
)
def test_16_bit_models_have_experts_of_the_same_kind(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_moe(tmp_path, tiny_moe(family), nowhere)
    experts = experts_of(load_model(tmp_path, CPU, dtype, lambda *_: None))
    activations = {"gpt_oss": "swiglu_oai", "gemma4_text": "gelu_tanh"}
    assert {module.activation for module in experts} == {activations.get(family, "silu")}
    for module in experts:
        assert {bias.dtype for bias in (module.gate_up.bias, module.down.bias) if bias is not None} <= {dtype}
        x, chosen = torch.randn(3, 64).to(dtype), torch.tensor([[0, 1], [7, 3], [2, 2]])
        assert module(x, chosen, torch.rand(3, 2)).dtype is dtype


def test_a_few_16_bit_experts_among_those_in_nf4_are_quantized_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_moe(tmp_path, tiny_moe("qwen3_moe"), in_nf4=lambda name: name != EXPERT and is_projection(name))
    experts = experts_of(load(tmp_path))[1]
    assert "1 experts' weights that the checkpoint has in 16 bit beside NF4 were quantized" in caplog.text
    stored = load_file(tmp_path / "model.safetensors")[EXPERT]
    found = dequantize(experts.gate_up.weight, torch.float32)[3, 64:]
    assert 0 < (found - stored).abs().max() < 0.16 * stored.abs().max()


def test_the_memory_check_counts_experts_as_they_are_held(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 32}
    for kind, in_nf4 in (("16 bit", nowhere), ("nf4", is_projection)):
        folder = tmp_path / kind
        folder.mkdir()
        save_moe(folder, tiny_moe("qwen3_moe", **sizes), in_nf4)
        model = load(folder)
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        counted = inspect_checkpoint(folder).loaded_bytes(4)
        assert 0.95 * held < counted < 1.1 * held, kind
    # Experts that stay in 16 bit beside NF4 are counted so.
    save_moe(tmp_path, tiny_moe("qwen3_moe", **sizes), lambda name: "self_attn" in name and is_projection(name))
    assert inspect_checkpoint(tmp_path).loaded_bytes(2) > 2 * 2 * 32 * 3 * 128 * 128


def _requantized(**options: object) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        packed, state = quantize_4bit(torch.randn(64, 64), quant_type="nf4", **options)  # type: ignore[arg-type]
        for name in [name for name in tensors if name.startswith(EXPERT)]:
            del tensors[name]
        tensors[EXPERT] = packed
        tensors.update({f"{EXPERT}.{key}": value for key, value in state.as_dict(packed=True).items()})

    return change


def _in_fp4(tensors: Tensors) -> None:
    tensors[STATE.replace("nf4", "fp4")] = tensors.pop(STATE)


def _renumbered(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(EXPERT)]:
        tensors[name.replace(".experts.3.", ".experts.8.")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("damage", "message"),
    with_rest([
        (without(EXPERT), r"missing keys: model\.layers\.1\.mlp\.experts\.3\.up"),
        (without(f"{EXPERT}.absmax"), f"{EXPERT} is packed to 4 bits and has no absmax"),
        (without(f"{EXPERT}.quant_map"), f"{EXPERT} is packed to 4 bits and has no quant_map"),
        (without(f"{EXPERT}.nested_absmax"), EXPERT),
        (without(EXPERT), "missing keys: .*experts.3.up"),
        (state_with(EXPERT, shape=[64, 128]), f"{EXPERT} .* takes 4096 of codes; there are 2048"),
        (state_with(EXPERT, shape=[32, 64]), f"{EXPERT} .* takes 1024 of codes; there are 2048"),
        (state_with(EXPERT, shape=[128, 32]), rf"{EXPERT} is nf4 of \[128, 32\], it must be nf4 of \[64, 64\]"),
        (state_with(EXPERT, shape=None), EXPERT),
        (state_with(EXPERT, shape=[64, "x"]), EXPERT),
        (state_with(EXPERT, blocksize=0), EXPERT),
        (state_with(EXPERT, quant_type="fp4"), f"{EXPERT} says that it is in fp4, and its quant_map is that of nf4"),
        (state_with(EXPERT, nested_blocksize=64), f"{EXPERT} has scales in blocks of 64; bitsandbytes has 256"),
        (state_with(EXPERT, nested_offset="much"), EXPERT),
        (replaced(STATE, lambda t: t[:10]), EXPERT),
        (replaced(STATE, lambda t: t[:0]), EXPERT),
        (replaced(EXPERT, lambda t: t[:100]), f"{EXPERT} .* takes 2048 of codes; there are 100"),
        (replaced(EXPERT, lambda t: torch.cat((t, t))), f"{EXPERT} .* takes 2048 of codes; there are 4096"),
        (replaced(f"{EXPERT}.absmax", lambda t: t[:3]), f"{EXPERT} .* takes 64 of absmax; there are 3"),
        (replaced(f"{EXPERT}.absmax", lambda t: t.float()), EXPERT),
        (replaced(f"{EXPERT}.nested_absmax", lambda t: t * float("nan")), rf"the scales .* of {EXPERT} are not finite"),
        (replaced(f"{EXPERT}.nested_absmax", lambda t: t[:0]), EXPERT),
        (replaced(f"{EXPERT}.nested_quant_map", lambda t: t[:7]), EXPERT),
        (replaced(f"{EXPERT}.quant_map", lambda t: t.flip(0)), f"{EXPERT} says that it is in nf4, and its quant_map is not"),
        (_requantized(blocksize=128), r"up_proj|gate_up of expert 3 has 4096 weights in scale blocks of 128"),
        (_requantized(blocksize=32, compress_statistics=True), "gate_up of expert 3 .* scale blocks of 32"),
        (_in_fp4, rf"{EXPERT}: experts and routers in FP4 are not served"),
        (_renumbered, r"tensors of expert 8, config\.json says 8 experts"),
    ], lambda case: case[1] != EXPERT),  # make test: those of which a message says more than a name
)  # fmt: skip
def test_a_damaged_expert_is_refused_by_name(damage: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    check_refusal(tmp_path, damage, message)


def check_refusal(folder: Path, damage: Callable[[Tensors], object], message: str, **saved: Any) -> None:
    save_moe(folder, tiny_moe("qwen3_moe"), **saved)
    change_tensors(folder, damage)
    assert re.search(message, refusal(lambda: load(folder), folder))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (replaced(EXPERT, lambda t: t[:32]), rf"{EXPERT} is torch.float32 \[32, 64\], it must be floats \[64, 64\]"),
        (replaced(EXPERT, lambda t: t / 0), f"{EXPERT} has weights that are not finite numbers"),
        (replaced(EXPERT, lambda t: t.to(torch.int8)), f"{EXPERT} is torch.int8"),
        (without(EXPERT), "missing keys: .*experts.3.up_proj.weight"),
    ],
)
def test_a_damaged_16_bit_expert_is_refused_by_name(
    damage: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    check_refusal(tmp_path, damage, message, in_nf4=nowhere)


def test_too_many_scales_are_no_other_experts(tmp_path: Path) -> None:
    """Plain scales, which are joined: those that one expert has too many would be the next one's."""
    damage = replaced(f"{EXPERT}.absmax", lambda t: torch.cat((t, t)))
    check_refusal(tmp_path, damage, f"{EXPERT} .* takes 64 of absmax; there are 128", nested=False)


@pytest.mark.parametrize("seed", range(16))
def test_any_damaged_bytes_are_refused_or_are_weights(seed: int, tmp_path: Path) -> None:
    """Bytes of the file replaced at random: an error in one line, never another exception."""
    save_moe(tmp_path, tiny_moe("qwen3_moe", num_hidden_layers=1, num_experts=4))
    file, rng = tmp_path / "model.safetensors", random.Random(seed)
    data = bytearray(file.read_bytes())
    header = int.from_bytes(data[:8], "little")
    if seed % 4 == 0:
        data = data[: rng.randrange(len(data))]
    elif seed % 4 == 1:
        data[rng.randrange(8 + header)] = rng.randrange(256)
    else:
        for _ in range(200):
            data[rng.randrange(8 + header, len(data))] = rng.randrange(256)
    file.write_bytes(data)
    said = ""
    try:
        load(tmp_path)
    except CheckpointError as e:
        said = str(e)
    assert "\n" not in said


def test_nf4_along_the_inputs_is_refused_by_name(tmp_path: Path) -> None:
    """gpt-oss' own stacked tensors are transposed; bitsandbytes' blocks then run across outputs."""
    save_moe(tmp_path, tiny_moe("gpt_oss"))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj: NF4 of GptOssExperts stacked in one tensor"):
        load(tmp_path)
