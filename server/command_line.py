"""The commands nf4-server [serve] [MODEL] [options], from its configuration to a server, and nf4-server fits."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from server.config import Config, ConfigError
from server.config.flags import parse
from server.config.section import parse_bytes
from server.config.sources import load_config
from server.engine.supervisor.child import Child, start_child
from server.objects import lasting_objects

if TYPE_CHECKING:
    from server.api_processes.place import Place

DEFAULT_FILE = Path("config.yaml")


def _configuration(arguments: Sequence[str] | None) -> Config:
    path, overrides, flags = parse(arguments)
    if path is None and DEFAULT_FILE.is_file():
        path = DEFAULT_FILE
    return load_config(path, overrides, flags)


def _serve_in_processes(config: Config) -> int:
    from server.api_processes.place import new_place

    if sys.platform != "linux":
        print("error: http.api_processes: more than 1 needs Linux, which divides connections evenly", file=sys.stderr)
        return 1
    with new_place() as place:
        return _serve(config, place)


def _serve(config: Config, place: Place | None = None) -> int:
    """Call serving.serve(), which is imported here: with several processes prometheus_client has to see their place.

    The engine's process starts first, and imports at the same time as this one, which takes a third as long.
    """
    child: Child | None = None
    with contextlib.suppress(OSError):  # the engine's client tries again, and says what is wrong
        child = start_child(config)
    with lasting_objects():
        from server.serving import serve
    return serve(config, child, place)


def keep_torch_out() -> None:
    """This process only tokenizes; without torch it starts 1.2 s sooner and takes 200 MB less.

    transformers works without torch, but imports it wherever it is installed. The engine is a process of its own.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def _fits(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu-memory")
    own, others = parser.parse_known_args(arguments)
    memory = parse_bytes(own.gpu_memory)
    try:
        if isinstance(memory, str):
            raise ConfigError(f"--gpu-memory: {memory!r} is no size such as 12GiB")
        config = _configuration(others)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    from server.logs import set_up_logging

    set_up_logging(config.log_level, config.log_format)
    from server.fits import fits

    return fits(config, memory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["fits"]:
        return _fits(given[1:])
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
