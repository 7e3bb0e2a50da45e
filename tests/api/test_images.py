"""Images in requests: prompts and answers as transformers makes them, refusals that name what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, PreTrainedModel

from tests.api.image_models import encoded, image_part, picture, write_image_model
from tests.checkpoint.layouts import reference_model
from tests.conftest import RunningServer, start_server

MODEL = "shown"


@dataclass(frozen=True)
class Served:
    """A server, and its model in transformers."""

    server: RunningServer
    folder: Path
    model: PreTrainedModel

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.server.base_url}{path}", json={"model": MODEL, **body}, timeout=60)

    def ask(self, content: Any, **options: Any) -> httpx.Response:
        """A chat of one message."""
        options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True, **options}
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **options)

    def expected(self, content: list[str | Image.Image]) -> tuple[int, list[str]]:
        """(tokens of the prompt, the answer's tokens) by transformers' own processor and generate()."""
        processor = AutoProcessor.from_pretrained(self.folder, backend="pil")
        parts = [{"type": "image"} if isinstance(p, Image.Image) else {"type": "text", "text": p} for p in content]
        text = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        images = [part for part in content if isinstance(part, Image.Image)]
        given = processor(images=images or None, text=text, return_tensors="pt", add_special_tokens=False)
        self.model.generation_config.eos_token_id = None
        with torch.inference_mode():
            output = self.model.generate(**given, max_new_tokens=8, do_sample=False)
        count = given["input_ids"].shape[1]
        return count, [processor.tokenizer.decode([token]) for token in output[0, count:]]


@pytest.fixture(scope="module")
def served(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("images")
    model = write_image_model(folder / "model", embedded_folder)
    reference = reference_model(model, folder / "reference")
    options = ("--model", str(model), "--served-model-name", MODEL, "--max-model-len", "512", "--threads", "1")
    with start_server(folder / "log", *options, "--kv-cache-bytes", "4000000") as server:
        yield Served(server, model, reference)


def answer(response: httpx.Response) -> tuple[int, list[str]]:
    """(tokens of the prompt, the answer's tokens)."""
    assert response.status_code == 200, response.text
    document = response.json()
    return document["usage"]["prompt_tokens"], [e["token"] for e in document["choices"][0]["logprobs"]["content"]]


def test_an_image_as_transformers_sees_it(served: Served) -> None:
    image = picture(1)
    assert answer(served.ask([{"type": "text", "text": "What is it?"}, image_part(encoded(image))])) == served.expected(
        ["What is it?", image]
    )
    assert answer(served.ask([{"type": "text", "text": "Hello"}])) == served.expected(["Hello"])
