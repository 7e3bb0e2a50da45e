"""A Ray on this machine, our application on it, and what can be seen of its replicas."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import ray
from ray import serve

from bench.processes import free_port
from server.ray_serve.application import build

# As docs/scaling.md has Ray started. By its default replicas yield to whatever else the machine does, its HTTP proxy takes
# each piece of an answer as a task's result, and a node that is gone counts as there for 15 s, so that replicas go there.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
NAME = "nf4"
PATIENCE_S = 240.0


@contextmanager
def ray_serve(cpus: int = 8) -> Iterator[str]:
    """Base URL of Ray's proxy. cpus are what Ray believes to have, as many as replicas ask for, whatever the machine has."""
    port = free_port()
    os.environ.update(ENVIRONMENT)
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


@contextmanager
def application(**args: Any) -> Iterator[None]:
    """Our application with these args, from the time when its replicas can answer; it is gone afterwards."""
    serve.run(build(args), name=NAME, route_prefix="/")
    try:
        yield
    finally:
        serve.delete(NAME)


def until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> float:
    """Seconds until condition holds. Raises TimeoutError."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"it did not happen within {limit_s:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - began


def running() -> int:
    """Number of replicas of the engine that run."""
    deployments = serve.status().applications[NAME].deployments
    return int(deployments["Engine"].replica_states.get("RUNNING", 0)) if "Engine" in deployments else 0


def samples(url: str, name: str) -> dict[str, float]:
    """A metric's value by replica."""
    text = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
    lines = re.findall(rf'^{name}{{.*replica="(\w+)".*}} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in lines}
