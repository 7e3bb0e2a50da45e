"""Prompts with images for small random multimodal models, and what transformers itself answers to them."""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from server.engine.core import Engine
from server.types import GenerateRequest, ImageInput, SamplingParams
from tests.engine.factories import run_together, tokens

NEW_TOKENS = 8
TOLERANCE = 4e-3
"""Largest difference of log-probabilities between kernels in fixed point and float32."""
_FOLDER = Path(tempfile.mkdtemp(prefix="nf4-test-images-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_ids = itertools.count()


@dataclass(frozen=True)
class Picture:
    """An image as its processor gives it: tensors of a batch of one, and the tokens that stand for it."""

    tensors: dict[str, torch.Tensor]
    tokens: list[int]
    placeholder: int | None = None
    """The token that the features stand in for; None: the most frequent."""

    @functools.cached_property
    def key(self) -> bytes:
        data = b"".join(tensor.numpy().tobytes() for tensor in self.tensors.values())
        return hashlib.blake2b(data, digest_size=16).digest()

    @functools.cached_property
    def file(self) -> str:
        """Its tensors as the engine gets them."""
        file = _FOLDER / self.key.hex()
        save_file(self.tensors, file)
        return str(file)


@dataclass
class Prompt:
    """Token ids and pictures, one after another."""

    parts: list[list[int] | Picture]
    ids: list[int] = field(init=False)
    images: list[ImageInput] = field(init=False)

    def __post_init__(self) -> None:
        self.ids, self.images = [], []
        for part in self.parts:
            if isinstance(part, Picture):
                token = part.placeholder or max(set(part.tokens), key=part.tokens.count)
                first = len(self.ids) + part.tokens.index(token)
                end = len(self.ids) + len(part.tokens) - part.tokens[::-1].index(token)
                self.images.append(ImageInput(part.key, first, end, part.file))
            self.ids += part.tokens if isinstance(part, Picture) else part

    @property
    def pictures(self) -> list[Picture]:
        return [part for part in self.parts if isinstance(part, Picture)]

    def request(self, **sampling: Any) -> GenerateRequest:
        """A greedy request of NEW_TOKENS tokens."""
        options = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
        return GenerateRequest(f"image{next(_ids)}", self.ids, SamplingParams(**options), images=self.images)


@dataclass(frozen=True)
class Answer:
    """Tokens and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]

    def same_as(self, other: Answer, tolerance: float = TOLERANCE) -> bool:
        """Whether the tokens are equal and the log-probabilities within rounding."""
        return self.tokens == other.tokens and np.allclose(self.logprobs, other.logprobs, atol=tolerance)

    def same_until_tie(self, other: Answer, tolerance: float = TOLERANCE) -> bool:
        """same_as(), up to the first place at which two tokens are as likely, of which rounding chooses one."""
        pairs = zip(self.tokens, other.tokens, strict=True)
        count = next((place + 1 for place, (own, its) in enumerate(pairs) if own != its), len(self.tokens))
        return np.allclose(self.logprobs[:count], other.logprobs[:count], atol=tolerance)


def given_to_transformers(model: PreTrainedModel, prompt: Prompt, more: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of transformers' model other than the ids of a prompt and of more tokens behind it."""
    given: dict[str, torch.Tensor] = {}
    for name in prompt.pictures[0].tensors if prompt.pictures else ():
        given[name] = _joined([picture.tensors[name] for picture in prompt.pictures])
    ids = torch.tensor([prompt.ids])
    kinds = torch.zeros(1, len(prompt.ids) + more, dtype=torch.int64)
    for image in prompt.images:
        span = ids[0, image.start : image.end]
        kinds[0, image.start : image.end] = (span == span[0]).long()
    if model.config.model_type == "gemma3":
        given["token_type_ids"] = kinds
    elif model.config.model_type.startswith(("qwen", "glm", "gemma4")) and prompt.pictures:
        given["mm_token_type_ids"] = kinds
    return given


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Images' tensors as one batch, the smaller ones with zeros behind, as processors make it."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        missing = [most - size for most, size in zip(shape, tensor.shape[1:], strict=True)]
        padded.append(torch.nn.functional.pad(tensor, [n for size in missing[::-1] for n in (0, size)]))
    return torch.cat(padded)


def expected(model: PreTrainedModel, prompt: Prompt, count: int = NEW_TOKENS) -> Answer:
    """Answer of transformers' own generate() to a prompt, greedily."""
    ids = torch.tensor([prompt.ids])
    given = given_to_transformers(model, prompt)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
            return_dict_in_generate=True, output_logits=True, **given,
        )  # fmt: skip
    chosen = output.sequences[0, ids.shape[1] :].tolist()
    rows = torch.cat(output.logits).log_softmax(-1)
    return Answer(chosen, [float(row[token]) for row, token in zip(rows, chosen, strict=True)])


def outputs_of(engine: Engine, *prompts: Prompt) -> list[list[int]]:
    """The tokens that the engine answers to prompts that are sent at once."""
    requests = [prompt.request() for prompt in prompts]
    outputs = run_together(engine, *requests)
    for request in requests:
        assert outputs[request.request_id][-1].finish_reason == "length", outputs[request.request_id][-1]
    return [tokens(outputs[request.request_id]) for request in requests]


def answers(engine: Engine, *prompts: Prompt, **sampling: Any) -> list[Answer]:
    """Answers of the engine to prompts that are sent at once."""
    requests = [prompt.request(logprobs=0, **sampling) for prompt in prompts]
    outputs = run_together(engine, *requests)
    for request in requests:
        assert outputs[request.request_id][-1].finish_reason == "length", outputs[request.request_id][-1]
    found = (outputs[request.request_id] for request in requests)
    return [Answer(tokens(own), [e.logprob for output in own for e in output.logprobs or ()]) for own in found]
