"""The output layer and a skip list's projections in NF4 while loading: the same as a checkpoint that has them in NF4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.base import CheckpointError
from server.checkpoint.classes import loading_of
from server.checkpoint.dummy import dummy_model
from server.checkpoint.host_embedding import HostEmbedding
from server.checkpoint.inspection import inspect_checkpoint
from server.checkpoint.late import Economies
from server.checkpoint.loading import load_model, whole_bytes
from server.config import EngineConfig
from server.engine.parallel.auto import check_config
from server.engine.runtime.limits import EngineConfigError
from server.engine.runtime.preparation.assembly import build_runner
from tests.checkpoint.layouts import (
    CPU,
    answers,
    change_tensors,
    check_answers,
    config_of,
    random_model,
    reference_model,
    save_nf4,
    served,
    silent,
)
from tests.checkpoint.test_layouts import LLAMA, llama
from tests.engine.interpreted import run_interpreted

ALL = Economies(output_layer=True, skipped=True, host_embedding=True)


def loaded(folder: Path, economies: Economies) -> PreTrainedModel:
    return load_model(folder, CPU, torch.float32, silent, economies=economies)


def in_nf4(model: PreTrainedModel) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Linear4bit)}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with a skip list, and the same one without."""
    skipped = save_nf4(llama(), tmp_path / "skipped", llm_int8_skip_modules=["lm_head", "down_proj", "v_proj"])
    return skipped, save_nf4(llama(), tmp_path / "whole", llm_int8_skip_modules=["nothing"])


def test_what_is_asked_for_becomes_nf4_and_nothing_else(folders: tuple[Path, Path]) -> None:
    kept = {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj"}
    assert in_nf4(loaded(folders[0], Economies())) == kept
    assert in_nf4(loaded(folders[0], Economies(output_layer=True))) == {*kept, "lm_head"}
    # v_proj has 32 outputs, which kernels do not compute in NF4.
    assert in_nf4(loaded(folders[0], Economies(skipped=True))) == {*kept, "down_proj"}


def test_codes_and_answers_are_those_of_a_checkpoint_in_nf4(folders: tuple[Path, Path], tmp_path: Path) -> None:
    skipped, whole = folders
    stored = load_file(whole / "model.safetensors")
    model = loaded(skipped, ALL)
    for name in ("lm_head", "model.layers.1.mlp.down_proj"):
        layer = model.get_submodule(name)
        assert torch.equal(layer.weight.data.flatten(), stored[f"{name}.weight"].flatten())
        assert torch.equal(layer.weight.quant_state.absmax, stored[f"{name}.weight.absmax"])
    expected = reference_model(whole, tmp_path / "reference")
    mixed = reference_model(skipped, tmp_path / "mixed")
    for layer, other in zip(expected.model.layers, mixed.model.layers, strict=True):
        layer.self_attn.v_proj = other.self_attn.v_proj
    check_answers(expected, served(skipped, economies=ALL))


def test_an_output_layer_with_a_bias_and_a_16_bit_checkpoint(tmp_path: Path) -> None:
    model = random_model(config_of("phi", **LLAMA | {"num_key_value_heads": 4}))
    nn.init.normal_(model.lm_head.bias)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    found = loaded(tmp_path, ALL).lm_head
    assert isinstance(found, Linear4bit)
    assert torch.equal(found.bias, model.lm_head.bias.float())


def test_the_bytes_that_are_counted(folders: tuple[Path, Path]) -> None:
    info = inspect_checkpoint(folders[0])
    chosen = loading_of(info)
    plain, small = (whole_bytes(info, CPU, torch.bfloat16, chosen, False, kind) for kind in (Economies(), ALL))
    quantized, embedding = 128 * 64 + 2 * (64 * 96 + 64 * 32), 128 * 64 * 2
    assert plain - small == pytest.approx(quantized * (2 - 0.516) + embedding, rel=0.01)


def test_an_embedding_in_host_memory_answers_the_same(folders: tuple[Path, Path]) -> None:
    on_host = Economies(host_embedding=True)
    model = loaded(folders[1], on_host)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, HostEmbedding)
    assert torch.equal(embedding.weight, loaded(folders[1], Economies()).get_input_embeddings().weight)
    assert not any(parameter is embedding.weight for parameter in model.parameters())
    assert served(folders[1], economies=on_host) == served(folders[1])


def test_an_embedding_with_values_that_are_not_finite_is_refused(folders: tuple[Path, Path]) -> None:
    change_tensors(folders[1], lambda tensors: tensors["model.embed_tokens.weight"][5].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has values that are not finite"):
        loaded(folders[1], Economies(host_embedding=True))


def test_a_launch_reads_rows_of_the_host() -> None:
    pytest.importorskip("triton")
    run_interpreted(
        "import torch\n"
        "from server.engine.runtime.model.host_rows import rows_of\n"
        "table = torch.randn(50, 1500)\n"
        "ids = torch.tensor([[0, 49], [7, 7]])\n"
        "assert torch.equal(rows_of(table, ids), table[ids])\n"
        "assert torch.equal(rows_of(table, torch.tensor([-1, 90])), table[torch.tensor([0, 49])])\n"
        "assert rows_of(table, ids[:0]).shape == (0, 2, 1500)\n"
    )


@pytest.mark.gpu
def test_a_gpu_reads_an_embedding_in_host_memory(tmp_path: Path) -> None:
    """In eager steps and in graphs, with async scheduling."""
    config_of("llama", **LLAMA | {"hidden_size": 256, "num_attention_heads": 4}).save_pretrained(tmp_path)
    engine = EngineConfig(device="cuda", kv_cache_bytes=2**24, max_num_batched_tokens=64, max_num_seqs=8)
    found = []
    for economies in (Economies(), Economies(host_embedding=True)):
        model = dummy_model(tmp_path, torch.device("cuda", 0), torch.bfloat16, silent, seed=0, economies=economies)
        found.append(answers(build_runner(model, engine), engine))
    assert found[0] == found[1]


def test_random_weights_do_the_same(tmp_path: Path) -> None:
    config = config_of("llama", **LLAMA)
    config.quantization_config = {"llm_int8_skip_modules": ["lm_head", "down_proj"]}
    config.save_pretrained(tmp_path)
    model = dummy_model(tmp_path, CPU, torch.float32, silent, seed=0, economies=ALL)
    assert {"lm_head", "down_proj"} <= in_nf4(model)
    assert isinstance(model.get_input_embeddings(), HostEmbedding)
    assert not {"lm_head", "down_proj"} & in_nf4(dummy_model(tmp_path, CPU, torch.float32, silent, seed=0))


def test_an_output_layer_that_is_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = save_nf4(llama(tie_word_embeddings=True), tmp_path / "tied")
    with pytest.raises(CheckpointError, match=r"engine\.quantize_output_layer is nf4, but the output layer is the em"):
        loaded(folder, Economies(output_layer=True))
    with pytest.raises(
        CheckpointError, match=r"engine\.embedding_device is cpu, but the embedding is the output layer"
    ):
        loaded(folder, Economies(host_embedding=True))


@pytest.mark.parametrize(
    "settings", [{"quantize_output_layer": "nf4"}, {"quantize_skipped": True}, {"embedding_device": "cpu"}]
)
def test_several_gpus_are_refused_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(EngineConfigError, match=f"engine.{next(iter(settings))}.* engine.tensor_parallel_size 2"):
        check_config(EngineConfig(**settings), 2)
