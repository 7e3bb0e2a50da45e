"""The real server in a process of its own on dummy weights, and what its clients see under load."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.load import Load, run_load, summarize

READY_S = 1200.0


@contextmanager
def serving(config: Path, settings: dict[str, Any]) -> Iterator[str]:
    """A server of the model that config describes, with these engine settings; gives its base URL once it is ready.

    Its tokenizer has a word for each token id, so that any sequence of ids is text. RuntimeError when it does not start.
    """
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / config.parent.name
        folder.mkdir()
        shutil.copy(config, folder / "config.json")
        # The server looks at the weight files before the engine is asked, which makes its own.
        save_file({}, folder / "model.safetensors")
        _write_tokenizer(folder, json.loads(config.read_text())["vocab_size"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        variables = {f"NF4_ENGINE__{key.upper()}": str(value) for key, value in settings.items()}
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "server",
                "--model",
                str(folder),
                "--served-model-name",
                folder.name,
                "--port",
                str(port),
                "--max-queue",
                "4096",
            ],
            env={**os.environ, "NF4_ENGINE__LOAD_FORMAT": "dummy", **variables},
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(server, url)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def under_load(
    url: str, model: str, requests: int, rate: float | None = None, concurrency: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Output tokens per second, TTFT and ITL of requests of 128 tokens in and 128 out: a row's figures.

    rate: requests per second, arriving at random; None: so many clients at once. Another seed asks for other answers, none
    of which is in the prefix cache.
    """
    lengths = (128, 128)
    load = Load(url, model, requests, concurrency, rate, lengths, lengths, seed=seed)
    summary = summarize(asyncio.run(run_load(load)))
    if summary["completed"] != requests:
        raise RuntimeError(f"{summary['completed']} of {requests} requests were answered: {summary['errors']}")
    return {"ours_tok_s": summary["completion_tokens_per_s"], "ttft_s": summary["ttft_s"], "itl_s": summary["itl_s"]}


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(vocabulary)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready after {READY_S:.0f} s")
