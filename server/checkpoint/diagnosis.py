"""Faults of a checkpoint, in one line that names the tensor or file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers import GenerationConfig

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import read_json
from server.checkpoint.tokenizer_files import tokenizers_end

_MAX_REASON = 300
"""Characters of a reason in another library's words."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the next one if it ends in a colon; its type if it has none.

    Of a KeyError both, as its message is the key alone.
    """
    message = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()] or [type(error).__name__]
    found = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return found if len(found) <= _MAX_REASON else found[:_MAX_REASON] + " ..."


def linear_layers(model: nn.Module) -> str:
    """Count a model's linear layers by format, in words such as "168 linear layers in NF4, 1 in bfloat16"."""
    kinds = Counter(
        module.weight.quant_type.upper() if isinstance(module, Linear4bit) else str(module.weight.dtype)[6:]
        for module in model.modules()
        if isinstance(module, nn.Linear)
    )
    parts = [
        f"{count} {'linear layers ' if i == 0 else ''}in {kind}" for i, (kind, count) in enumerate(kinds.most_common())
    ]
    return ", ".join(parts) or "no linear layers"


def check_finite(folder: Path, model: nn.Module) -> None:
    """Raise CheckpointError, by name, for a parameter with values that are not finite numbers.

    Such a model would start, and then fail with every request. The sum of a parameter is not finite if one of its values is
    not, and takes no memory.
    """
    floats = [
        (name, p)
        for name, p in model.named_parameters()
        if p.is_floating_point() and p.numel() and not isinstance(p, Params4bit)
    ]
    if not floats:
        return
    sums = torch.stack([parameter.detach().sum(dtype=torch.float32) for _, parameter in floats])
    for (name, parameter), finite in zip(floats, sums.isfinite().tolist(), strict=True):
        if not finite and not bool(parameter.isfinite().all()):
            raise CheckpointError(f"{folder}: damaged: {name} has values that are not finite numbers")


def end_tokens(folder: Path) -> GenerationConfig | None:
    """What ends an answer by generation_config.json and by the tokenizer, each if there is one; config.json may say more.

    The rest of the file is for the API, and transformers must not stumble over it. Raises CheckpointError for a file that is
    no JSON object, or whose eos_token_id is no token.
    """
    file, ids = folder / "generation_config.json", None
    if file.exists():
        try:
            ids = read_json(file).get("eos_token_id")
        except CheckpointError as e:
            raise CheckpointError(f"{e}; fetch it again, or remove it") from e
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed):
        raise CheckpointError(f"{file}: eos_token_id is {ids!r}, not a token's number or a list of such; correct it")
    end = tokenizers_end(folder)
    listed = sorted({*listed, *([] if end is None else [end])})
    return GenerationConfig(eos_token_id=listed or None) if listed or file.exists() else None
