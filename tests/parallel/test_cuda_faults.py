"""The real server on two GPUs: mixed requests, and ranks that die or stop under load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.soak import write_adapter
from tests.conftest import RunningServer, engine_pid, start_server, until_ready
from tests.engine.models import tiny_model
from tests.parallel.test_cuda import SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
REQUESTS, TOGETHER = 200, 64
WORDS = ("night", "river", "code", "seven", "lamp")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "y"]}, "on": {"type": "boolean"}},
    "required": ["kind", "on"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A random model with an adapter on two GPUs, with a KV cache that is too small for all requests at once."""
    root = tmp_path_factory.mktemp("server")
    folder = root / "model"
    model = tiny_model("llama", **{**SIZES, "vocab_size": 1021}).to(torch.bfloat16)
    model.save_pretrained(folder)
    _write_tokenizer(folder, 1021)
    write_adapter(folder, root / "one", seed=1)
    engine = {
        "device": "cuda",
        "tensor_parallel_size": 2,
        "max_model_len": 2048,
        "max_num_seqs": 32,
        # 4096 tokens of four layers, two of the four KV heads, 128 values of 16 bits, keys and values.
        "kv_cache_bytes": 4096 * 4 * 2 * 128 * 2 * 2,
        "lora_modules": [{"name": "one", "path": str(root / "one")}],
        "max_lora_rank": 8,
    }
    config = root / "config.json"  # YAML has JSON in it
    config.write_text(json.dumps({"engine": engine}))
    with start_server(root / "log", "--config", str(config), "--model", str(folder), eager=False) as running:
        yield running
        until_ready(running)
        rank = _rank(running)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{rank}").exists():
        assert time.monotonic() < deadline, "a rank outlives the server"
        time.sleep(0.1)


def _write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE of a few words, trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(Path(__file__).parents[2].joinpath("README.md").read_text().splitlines(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _rank(server: RunningServer) -> int:
    """Process id of rank 1."""
    engine = engine_pid(server.process.pid)
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return next(int(child) for child in children if Path(f"/proc/{child}/comm").read_text() == "nf4-rank-1\n")


def _body(rng: random.Random, name: str) -> tuple[str, dict[str, Any]]:
    """A request's kind, and what is sent."""
    shared = "The shared beginning of many prompts. " * 12
    prompt = rng.choice(("", shared)) + " ".join(rng.choices(WORDS, k=rng.choice((3, 60, 250))))
    options: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": rng.randrange(1000)},
        "penalized": {"temperature": 0, "repetition_penalty": 1.2},
        "scored": {"temperature": 0, "logprobs": 3},
        "several": {"temperature": 0.8, "n": 2},
        "adapted": {"temperature": 0, "model": "one"},
        "schema": {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}},
        "left": {"temperature": 0},
    }
    kind = rng.choice(list(options))
    tokens = 400 if kind in ("schema", "left") else rng.choice((5, 40, 160))
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, "ignore_eos": kind != "schema", **options[kind]}
    return kind, body


async def _mixed(server: RunningServer, name: str) -> Counter[str]:
    """Send REQUESTS requests, TOGETHER at a time; how many of each kind were answered rightly."""
    rng, places, found = random.Random(5), asyncio.Semaphore(TOGETHER), Counter[str]()

    async def ask(client: httpx.AsyncClient, kind: str, body: dict[str, Any]) -> None:
        async with places:
            try:
                async with asyncio.timeout(0.05 if kind == "left" else 120):
                    answer = await client.post("/v1/completions", json=body)
            except TimeoutError:
                assert kind == "left"
                found[kind] += 1
                return
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            if choice["finish_reason"] == "stop":
                assert set(json.loads(choice["text"])) == {"kind", "on"}, choice
            else:
                assert choice["finish_reason"] == "length"
        found[kind] += 1

    limits = httpx.Limits(max_connections=TOGETHER)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(ask(client, *_body(rng, name)) for _ in range(REQUESTS)))
    return found


def _model(server: RunningServer) -> str:
    name: str = httpx.get(f"{server.base_url}/v1/models").json()["data"][0]["id"]
    return name


def _metric(server: RunningServer, name: str) -> float:
    rows = httpx.get(f"{server.base_url}/metrics").text.splitlines()
    return sum(float(row.split()[-1]) for row in rows if row.split("{")[0].split(" ")[0] == name)


def test_mixed_requests_are_all_answered(server: RunningServer) -> None:
    found = asyncio.run(_mixed(server, _model(server)))
    assert found.total() == REQUESTS
    assert len(found) == 8, found
    assert _metric(server, "nf4_num_preemptions_total") > 0
    assert _metric(server, "nf4_prefix_cache_hits_total") > 0
    deadline = time.monotonic() + 10
    while _metric(server, "nf4_num_requests_running") > 0:
        assert time.monotonic() < deadline, "a request that was left still runs"
        time.sleep(0.1)


async def _killed(server: RunningServer, name: str, number: signal.Signals) -> tuple[list[str], float, float]:
    """Signal rank 1 under load: how the streams ended, after how many seconds, and when the next answer came."""
    body = {"model": name, "prompt": "night river", "max_tokens": 1900, "ignore_eos": True, "stream": True}

    async def stream(client: httpx.AsyncClient) -> str:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        return "whole" if lines and lines[-1] == "data: [DONE]" and '"error"' not in lines[-2] else "error"

    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        streams = [asyncio.create_task(stream(client)) for _ in range(16)]
        await asyncio.sleep(0.5)
        os.kill(_rank(server), number)
        killed = time.monotonic()
        endings = await asyncio.gather(*streams)
        ended = time.monotonic() - killed
        while True:
            answer = await client.post("/v1/completions", json={**body, "max_tokens": 4, "stream": False})
            if answer.status_code == 200:
                return endings, ended, time.monotonic() - killed
            assert time.monotonic() - killed < 60, answer.text
            await asyncio.sleep(0.2)


def test_an_engine_whose_rank_is_lost_comes_back(server: RunningServer) -> None:
    name, lines = _model(server), []
    for which in (signal.SIGKILL, signal.SIGSTOP):
        before = _rank(server)
        endings, ended, answered = asyncio.run(_killed(server, name, which))
        lines.append(f"{which.name}: streams ended after {ended:.1f} s, next answer after {answered:.1f} s")
        print(lines[-1], flush=True)
        assert ended < 10, lines
        assert set(endings) == {"error"}, endings
        assert not Path(f"/proc/{before}").exists()
