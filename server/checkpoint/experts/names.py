"""Names that checkpoints have for the tensors of experts and routers. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

Part = Literal["gate", "up", "gate_up", "down"]
_PARTS: dict[str, Part] = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down",
    "gate_up_proj": "gate_up", "gate_up_projs": "gate_up", "down_projs": "down",
    "input_linear": "gate_up", "output_linear": "down",
}  # fmt: skip
_LAYER = r".*\blayers\.(?P<layer>\d+)\b.*"
_FORMS = (
    # An expert's projection: mlp.experts.3.gate_proj.weight, block_sparse_moe.experts.3.w1.weight
    re.compile(
        _LAYER + r"\.experts\.(?P<expert>\d+)\.(?P<part>(gate|up|down|gate_up)_proj|w[123])\.(?P<what>weight|bias)"
    ),
    # A list for each projection, as in gpt-oss quantized by Unsloth: mlp.experts.gate_up_projs.3.weight
    re.compile(_LAYER + r"\.experts\.(?P<part>gate_up_projs|down_projs)\.(?P<expert>\d+)\.(?P<what>weight|bias)"),
    # All experts in one tensor: mlp.experts.gate_up_proj, mlp.experts.gate_up_proj_bias
    re.compile(_LAYER + r"\.experts\.(?P<part>gate_up_proj|up_proj|down_proj)(?P<what>_bias)?"),
    # Granite has: block_sparse_moe.input_linear.weight
    re.compile(_LAYER + r"\.block_sparse_moe\.(?P<part>input_linear|output_linear)\.(?P<what>weight)"),
)
_ROUTER = re.compile(_LAYER + r"\.(gate|router)(\.(linear|layer))?\.(?P<what>weight|bias)")
_STATE = re.compile(r"\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)$")
NF4_STATE, FP4_STATE = ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"
TAKEN = (
    r"\.experts\.",
    r"\.block_sparse_moe\.(input|output)_linear\.",
    r"\.(gate|router)(\.(linear|layer))?\.(weight|bias)(\.|$)",
)
"""Patterns of the names of experts' and routers' tensors, their quantization states among them."""


@dataclass(frozen=True)
class Place:
    """Role of a tensor: a part of one expert's weights or biases, or of all experts' (expert is None)."""

    layer: int
    part: Part
    expert: int | None
    bias: bool


def place_of(name: str) -> Place | None:
    """The place of an expert's tensor; None for every other tensor, including those that describe a quantization."""
    for form in _FORMS:
        if match := form.fullmatch(name):
            found = match.groupdict()
            expert = found.get("expert")
            bias = (found["what"] or "").endswith("bias")
            return Place(int(found["layer"]), _PARTS[found["part"]], None if expert is None else int(expert), bias)
    return None


def router_of(name: str) -> tuple[int, str] | None:
    """(layer, weight or bias) of a router's tensor; None for every other one."""
    match = _ROUTER.fullmatch(name)
    return None if match is None else (int(match["layer"]), match["what"])


def described(name: str) -> str:
    """The name of the weight that a tensor of its quantization state belongs to; other names as they are."""
    return _STATE.sub("", name)


def is_nf4(name: str, names: Container[str]) -> bool:
    """Whether a checkpoint of these tensors has the weight of that name in NF4."""
    return name + NF4_STATE in names


def is_packed(name: str, names: Container[str]) -> bool:
    """Whether a checkpoint of these tensors has the weight of that name in 4 bit, NF4 or FP4."""
    return is_nf4(name, names) or name + FP4_STATE in names
