"""A server under load and a Prometheus that scrapes it, which the check of the dashboards asks."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from bench.embedded_server import MODEL, serving
from bench.load.client import Load, run_load
from bench.processes import free_port, wait_until_ready

SOURCE = Path(__file__).resolve().parents[1] / "docker" / "prometheus"
QUEUE = 4
READY_S = 30.0


@contextmanager
def scraped(server_url: str) -> Iterator[str]:
    """A Prometheus with our alert rules that scrapes a server every second; its URL. The program must be installed.

    Raises RuntimeError when it does not start, FileNotFoundError where it is not installed.
    """
    with tempfile.TemporaryDirectory() as work:
        config = yaml.safe_load((SOURCE / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(SOURCE / "alerts.yaml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [server_url.removeprefix("http://")]}]
        (Path(work) / "prometheus.yaml").write_text(yaml.safe_dump(config))
        port = free_port()
        command = ["prometheus", f"--config.file={work}/prometheus.yaml", f"--storage.tsdb.path={work}/data"]
        listen = f"--web.listen-address=127.0.0.1:{port}"
        process = subprocess.Popen([*command, listen], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(process, f"{url}/-/ready", READY_S)
            yield url
        finally:
            process.terminate()
            process.communicate(timeout=30)


@contextmanager
def loaded(seconds: float) -> Iterator[str]:
    """A Prometheus that has scraped an overloaded server for this many seconds; its URL. Raises what scraped() raises."""
    with serving(http__max_queue=QUEUE) as server, scraped(server.url) as prometheus:
        end = time.monotonic() + seconds
        seed = 0
        while time.monotonic() < end:
            seed += 1
            asyncio.run(
                run_load(
                    Load(server.url, MODEL, 12, 3 * QUEUE, prompt_tokens=(16, 64), answer_tokens=(4, 16), seed=seed)
                )
            )
        yield prometheus
