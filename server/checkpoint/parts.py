"""The parts of a checkpoint's weights as a start's memory plan lists them, and what each takes once it is loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from server.checkpoint.experts.names import place_of
from server.checkpoint.inspection import NF4_BYTES, CheckpointInfo
from server.checkpoint.names import is_of_tower

NF4, EMBEDDING, OUTPUT_LAYER = "weights in NF4", "embedding", "output layer"
SKIPPED, OTHERS, TOWER = "skipped modules in 16 bit", "norms and others", "image tower"
_EMBEDDINGS = frozenset(("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings"))
_OUTPUT_LAYERS = frozenset(("lm_head", "embed_out"))


def weight_parts(info: CheckpointInfo, item_bytes: int, keeps_fp4: bool) -> dict[str, int]:
    """Bytes of each part of a checkpoint's weights, with unquantized floats in item_bytes each."""
    found: Counter[str] = Counter()
    for name in info.tensors:
        found[part_of(name, info)] += math.ceil(info.tensor_bytes(name, item_bytes, keeps_fp4))
    return dict(found)


def part_of(name: str, info: CheckpointInfo) -> str:
    """The part that a tensor of a checkpoint belongs to."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    if is_of_tower(name):
        return TOWER
    if info.becomes_nf4(name):
        return NF4
    if module in _EMBEDDINGS:
        return EMBEDDING
    if module in _OUTPUT_LAYERS:
        return OUTPUT_LAYER
    return SKIPPED if info.is_projection(name) and place_of(name) is None else OTHERS


def copied_bytes(info: CheckpointInfo) -> int:
    """Bytes of 16-bit copies of all weights in NF4 that may have one: experts' have none."""
    counts = {name: math.prod(shape) for name, (_, shape) in info.tensors.items() if place_of(name) is None}
    if info.quantization == "nf4":
        return sum(4 * count for name, count in counts.items() if name in info.packed and not is_of_tower(name))
    return sum(2 * count for name, count in counts.items() if info.is_projection(name))


def in_nf4(parts: Mapping[str, int], part: str, item_bytes: int) -> dict[str, int]:
    """The same parts, one of which is quantized while it is loaded."""
    others = {name: size for name, size in parts.items() if name != part}
    return others | {NF4: others.get(NF4, 0) + int(parts.get(part, 0) / item_bytes * NF4_BYTES)}


def described_by(folder: Path, config: Any) -> CheckpointInfo:
    """The checkpoint that a configuration describes, without files.

    In 16 bit, or in NF4 but for what the configuration's own skip list names.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    settings = getattr(config, "quantization_config", None) or {}
    skipped = {*(settings.get("llm_int8_skip_modules") or ()), *_OUTPUT_LAYERS}
    shapes = {name: ("BF16", tuple(weight.shape)) for name, weight in model.named_parameters()}
    info = CheckpointInfo(folder, config.model_type, type(model).__name__, "none", shapes)
    if not settings:
        return info
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in shapes.items():
        if info.becomes_nf4(name) and skipped.isdisjoint(name.split(".")):
            tensors |= _packed(name, math.prod(shape))
        else:
            tensors[name] = dtype, shape
    return replace(info, tensors=tensors, quantization="nf4")


def _packed(name: str, count: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A weight of count elements as bitsandbytes saves it with double quantization."""
    blocks = -(-count // 64)
    return {
        name: ("U8", (-(-count // 2), 1)),
        f"{name}.absmax": ("U8", (blocks,)),
        f"{name}.nested_absmax": ("F32", (-(-blocks // 256),)),
        f"{name}.quant_state.bitsandbytes__nf4": ("U8", (100,)),
    }
