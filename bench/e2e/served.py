"""The real server in a process of its own on dummy weights, and what its clients see under load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.load.client import Load
from bench.load.processes import run_in_processes
from bench.load.summary import summarize
from bench.processes import free_port, wait_until_ready

READY_S = 1200.0


@contextmanager
def serving(config: Path, settings: dict[str, Any]) -> Iterator[str]:
    """A server of the model that config describes, with these engine settings; gives its base URL once it is ready.

    RuntimeError when it does not start.
    """
    with tempfile.TemporaryDirectory() as work, running(write_folder(Path(work), config), settings) as url:
        yield url


@contextmanager
def running(folder: Path, settings: dict[str, Any], **variables: str) -> Iterator[str]:
    """The server of write_folder()'s model, with these variables in its environment; otherwise as serving()."""
    port = free_port()
    flags = {"--model": str(folder), "--served-model-name": folder.name, "--port": str(port), "--max-queue": "4096"}
    own = {f"NF4_ENGINE__{key.upper()}": str(value) for key, value in settings.items()}
    server = subprocess.Popen(
        [sys.executable, "-m", "server", *(part for flag in flags.items() for part in flag)],
        env={**os.environ, "NF4_ENGINE__LOAD_FORMAT": "dummy", **own, **variables},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(server, f"{url}/health", READY_S)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def write_folder(work: Path, config: Path) -> Path:
    """A folder of a model without weights in work. Its tokenizer has a word for each id, so that any ids are text."""
    folder = work / config.parent.name
    folder.mkdir()
    shutil.copy(config, folder / "config.json")
    # The server looks for weight files before the engine starts, which makes weights of its own.
    save_file({}, folder / "model.safetensors")
    _write_tokenizer(folder, json.loads(config.read_text())["vocab_size"])
    return folder


def under_load(
    url: str, model: str, requests: int, rate: float | None = None, concurrency: int = 1, seed: int = 0
) -> dict[str, Any]:
    """A row's figures: output tokens per second, TTFT and ITL of requests of 128 tokens in and 128 out.

    With a rate, in requests per second, requests arrive at random; without one each of `concurrency` clients sends its next
    request when its last one has ended. Another seed makes other prompts, none of which is in the prefix cache.
    """
    lengths = (128, 128)
    load = Load(url, model, requests, concurrency, rate, lengths, lengths, seed=seed)
    # The other half of the cores is left to the server.
    summary = summarize(run_in_processes(load, min(8, (os.cpu_count() or 2) // 2)))
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
