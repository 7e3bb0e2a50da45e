"""Images in requests: prompts and answers as transformers makes them, refusals that name what is wrong."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, PreTrainedModel

from tests.api.images.image_models import encoded, image_part, picture, write_image_model
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
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("images")
    model = write_image_model(folder / "model")
    reference = reference_model(model, folder / "reference")
    settings = {
        "model": str(model),
        "served_model_name": MODEL,
        "http": {"max_images": 3, "max_image_pixels": 1_000_000, "max_image_bytes": 200_000},
        "engine": {"kv_cache_bytes": 4_000_000, "max_model_len": 512, "threads": 1},
    }
    with start_server(folder / "log", config=settings) as server:
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


def test_several_images_of_several_sizes_and_formats(served: Served) -> None:
    images = [picture(1, 64, 28), picture(2, 21, 90), picture(3)]
    forms = [encoded(images[0], "PNG"), encoded(images[1], "WEBP"), encoded(images[2], "GIF")]
    decoded = [Image.open(io.BytesIO(form)).convert("RGB") for form in forms]
    content = ["First:", decoded[0], "then", decoded[1], decoded[2], "?"]
    found = iter(forms)
    parts = [{"type": "text", "text": c} if isinstance(c, str) else image_part(next(found)) for c in content]
    wanted = served.expected(content)
    assert answer(served.ask(parts)) == wanted
    # Again, now from the prefix cache.
    again = served.ask(parts)
    assert answer(again) == wanted
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def _saved(image: Image.Image, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def test_a_second_turn_with_another_image_and_tools(served: Served) -> None:
    """Its prompt begins with the first one's KV blocks."""
    first = [{"role": "user", "content": [image_part(encoded(picture(7))), {"type": "text", "text": "What is it?"}]}]
    second = [{"type": "text", "text": "And"}, image_part(encoded(picture(8))), {"type": "text", "text": "?"}]
    turns = [*first, {"role": "assistant", "content": "A thing."}, {"role": "user", "content": second}]
    options = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    count = served.post("/v1/chat/completions", messages=first, **options).json()["usage"]["prompt_tokens"]
    for expected in (count // 16 * 16 - 16, count):
        usage = served.post("/v1/chat/completions", messages=turns, **options).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= expected > 0
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    options |= {"tools": [{"type": "function", "function": function}]}
    response = served.post("/v1/chat/completions", messages=turns, **options)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_images_of_other_roles_are_refused(served: Served, role: str) -> None:
    messages = [{"role": role, "content": [image_part(encoded(picture(1)))]}, {"role": "user", "content": "Hello"}]
    response = served.post("/v1/chat/completions", messages=messages)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "messages[0].content[0]"
    assert "of the role 'user'" in response.json()["error"]["message"]


def test_a_clients_text_makes_no_image(served: Served) -> None:
    """Neither the placeholder nor the mark that stands for it on the way."""
    text = "<image> \U000ffff2 "
    assert served.ask([{"type": "text", "text": text}]).status_code == 200
    assert served.ask(text).status_code == 200
    response = served.ask([{"type": "text", "text": text}, image_part(encoded(picture(1)))])
    assert response.status_code == 200, response.text


def test_images_are_counted(served: Served) -> None:
    """A new image is prepared and computed once; its second request finds both."""

    def counted() -> dict[str, float]:
        lines = httpx.get(f"{served.server.base_url}/metrics").text.splitlines()
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}

    shown = image_part(encoded(picture(99)))
    before = counted()
    for text in ("One", "Another"):
        assert served.ask([{"type": "text", "text": text}, shown]).status_code == 200
    assert served.ask([image_part(b"broken")]).status_code == 400
    after = counted()
    for name, count in (
        ("nf4_mm_cache_queries_total", 2),
        ("nf4_mm_cache_hits_total", 1),
        ("nf4_image_preparation_seconds_count", 1),
        ("nf4_images_computed_total", 1),
        ("nf4_image_feature_hits_total", 1),
    ):
        assert after[name] - before[name] == count, name
    assert after["nf4_image_tower_seconds_total"] > before["nf4_image_tower_seconds_total"]


def at(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


IMAGE = "messages[0].content[0].image_url"
TYPE = "messages[0].content[0].type"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "four images": ([image_part(encoded(picture(1)))] * 4, "messages[0].content[3]", "http.max_images"),
    "no URL": ([{"type": "image_url"}], IMAGE, "expected an object"),
    "an unknown detail": ([image_part(b"x", detail="huge")], f"{IMAGE}.detail", "'auto'"),
    "a URL to fetch": (at("https://example.com/a.png"), IMAGE, "http.image_hosts"),
    "a file": (at("file:///etc/passwd"), IMAGE, "data:"),
    "text as an image": ([image_part(b"no image at all")], IMAGE, "formats"),
    "an animation": (
        [image_part(_saved(picture(1), "GIF", save_all=True, append_images=[picture(2)]))],
        IMAGE,
        "2 frames",
    ),
    "half an image": ([image_part(encoded(picture(1))[:-90])], IMAGE, "truncated"),
    "no URL but base64": (at("iVBORw0KGgo="), IMAGE, "data:"),
    "another type": (at("data:text/html;base64,aGk="), IMAGE, "type"),
    "no base64": (at("data:image/png;base64,***"), IMAGE, "base64"),
    "too many pixels": ([image_part(encoded(picture(1, 2000, 600)))], IMAGE, "1000000"),
    "a video": ([{"type": "video_url", "video_url": {"url": "data:,"}}], TYPE, "video_url"),
    "a sound": ([{"type": "input_audio", "input_audio": {}}], TYPE, "input_audio"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(served: Served, name: str) -> None:
    content, param, said = REFUSED[name]
    response = served.ask(content)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert said in error["message"]


def test_the_second_of_two_images_is_named(served: Served) -> None:
    response = served.ask([image_part(encoded(picture(1))), image_part(encoded(picture(2))[:60])])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[1].image_url"


def test_responses_and_messages_have_the_same_prompt(served: Served) -> None:
    """The other forms count as the chat does for a text and an image; errors name their own fields."""
    image = encoded(picture(1))
    count, _ = served.expected(["What is it?", picture(1)])
    url = image_part(image)["image_url"]["url"]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}
    shown = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    response = served.post("/v1/responses", input=[{"role": "user", "content": shown}], max_output_tokens=2)
    assert response.json()["usage"]["input_tokens"] == count, response.text
    asked = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, block]}]
    response = served.post("/v1/messages", messages=asked, max_tokens=2)
    usage = response.json()["usage"]
    assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == count, response.text
    assert served.post("/v1/messages/count_tokens", messages=asked).json() == {"input_tokens": count}
    block["source"]["data"] = "AAAA"
    error = served.post("/v1/messages", messages=asked, max_tokens=2).json()["error"]
    assert "messages[0].content[1]" in error["message"]
    broken = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
    error = served.post("/v1/responses", input=[{"role": "user", "content": broken}]).json()["error"]
    assert error["param"] == "input[0].content[0]"
