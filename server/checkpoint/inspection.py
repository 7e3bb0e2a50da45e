"""Look at a checkpoint folder without loading it: what it is, whether it is whole, how much memory it takes."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from server.checkpoint.base import CheckpointError
from server.checkpoint.experts.names import Place, described, place_of
from server.checkpoint.names import is_of_tower
from server.checkpoint.states import NARROW_INPUTS

Quantization = Literal["nf4", "none"]
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}
"""Bytes of a number, by safetensors' names of types."""
_PROJECTIONS = ("w1", "w2", "w3", "input_linear", "output_linear")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NEEDED = "bitsandbytes NF4 or an unquantized model is needed"
# safetensors' own limit; a larger header is damage, and must not be read into memory.
_MAX_HEADER = 100 * 2**20
# A weight's share in NF4 with double quantization: 4 bits, 8 bits per 64, 32 bits per 64 * 256.
_NESTED = 256
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * _NESTED)
# The same with plain scales.
_PLAIN_BYTES = 0.5 + 4 / 64


@dataclass(frozen=True)
class CheckpointInfo:
    """Contents of a checkpoint folder."""

    folder: Path
    model_type: str
    architecture: str
    quantization: Quantization
    """nf4: some tensors are packed by bitsandbytes (see packed). none: 16 or 32 bit, quantized while loading."""
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name to (safetensors dtype, shape)."""
    files: tuple[Path, ...] = ()

    @functools.cached_property
    def packed(self) -> dict[str, str]:
        """Tensors that bitsandbytes has packed to 4 bits, each with its table, nf4 or fp4, as the files say."""
        return packed_tensors(self.tensors)

    def without(self, left_out: Callable[[str], bool]) -> CheckpointInfo:
        """This checkpoint with fewer tensors."""
        return replace(self, tensors={name: kind for name, kind in self.tensors.items() if not left_out(name)})

    def loaded_bytes(self, item_bytes: int, keeps_fp4: bool = False) -> int:
        """Bytes the weights take once loaded, with unquantized floats in item_bytes each; FP4 is expanded, if not kept."""
        return int(sum(self.tensor_bytes(name, item_bytes, keeps_fp4) for name in self.tensors))

    def is_projection(self, name: str) -> bool:
        """Whether a tensor is the weight of a linear layer that transformers quantizes, and no expert's."""
        return _is_projection(name) and len(self.tensors[name][1]) == 2

    def becomes_nf4(self, name: str) -> bool:
        """Whether a tensor is in NF4 once it is loaded, or a table of one that is."""
        if self.quantization == "nf4":
            return name in self.packed or _is_quantization_state(name)
        place = place_of(name)
        return self.is_projection(name) or (place is not None and not place.bias)

    def tensor_bytes(self, name: str, item_bytes: int, keeps_fp4: bool = False, plain: bool = False) -> float:
        """Bytes that loaded_bytes() counts of one tensor; plain: the scales of this expert's weight do not stay nested."""
        dtype, shape = self.tensors[name]
        count = math.prod(shape)
        place = place_of(name)
        experts = place is not None and not place.bias
        if self.packed.get(name) == "fp4" and not experts and not keeps_fp4:
            return 2 * count * item_bytes
        if self.quantization == "none" and (experts or self.is_projection(name)):
            return count * (_PLAIN_BYTES if plain or (place and _stays_plain(place, shape)) else NF4_BYTES)
        if place is None and place_of(described(name)):
            if not name.endswith("absmax") or (plain and name.endswith("nested_absmax")):
                return 0  # tables of single experts, which are not kept
            if dtype == "U8" and name.endswith(".absmax") and (plain or count % _NESTED):
                return 4 * count  # scales that cannot stay nested are expanded
        if dtype in _FLOATS and name not in self.packed and not _is_quantization_state(name):
            return count * item_bytes
        return count * ITEM_BYTES.get(dtype, 1)


def inspect_checkpoint(
    folder: Path, headers: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
) -> CheckpointInfo:
    """Read config.json and the headers of the weight files. Raises CheckpointError for what cannot be served.

    headers: of weight files that are not in the folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder")
    if not (folder / "config.json").exists() and (folder / "params.json").exists():
        raise CheckpointError(
            f"{folder}: in its maker's own format (params.json, no config.json); the model in transformers' format is needed"
        )
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").exists():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        raise CheckpointError(
            f"{folder}: an adapter, not a model: serve its base ({base}) with --lora-modules NAME={folder}"
        )
    config = read_json(folder / "config.json")
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{folder / 'config.json'}: names no model_type")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(f'{folder / "config.json"}: names no architectures, such as ["LlamaForCausalLM"]')
    if config.get("is_encoder_decoder"):
        raise CheckpointError(
            f"{folder}: {architectures[0]} is an encoder-decoder model; only decoder-only ones are served"
        )
    settings = _quantization_settings(config)
    if settings is None and (folder / "hf_quant_config.json").exists():
        # Older releases of NVIDIA's ModelOpt say so there alone.
        method = (read_json(folder / "hf_quant_config.json").get("quantization") or {}).get("quant_algo")
        raise CheckpointError(f"{folder}: quantized by ModelOpt with {method} (hf_quant_config.json); {_NEEDED}")
    _refuse_other_quantizations(folder, settings)
    tensors = dict(headers or {})
    files = () if headers else tuple(weight_files(folder))
    for file in files:
        tensors.update(read_header(file))
    eight_bit = next((name for name in tensors if name.endswith(".SCB")), None)
    if eight_bit is not None:
        raise CheckpointError(f"{folder}: {eight_bit.removesuffix('.SCB')} is in bitsandbytes' 8 bit; {_NEEDED}")
    packed = packed_tensors(tensors)
    if settings is not None and not packed:
        raise CheckpointError(
            f"{folder}: config.json says NF4, but no weight in it is in NF4; if its weights are in 16 bit, remove"
            " quantization_config from config.json, and they are quantized while loading"
        )
    quantization: Quantization = "nf4" if packed else "none"
    return CheckpointInfo(folder, model_type, str(architectures[0]), quantization, tensors, files)


def packed_tensors(tensors: Iterable[str]) -> dict[str, str]:
    """The names of a checkpoint's tensors that are packed to 4 bits, each with its table: nf4 or fp4."""
    found = {}
    for name in tensors:
        packed, mark, table = name.partition(".quant_state.bitsandbytes__")
        if mark:
            found[packed] = table
    return found


def _quantization_settings(config: dict[str, Any]) -> Any:
    """quantization_config, which some checkpoints of several parts have in the part that it is about."""
    parts = (config, *(part for key, part in config.items() if key.endswith("_config") and isinstance(part, dict)))
    return next((part["quantization_config"] for part in parts if part.get("quantization_config") is not None), None)


def _refuse_other_quantizations(folder: Path, settings: Any) -> None:
    if settings is None:
        return
    fields = settings if isinstance(settings, dict) else {"quant_method": settings}
    four, eight = (any(fields.get(f"{start}load_in_{bits}bit") for start in ("", "_")) for bits in (4, 8))
    method = fields.get("quant_method") or ("bitsandbytes" if four or eight else None)
    if method != "bitsandbytes" or not four:
        raise CheckpointError(f"{folder}: quantized with {method}{' (8 bit)' if eight else ''}; {_NEEDED}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises CheckpointError where one is missing."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise CheckpointError(
                f"{folder}: no model.safetensors (and no index of shards); other formats are not loaded"
            )
        return [single]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{index}: names no shards")
    files = [folder / str(name) for name in sorted(set(shards.values()))]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file}: named in {index.name}, but missing")
    return files


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes in a safetensors file; checks that the file is as long as its header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                raise CheckpointError(
                    f"{file}: a pointer of Git LFS, without the weights: run git lfs pull in its folder"
                )
            (length,) = struct.unpack("<Q", start)
            if length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(f"{file}: damaged: its header claims {length} bytes of {size}")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("no object")
        header.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, entry in header.items():
            if not _is_whole(entry):
                raise CheckpointError(f"{file}: damaged: what its header says of {name} cannot be: {str(entry)[:200]}")
            tensors[name] = (entry["dtype"], tuple(entry["shape"]))
            end = max(end, entry["data_offsets"][1])
    except OSError as e:
        raise CheckpointError(f"{file}: {e.strerror}") from e
    except (struct.error, ValueError, RecursionError) as e:
        raise CheckpointError(f"{file}: damaged: not a safetensors file") from e
    if size != 8 + length + end:
        raise CheckpointError(f"{file}: damaged: {size} bytes long, its header describes {8 + length + end}")
    return tensors


def _is_whole(entry: Any) -> bool:
    """Whether an entry of a safetensors header has a dtype, a shape, and a range of exactly the bytes that these take."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, place = entry.get("shape"), entry.get("data_offsets")
    for numbers in (shape, place):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            return False
    if not isinstance(shape, list) or not isinstance(place, list) or len(place) != 2 or place[0] > place[1]:
        return False
    item = ITEM_BYTES.get(entry["dtype"])
    return item is None or math.prod(shape) * item == place[1] - place[0]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file. Raises CheckpointError, by name, for a file that has none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror}") from e
    except ValueError as e:
        raise CheckpointError(f"{path}: damaged: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged: not a JSON object")
    return value


def _is_projection(name: str) -> bool:
    module = name.removesuffix(".weight").rpartition(".")[2]
    is_named = module.endswith("proj") or module.startswith("in_proj_") or module in _PROJECTIONS
    return name.endswith(".weight") and is_named and module not in NARROW_INPUTS and not is_of_tower(name)


def _stays_plain(place: Place, shape: tuple[int, ...]) -> bool:
    """Whether an expert's weight, quantized by itself while it is loaded, has no whole groups of scales."""
    count = math.prod(shape if place.expert is not None else shape[1:])
    gates = 2 if place.part == "gate_up" else 1
    return count // gates % (64 * _NESTED) != 0


def _is_quantization_state(name: str) -> bool:
    return any(part in name for part in (".absmax", ".quant_map", ".nested_", ".quant_state."))
