"""Command line: nf4-server [serve] --config config.yaml --model ... --port ..."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from server import __version__
from server.config import Config, ConfigError
from server.config.sources import load_config
from server.objects import lasting_objects

if TYPE_CHECKING:
    from server.api_processes.place import Place

_FLAGS: dict[str, tuple[str, type, str]] = {
    "--model": ("model", str, "a local folder, a hub id, or smollm2-135m-instruct for the embedded model"),
    "--served-model-name": ("served_model_name", str, "names clients may use for the model, separated by commas"),
    "--cache-dir": ("cache_dir", str, "where converted checkpoints are kept"),
    "--generation-config": ("generation_config", str, "auto (the model's own sampling parameters) or none"),
    "--host": ("http.host", str, "address to listen on"),
    "--port": ("http.port", int, "port to listen on; 0 takes a free one"),
    "--max-queue": ("http.max_queue", int, "requests accepted and not yet finished; beyond it, 429"),
    "--device": ("engine.device", str, "auto, cpu or cuda"),
    "--dtype": ("engine.dtype", str, "auto, float32, bfloat16 or float16"),
    "--max-model-len": ("engine.max_model_len", int, "longest prompt + answer in tokens"),
    "--max-num-seqs": ("engine.max_num_seqs", int, "sequences in one batch"),
    "--kv-cache-bytes": ("engine.kv_cache_bytes", int, "memory for the KV cache"),
    "--threads": ("engine.threads", int, "CPU threads"),
    "--log-level": ("log_level", str, "debug, info, warning or error"),
    "--log-format": ("log_format", str, "console or json"),
    "--otlp-traces-endpoint": ("otlp_traces_endpoint", str, "where OpenTelemetry spans go"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nf4-server", description="OpenAI-compatible server for bitsandbytes NF4 models."
    )
    parser.add_argument("command", nargs="?", choices=["serve"], default="serve", help="serve (the default)")
    parser.add_argument("--version", action="version", version=f"nf4-server {__version__}")
    parser.add_argument("--config", type=Path, help="configuration file; flags and NF4_* variables win over it")
    for flag, (key, kind, text) in _FLAGS.items():
        parser.add_argument(flag, dest=key, type=kind, help=text)
    return parser


def _configuration(arguments: Sequence[str] | None) -> Config:
    parsed = vars(_parser().parse_args(arguments))
    overrides = {key: parsed[key] for key, _, _ in _FLAGS.values()}
    return load_config(parsed["config"], overrides)


def _serve_in_processes(config: Config) -> int:
    from server.api_processes.place import new_place

    if sys.platform != "linux":
        print("error: http.api_processes: more than 1 needs Linux, which divides connections evenly", file=sys.stderr)
        return 1
    with new_place() as place:
        return _serve(config, place)


def _serve(config: Config, place: Place | None = None) -> int:
    """Call serving.serve(), which is imported here: with several processes prometheus_client has to see their place."""
    with lasting_objects():
        from server.serving import serve
    return serve(config, place)


def keep_torch_out() -> None:
    """This process only tokenizes; without torch it starts 1.2 s sooner and takes 200 MB less.

    transformers works without torch, but imports it wherever it is installed. The engine is a process of its own.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit status."""
    try:
        config = _configuration(arguments)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    keep_torch_out()
    from server.logs import set_up_logging

    set_up_logging(config.log_level, config.log_format)
    if config.http.api_processes == 1:
        return _serve(config)
    return _serve_in_processes(config)
