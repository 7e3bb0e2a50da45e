"""Sampling parameters of requests that leave them out: the model's own."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from server.api.openai.options import GenerationOptions, SamplingDefaults
from server.api.openai.sampling_defaults import read_defaults
from tests.clients.random_model import write_random_model
from tests.conftest import serving

MAKERS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}


def write(folder: Path, document: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(document))
    return folder


def test_what_the_models_makers_say_is_read(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == SamplingDefaults()
    assert read_defaults(write(tmp_path, MAKERS | {"do_sample": True})) == SamplingDefaults(**MAKERS)  # type: ignore[arg-type]
    assert read_defaults(write(tmp_path, {"top_p": None, "temperature": 1})) == SamplingDefaults()


@pytest.mark.parametrize(
    "document",
    [{"temperature": "hot"}, {"temperature": 3.0}, {"top_k": 2.5}, {"top_p": True}, {"min_p": float("nan")}, [1]],
)
def test_what_cannot_be_used_is_passed_over_and_told(
    document: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_defaults(write(tmp_path, document)) == SamplingDefaults()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_request_wins() -> None:
    defaults = SamplingDefaults(**MAKERS)  # type: ignore[arg-type]

    def names(**asked: Any) -> dict[str, Any]:
        (made,) = GenerationOptions(model="m", **asked).sampling(5, 100, defaults, None)
        return {name: getattr(made, name) for name in MAKERS}

    assert names() == MAKERS
    assert names(temperature=0, top_k=-1) == MAKERS | {"temperature": 0, "top_k": 0}
    off = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert names(**off) == off


@pytest.mark.slow
def test_a_server_takes_them_from_the_checkpoint(embedded_folder: Path, tmp_path: Path) -> None:
    config = write_random_model(tmp_path / "model", embedded_folder)
    own = json.loads((embedded_folder / "generation_config.json").read_text())
    write(config.parent, own | {"top_k": 1, "temperature": 1.5})
    ask = {"model": "mine", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 12}
    with serving(tmp_path, config, "--served-model-name", "mine") as http:

        def answer(**asked: Any) -> str:
            response = http.post("/v1/chat/completions", json=ask | asked)
            return str(response.json()["choices"][0]["message"]["content"])

        best = answer(temperature=0)
        assert {answer(seed=seed) for seed in range(3)} == {best}
        assert answer(top_k=-1, seed=1) != best
        response = http.post("/v1/responses", json={"model": "mine", "input": "Hi", "max_output_tokens": 16})
        assert response.json()["temperature"] == 1.5
