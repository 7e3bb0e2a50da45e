"""Run a server under a mixed load for minutes and see that nothing leaks: python -m bench.soak [--minutes 20].

Clients send short and long prompts, a different grammar each time, adapters and several sequences, and leave at random
moments. Adapters are loaded and unloaded meanwhile, and the KV cache is small enough for preemptions. Afterwards no KV block
may be held, and every process must have as many open files and as much memory as after the first part, within 3 %. The
result is bench/results/soak.json; the exit code is 1 where something has leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from bench.embedded_server import MODEL, Server, serving
from bench.machine import cores, cpu_name, versions
from server.checkpoint.source import resolve_checkpoint
from server.config import default_cache_dir
from server.engine.grammar import CACHED_GRAMMARS

RESULT = Path(__file__).resolve().parent / "results" / "soak.json"
CLIENTS = 8
# The share of the time in which caches and allocators fill. Then come loads that fill them to their limits.
WARM = 0.25
MOST_GROWTH = 0.03
KV_CACHE_BYTES = 128 * 2**20
ADAPTERS = ("one", "two")
SAMPLE_S = 30.0
WORDS = ("night", "river", "code", "seven", "lamp")


def _body(rng: random.Random) -> dict[str, Any]:
    length = rng.choice((4, 30, 120, 600, 1500))
    body: dict[str, Any] = {
        "model": rng.choice((MODEL, MODEL, *ADAPTERS)),
        "messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=length))}],
        "max_tokens": rng.choice((1, 8, 40, 120)),
        "temperature": rng.choice((0, 0.8)),
        "stream": rng.random() < 0.7,
    }
    kind = rng.random()
    if kind < 0.2:
        body["response_format"] = _grammar(rng)
    elif kind < 0.3:
        body["n"] = 3
    elif kind < 0.4:
        body["logprobs"], body["top_logprobs"] = True, 5
    return body


def _grammar(rng: random.Random) -> dict[str, Any]:
    """A JSON schema that no request has used before."""
    name = f"p{rng.getrandbits(32)}"
    properties = {name: {"type": "integer"}, "kind": {"enum": ["x", "y"]}}
    schema = {"type": "object", "properties": properties, "required": [name, "kind"]}
    return {"type": "json_schema", "json_schema": {"name": "soak", "schema": schema}}


async def _client(server: Server, number: int, until: float, endings: Counter[str]) -> None:
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        while time.monotonic() < until:
            body, leave = _body(rng), rng.random() < 0.25
            try:
                async with asyncio.timeout(rng.uniform(0.01, 8) if leave else None):
                    answer = await client.post("/v1/chat/completions", json=body)
                error = answer.status_code == 200 and '"error":' in answer.text
                endings["an error in a stream" if error else f"HTTP {answer.status_code}"] += 1
            except TimeoutError:
                endings["left"] += 1
            except httpx.HTTPError as e:
                endings[type(e).__name__] += 1


async def _peak(server: Server, endings: Counter[str]) -> None:
    """Run as many sequences at once as the clients can, with the largest answers, so that allocators reach their peak."""
    rng = random.Random(1)
    words = " ".join(rng.choices(WORDS, k=600))
    body = {"messages": [{"role": "user", "content": words}], "n": 4, "logprobs": True, "top_logprobs": 20,
            "max_tokens": 24, "temperature": 0.8, "ignore_eos": True}  # fmt: skip
    models = (MODEL, *ADAPTERS)
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        asked = [{**body, "model": models[i % len(models)]} for i in range(CLIENTS)]
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=one) for one in asked))
    endings.update(f"HTTP {answer.status_code}" for answer in answers)


async def _fill_grammars(server: Server, endings: Counter[str]) -> None:
    """Fill the cache of compiled grammars."""
    rng = random.Random(2)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}

    async def ask(client: httpx.AsyncClient, count: int) -> None:
        for _ in range(count):
            answer = await client.post("/v1/chat/completions", json={**body, "response_format": _grammar(rng)})
            endings[f"HTTP {answer.status_code}"] += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        await asyncio.gather(*(ask(client, -(-CACHED_GRAMMARS // CLIENTS)) for _ in range(CLIENTS)))


async def _reload_adapters(server: Server, folder: Path, until: float, endings: Counter[str]) -> None:
    """Load and unload one adapter again and again while the others are in use."""
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        while time.monotonic() < until:
            loaded = await client.post("/v1/load_lora_adapter", json={"lora_name": "three", "lora_path": str(folder)})
            await asyncio.sleep(2)
            gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "three"})
            endings[f"adapter HTTP {loaded.status_code} {gone.status_code}"] += 1


def write_adapter(checkpoint: Path, folder: Path, seed: int) -> None:
    """Write a LoRA adapter with random weights for a checkpoint's attention, as PEFT would save it."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, rank = config["hidden_size"], 8
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    sizes = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = rng.normal(0, 0.03, (rank, hidden)).astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = rng.normal(0, 0.03, (size, rank)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": [*sizes]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


def _state(server: Server) -> dict[str, dict[str, float]]:
    """Resident bytes, open files and threads of every process, by its name."""
    return {
        name: {
            "memory_bytes": server.resident(pid),
            "open_files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
            "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
        }
        for name, pid in server.processes().items()
    }


def _idle(server: Server) -> dict[str, Any]:
    """Resources that the server holds once no request runs."""
    end = time.monotonic() + 30
    while server.metric("nf4_num_requests_running") + server.metric("nf4_kv_cache_usage_perc"):
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    # Idle connections of the clients that have just gone are closed by now.
    time.sleep(1)
    names = {"cache_in_use": "nf4_kv_cache_usage_perc", "running": "nf4_num_requests_running"}
    return {"processes": _state(server), **{key: server.metric(name) for key, name in names.items()}}


async def _watch(server: Server, begun: float, samples: list[dict[str, Any]]) -> None:
    """Print the processes' memory every half minute while the load runs."""
    while True:
        memory = {name: round(server.resident(pid) / 2**20) for name, pid in server.processes().items()}
        samples.append({"minute": round((time.monotonic() - begun) / 60, 1), "memory_mib": memory})
        print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
        await asyncio.sleep(SAMPLE_S)


def _growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {key: after["processes"].get(name, {}).get(key, 0) / value - 1 for key, value in state.items()}
        for name, state in before["processes"].items()
    }


def soak(minutes: float) -> dict[str, Any]:
    """Load a server for this many minutes; returns its state after the first part and at the end, and its growth."""
    endings: Counter[str] = Counter()
    samples: list[dict[str, Any]] = []
    begun = time.monotonic()

    async def load(server: Server, folder: Path, seconds: float, first: int) -> None:
        until = time.monotonic() + seconds
        watcher = asyncio.create_task(_watch(server, begun, samples))
        clients = (_client(server, first + i, until, endings) for i in range(CLIENTS))
        await asyncio.gather(_reload_adapters(server, folder, until, endings), *clients)
        watcher.cancel()

    checkpoint = resolve_checkpoint(MODEL, default_cache_dir(), lambda stage, _: print(stage, file=sys.stderr))
    with tempfile.TemporaryDirectory() as work:
        folders = {name: Path(work) / name for name in (*ADAPTERS, "three")}
        for seed, folder in enumerate(folders.values()):
            write_adapter(checkpoint, folder, seed)
        settings = {
            "engine__lora_modules": ",".join(f"{name}={folders[name]}" for name in ADAPTERS),
            "engine__allow_runtime_lora": True,
            "engine__kv_cache_bytes": KV_CACHE_BYTES,
        }
        with serving(**settings) as server:
            asyncio.run(load(server, folders["three"], WARM * 60 * minutes, 0))
            asyncio.run(_fill_grammars(server, endings))
            for _ in range(2):
                asyncio.run(_peak(server, endings))
            warm = _idle(server)
            asyncio.run(load(server, folders["three"], (1 - WARM) * 60 * minutes, CLIENTS))
            end = _idle(server)
            counted = {name: server.metric(f"nf4_{name}_total") for name in ("engine_restarts", "num_preemptions")}
    growth = _growth(warm, end)
    clean = not end["cache_in_use"] and not end["running"] and not counted["engine_restarts"]
    expected = {"HTTP 200", "left", "adapter HTTP 200 200"}
    return {
        "minutes": minutes,
        "endings": dict(endings),
        **counted,
        "warm": warm,
        "end": end,
        "growth": growth,
        "samples": samples,
        "kept": clean
        and max(value for process in growth.values() for value in process.values()) <= MOST_GROWTH
        and set(endings) <= expected,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the load and write the result; returns 1 where something has leaked."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    found = {**soak(options.minutes), "device": cpu_name(), "cores": cores(), "versions": versions()}
    print(json.dumps(found, indent=2))
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
