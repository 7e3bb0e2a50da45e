"""Images over HTTP for every family that takes them: prompts and answers are those of transformers' model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, Idefics3Processor, PreTrainedModel, PreTrainedTokenizerFast

from server.images.lfm2_vl import Lfm2VlLayout
from server.images.pil_processors import PIL_PROCESSORS
from tests.api.images.image_models import KINDS, Kind, encoded, image_part, picture, write_image_model
from tests.checkpoint.layouts import reference_model
from tests.conftest import RunningServer, start_server
from tests.engine.model.image_prompts import NEW_TOKENS, Answer, Picture, Prompt, expected

pytestmark = pytest.mark.rest

MODEL = "shown"
OTHERS = [
    name if name == "qwen2_5_vl" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name != "llava"
]
"""All but the one of test_image_requests.py. Each has a server of its own, which takes seconds to start."""


@dataclass(frozen=True)
class Served:
    """A server, and its model in transformers."""

    name: str
    server: RunningServer
    folder: Path
    model: PreTrainedModel

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def ask(self, *content: str | bytes, **options: Any) -> httpx.Response:
        """A chat of one message of texts and encoded images."""
        parts = [{"type": "text", "text": c} if isinstance(c, str) else image_part(c) for c in content]
        body = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": True, **options}
        messages = [{"role": "user", "content": parts}]
        url = f"{self.server.base_url}/v1/chat/completions"
        return httpx.post(url, json={"model": MODEL, "messages": messages, **body}, timeout=60)

    def expected(self, *content: str | Image.Image) -> tuple[int, Answer]:
        """(tokens of the prompt, the answer) by transformers' image processor, the model's layout and generate()."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.folder)
        parts = [{"type": "text", "text": c} if isinstance(c, str) else {"type": "image"} for c in content]
        message = [{"role": "user", "content": parts}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        mark = self.kind.replaced
        pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in text.split(mark)]
        found: list[list[int] | Picture] = [pieces[0]]
        images = [part for part in content if isinstance(part, Image.Image)]
        for image, piece in zip(images, pieces[1:], strict=True):
            tensors, shown = self.prepared(image)
            ids = tokenizer.encode(shown, add_special_tokens=False)
            found += [Picture(tensors, ids, tokenizer.convert_tokens_to_ids(self.kind.tokens["image_token"])), piece]
        prompt = Prompt(found)
        return len(prompt.ids), expected(self.model, prompt)

    def prepared(self, image: Image.Image) -> tuple[dict[str, torch.Tensor], str]:
        """(the tensors of an image, what stands for it in a prompt): the documented layouts of the families."""
        token = self.kind.tokens["image_token"]
        if self.name in ("aya_vision", "gemma3", "llava_next"):  # their processors are loaded without torchvision
            own = AutoProcessor.from_pretrained(self.folder, backend="pil")
            both = own(images=[image], text=self.kind.replaced, return_tensors="pt", add_special_tokens=False)
            names = ("pixel_values", "image_sizes")
            return {n: both[n] for n in names if n in both}, own.tokenizer.decode(both["input_ids"][0])
        if self.name == "lfm2_vl":  # test_processor.py compares it with transformers' own
            found, texts = Lfm2VlLayout(self.folder, None)._process_images([image])
            return {name: torch.from_numpy(array) for name, array in found.items()}, texts[0]
        if self.name in PIL_PROCESSORS:
            own = PIL_PROCESSORS[self.name](self.folder)
        else:
            own = AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        if self.name in (
            "idefics3",
            "smolvlm",
        ):  # the latter's class needs num2words, and lays images out as the former's
            tokenizer = PreTrainedTokenizerFast.from_pretrained(self.folder)
            both = Idefics3Processor(own, tokenizer, image_seq_len=1)(images=[image], text=token, return_tensors="pt")
            names = ("pixel_values", "pixel_attention_mask")
            return {n: both[n] for n in names}, tokenizer.decode(both["input_ids"][0])
        if self.name == "mistral3":
            tensors = own(images=[image], patch_size=28, return_tensors="pt")
            height, width = (int(side) // 28 for side in tensors["image_sizes"][0])
            rows = [token * width] * height
            return dict(tensors), "[IMG_BREAK]".join(rows) + "[IMG_END]"
        tensors = own(images=[image], return_tensors="pt")
        if self.name.startswith("gemma4"):
            count = int(tensors.pop("num_soft_tokens_per_image")[0])
            return dict(tensors), f"<|image>{token * count}<image|>"
        if self.name == "internvl":
            return {"pixel_values": tensors["pixel_values"]}, f"<img>{token * int(tensors['num_patches'][0])}</img>"
        shown = token * (int(tensors["image_grid_thw"].prod()) // 4)
        return dict(tensors), f"<|image_start|>{shown}<|image_end|>" if self.name.startswith("muse_") else shown


@pytest.fixture(scope="module", params=OTHERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    model = write_image_model(folder / "model", name)
    reference = reference_model(model, folder / "reference")
    settings = {
        "model": str(model),
        "served_model_name": MODEL,
        "http": {"max_images": 3},
        "engine": {"kv_cache_bytes": 4_000_000, "max_model_len": 512, "threads": 1},
    }
    with start_server(folder / "log", config=settings) as server:
        yield Served(name, server, model, reference)


def check(served: Served, response: httpx.Response, wanted: tuple[int, Answer]) -> None:
    """The prompt's length, the answer's text and its log-probabilities are those that are wanted."""
    assert response.status_code == 200, response.text
    document = response.json()
    entries = document["choices"][0]["logprobs"]["content"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(served.folder)
    count, answer = wanted
    assert document["usage"]["prompt_tokens"] == count
    assert [entry["token"] for entry in entries] == [tokenizer.decode([token]) for token in answer.tokens]
    assert np.allclose([entry["logprob"] for entry in entries], answer.logprobs, atol=2e-3)


def test_images_as_transformers_sees_them(served: Served) -> None:
    one, other, wide = picture(1, 70, 60), picture(2, 70, 60), picture(3, 100, 40)
    asked = ["What is it?", one, "And these:", wide, other]
    wanted = served.expected(*asked)
    data = [c if isinstance(c, str) else encoded(c) for c in asked]
    check(served, served.ask(*data), wanted)
    # Again: the images' blocks come from the prefix cache.
    again = served.ask(*data)
    check(served, again, wanted)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > wanted[0] // 2
    # Another image of the same size in the place of the first.
    changed = served.expected("What is it?", other, "And these:", wide, other)
    assert changed[0] == wanted[0]
    assert not changed[1].same_as(wanted[1])
    check(served, served.ask(data[0], encoded(other), *data[2:]), changed)
    # A chat without images.
    check(served, served.ask("Hello"), served.expected("Hello"))
