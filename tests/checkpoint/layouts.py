"""Small random checkpoints as transformers and bitsandbytes save them, and what transformers itself answers from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import QuantState
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES

from nf4_kernels import reference
from nf4_kernels.format import Weight
from server.checkpoint.base import CheckpointError
from server.checkpoint.classes import add_image_outputs
from server.checkpoint.late import NO_ECONOMIES, Economies
from server.checkpoint.loading import load_model
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from tests.engine.factories import make_request, run_together, tokens

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
PROMPTS = [[3, 17, 42, 9], [5], list(range(20, 49)), [60, 61, 60, 61, 7]]
NEW_TOKENS = 8
CONFIG = EngineConfig(device="cpu", kv_cache_bytes=2**22, enforce_eager=True, block_size=4, max_num_batched_tokens=32)


def silent(stage: str, fraction: float) -> None:
    assert 0.0 <= fraction <= 1.0, stage


def auto_class(model_type: str) -> Any:
    """transformers' class that makes models of a type."""
    return AutoModelForImageTextToText if model_type in WITH_IMAGES else AutoModelForCausalLM


def random_model(config: Any, seed: int = 0, size: float = 0.15) -> PreTrainedModel:
    """A random float32 model of a configuration; weights large enough that every part of it matters."""
    torch.manual_seed(seed)
    model: PreTrainedModel = auto_class(config.model_type).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, size)
    return model.eval()


def save_nf4(model: PreTrainedModel, folder: Path, **quantization: Any) -> Path:
    """Save model into folder as transformers and bitsandbytes do after loading it in 4 bit."""
    plain = folder.with_name(folder.name + "-16bit")
    model.to(torch.bfloat16).save_pretrained(plain)
    settings = BitsAndBytesConfig(
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, **quantization}
    )
    # Not by the model's own class: some types have another type's, which would write its own type into config.json.
    packed = auto_class(model.config.model_type).from_pretrained(
        plain, quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    packed.save_pretrained(folder)
    return folder


def change_tensors(folder: Path, change: Callable[[Tensors], object], name: str = "model.safetensors") -> Path:
    """Rewrite a file of weights; change works in place or gives other tensors."""
    file = folder / name
    found = load_file(file)
    changed = change(found)
    found = changed if isinstance(changed, dict) else found
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, file, metadata={"format": "pt"})
    return folder


def replaced(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    """A change of one tensor."""
    return lambda tensors: tensors.update({name: how(tensors[name])}) or tensors


def state_with(weight: str, **fields: object) -> Callable[[Tensors], object]:
    """A change of fields of a weight's quantization state."""

    def how(state: torch.Tensor) -> torch.Tensor:
        return torch.tensor(list(json.dumps(json.loads(bytes(state.tolist())) | fields).encode()), dtype=torch.uint8)

    return replaced(f"{weight}.quant_state.bitsandbytes__nf4", how)


def without(*names: str) -> Callable[[Tensors], object]:
    """A change that leaves out the tensors whose names begin so."""
    return lambda tensors: {name: t for name, t in tensors.items() if not name.startswith(names)}


def refusal(load: Callable[[], object], folder: Path) -> str:
    """The one line that says why what is in folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        load()
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    return message


def change_json(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "config.json") -> Path:
    """Rewrite a file of settings of a checkpoint."""
    settings = json.loads((folder / name).read_text())
    change(settings)
    (folder / name).write_text(json.dumps(settings))
    return folder


def expanded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors with the packed ones in float32, by the oracle (in FP4 by the table that lies beside them)."""
    found = {}
    for name, tensor in tensors.items():
        companions = {key: t for key, t in tensors.items() if key.startswith(f"{name}.")}
        if companions:
            state = QuantState.from_dict(
                {k.removeprefix(f"{name}."): t for k, t in companions.items()}, torch.device("cpu")
            )
            table, state.quant_type = state.code, "nf4"
            weight = Weight.from_quant_state(tensor, state)
            values = reference.dequantize(weight, torch.float32)
            if name + ".quant_state.bitsandbytes__fp4" in tensors:
                codes = reference.unpack(weight.packed, values.numel())
                scales = reference.block_scales(weight).repeat_interleave(weight.blocksize)[: values.numel()]
                values = (table[codes] * scales).view(values.shape)
            found[name] = values
        elif not any(name.startswith(f"{other}.") for other in tensors):
            found[name] = tensor.float()
    return found


def reference_model(folder: Path, target: Path) -> PreTrainedModel:
    """transformers' own model of the checkpoint in folder, in float32 with expanded weights; target is a new folder."""
    target.mkdir()
    settings = json.loads((folder / "config.json").read_text())
    for part in (settings, *(part for part in settings.values() if isinstance(part, dict))):
        part.pop("quantization_config", None)
    settings.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(settings))
    stored = load_file(folder / "model.safetensors")
    tensors = expanded(stored)
    if settings["model_type"] == "gpt2":  # its class has weights the other way round than bitsandbytes packs them
        tensors |= {name: t.T for name, t in tensors.items() if f"{name}.quant_map" in stored}
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    model, report = auto_class(settings["model_type"]).from_pretrained(
        target, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"], report
    add_image_outputs(model)
    return model.eval()


NEAR_TIE = 2e-3
"""Largest distance of a token behind the likeliest one, in standard deviations of the logits. Kernels in fixed point are off
by 2e-4 of the logits' norm (docs/adr/0027), and which of two tokens that near leads is chance."""


def check_greedy(model: PreTrainedModel, prompt: list[int], found: list[int]) -> None:
    """Every token is the likeliest after those in front of it by transformers' own forward, but for near ties."""
    ids = torch.tensor([[*prompt, *found]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert len(found) == NEW_TOKENS
    behind = logits.amax(-1) - logits.gather(-1, torch.tensor(found)[:, None])[:, 0]
    assert (behind <= NEAR_TIE * logits.std(-1)).all(), (found, behind.tolist())


def answers(runner: ModelRunner, config: EngineConfig = CONFIG) -> list[list[int]]:
    """Answers of the engine to PROMPTS, all at once."""
    requests = [make_request(prompt, max_tokens=NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    outputs = run_together(Engine(runner, config), *requests)
    return [tokens(outputs[request.request_id]) for request in requests]


def served(folder: Path, config: EngineConfig = CONFIG, economies: Economies = NO_ECONOMIES) -> list[list[int]]:
    """Answers of the engine with a checkpoint to PROMPTS."""
    model = load_model(folder, CPU, torch.float32, silent, economies=economies)
    return answers(build_runner(model, config), config)


def check_answers(model: PreTrainedModel, found: list[list[int]]) -> None:
    """Check the answers to PROMPTS by check_greedy()."""
    for prompt, answer in zip(PROMPTS, found, strict=True):
        check_greedy(model, prompt, answer)


def check_served(folder: Path, config: EngineConfig = CONFIG) -> None:
    """The engine's tokens of a checkpoint are those of transformers with the same weights: see check_greedy()."""
    check_answers(reference_model(folder, folder.with_name(folder.name + "-expanded")), served(folder, config))


def config_of(model_type: str, **settings: Any) -> Any:
    """A configuration of transformers' for a model type."""
    return AutoConfig.for_model(model_type, **settings)
