"""Files of experts that are cut or lie: a line that names the tensor or the file, and nothing else, whatever it is."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.checkpoint.base import CheckpointError
from server.checkpoint.loading import load_model
from tests.checkpoint.layouts import CPU, silent
from tests.moe_checkpoints import save_moe, tiny_moe, unsloth_gpt_oss

Tensors = dict[str, torch.Tensor]
Entry = dict[str, Any]
STATE = ".quant_state.bitsandbytes__nf4"
COUNT = 200


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole NF4 checkpoint with a tensor for each expert and projection."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt_oss":
        save_moe(folder, tiny_moe("gpt_oss"), rename=unsloth_gpt_oss)
    else:
        save_moe(folder, tiny_moe("qwen3_moe"))
    return folder


def refusal(good: Path, folder: Path, change: Callable[[Path], None]) -> str:
    """What is said of a copy in folder whose weights have been changed."""
    folder.mkdir()
    shutil.copy(good / "config.json", folder)
    shutil.copy(good / "model.safetensors", folder)
    change(folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, CPU, torch.float32, silent)
    message = str(caught.value)
    shutil.rmtree(folder)
    assert "\n" not in message
    assert message.startswith(str(folder))
    return message.removeprefix(str(folder))


def cut(chance: random.Random) -> Callable[[Path], None]:
    """The file ends at any byte."""

    def change(file: Path) -> None:
        data = file.read_bytes()
        file.write_bytes(data[: chance.randrange(len(data))])

    return change


ENTRIES: list[Callable[[Entry, int, random.Random], object]] = [
    lambda entry, size, chance: entry.update(dtype=chance.choice(["F64", "I64", "XX", "", None, 4])),
    lambda entry, size, chance: entry.update(shape=[2 ** chance.randrange(30, 63)] * chance.randrange(1, 4)),
    lambda entry, size, chance: entry.update(shape=chance.choice([[-1, 20480], "wide", None, [1.5], [[]]])),
    lambda entry, size, chance: entry["shape"].append(chance.randrange(2, 9)),
    lambda entry, size, chance: entry.update(data_offsets=entry["data_offsets"][::-1]),
    lambda entry, size, chance: entry.update(data_offsets=[size, size + chance.randrange(1, 99999)]),
    lambda entry, size, chance: entry["data_offsets"].__setitem__(chance.randrange(2), chance.randrange(2**62)),
    lambda entry, size, chance: entry.update(data_offsets=chance.choice([[], [0], None, [-8, 8], ["0", "8"]])),
    lambda entry, size, chance: entry.pop(chance.choice(["dtype", "shape", "data_offsets"])),
]


def lying_header(chance: random.Random) -> Callable[[Path], None]:
    """The header says something else of one tensor of an expert."""

    def change(file: Path) -> None:
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        name = chance.choice(sorted(name for name in header if ".experts." in name))
        chance.choice(ENTRIES)(header[name], len(data) - 8 - length, chance)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return change


def lying_length(chance: random.Random) -> Callable[[Path], None]:
    """The header is said to be longer or shorter than it is."""

    def change(file: Path) -> None:
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        other = chance.choice([0, 1, 2**63, 2**64 - 1, length - 1, length + 1, length * 2, chance.randrange(2**40)])
        file.write_bytes(other.to_bytes(8, "little") + data[8:])

    return change


def _state(**fields: Any) -> Callable[[Tensors, str, random.Random], None]:
    def change(tensors: Tensors, name: str, chance: random.Random) -> None:
        state = json.loads(bytes(tensors[name + STATE].numpy())) | fields
        tensors[name + STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def _part(*parts: str, of: Callable[[torch.Tensor, random.Random], torch.Tensor]) -> Any:
    def change(tensors: Tensors, name: str, chance: random.Random) -> None:
        key = name + chance.choice(parts)
        tensors[key] = of(tensors[key], chance)

    return change


def _spoiled(value: float) -> Callable[[torch.Tensor, random.Random], torch.Tensor]:
    def of(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
        found = tensor.clone()
        found.view(-1)[chance.randrange(found.numel())] = value
        return found

    return of


SCALES = (".absmax", ".nested_absmax", ".nested_quant_map")
TENSORS: list[Callable[[Tensors, str, random.Random], object]] = [
    _part("", *SCALES, ".quant_map", STATE, of=lambda t, chance: t.flatten()[: chance.randrange(t.numel())]),
    _part("", *SCALES, ".quant_map", of=lambda t, chance: torch.cat([t.flatten()] * chance.randrange(2, 4))),
    _part("", ".absmax", of=lambda t, chance: t.to(chance.choice([torch.int64, torch.float64]))),
    _part(".nested_absmax", of=_spoiled(float("nan"))),
    _part(".nested_absmax", of=_spoiled(float("inf"))),
    _part(".quant_map", of=_spoiled(0.77)),
    _part(".quant_map", of=lambda t, chance: t.flip(0)),
    _part(STATE, of=lambda t, chance: torch.full_like(t, chance.randrange(256))),
    lambda tensors, name, chance: tensors.pop(name + chance.choice(["", ".absmax", ".quant_map", STATE])),
    lambda tensors, name, chance: tensors.update({_of_expert(name, 8 + chance.randrange(99)): tensors.pop(name)}),
    _state(shape=[64, 32]),
    _state(shape=[-64, 64]),
    _state(shape=[2**40, 2**40]),
    _state(shape="large"),
    _state(blocksize=0),
    _state(blocksize=-64),
    _state(blocksize=2**70),
    _state(blocksize=128),
    _state(quant_type="nf5"),
    _state(nested_blocksize=255),
    _state(nested_offset=float("nan")),
    _state(dtype="bfloat17"),
]


def _of_expert(name: str, number: int) -> str:
    """The name of another expert's tensor."""
    parts = name.split(".")
    place = max(place for place, part in enumerate(parts) if part.isdigit())
    return ".".join([*parts[:place], str(number), *parts[place + 1 :]])


@pytest.mark.slow
def test_cut_files_and_lying_headers(good: Path, tmp_path: Path) -> None:
    """Each is refused by the name of the file or of the tensor."""
    chance = random.Random(2)
    for number in range(COUNT // 2):
        change = (cut, lying_header, lying_header, lying_length)[number % 4](chance)
        message = refusal(good, tmp_path / str(number), change)
        assert "model.safetensors: damaged" in message or ".experts." in message, message


@pytest.mark.slow
def test_lying_tensors(good: Path, tmp_path: Path) -> None:
    """Each is refused by the name of the tensor or of its layer's experts."""
    chance = random.Random(3)
    tensors = load_file(good / "model.safetensors")
    weights = sorted(name for name in tensors if name + STATE in tensors and ".experts." in name)
    for number in range(COUNT // 2):
        name, lie = chance.choice(weights), TENSORS[number % len(TENSORS)]
        changed = dict(tensors)
        lie(changed, name, chance)
        changed = {key: tensor.contiguous() for key, tensor in changed.items()}
        message = refusal(good, tmp_path / str(number), partial(_write, changed))
        assert name.partition(".experts.")[0] + ".experts" in message, (number % len(TENSORS), name, message)


def _write(tensors: Tensors, file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})


def test_too_many_scales_are_no_other_experts(tmp_path: Path) -> None:
    """Plain scales, which are joined: those that one expert has too many would be the next one's."""
    save_moe(tmp_path / "good", tiny_moe("qwen3_moe"), nested=False)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def change(file: Path) -> None:
        tensors = load_file(file)
        tensors[f"{name}.absmax"] = torch.cat([tensors[f"{name}.absmax"]] * 2)
        _write(tensors, file)

    assert f"{name} has 128 scales, its 64 blocks take one each" in refusal(tmp_path / "good", tmp_path / "bad", change)
