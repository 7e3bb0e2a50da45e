"""Three nodes of a real Ray on one machine: a replica, a node and the configuration go while requests stream.

`make test-ray` runs it; too slow for `make test`. The model is small and random: what is tested is who answers, not what.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from bench.processes import free_port
from server.ray_serve.application import build
from tests.api.conftest import chat_body, user
from tests.clients.random_model import write_random_model
from tests.conftest import until

PATIENCE_S = 240.0
TOKENS = 48
REQUESTS = 200
TOGETHER = 16
# Errors that a request may end with when the replica that has it is taken away.
KNOWN = {"replica_lost", "no_replica", "engine_error", "engine_unavailable", "shutting_down", "queue_full"}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def model(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Configuration of a replica."""
    path = write_random_model(tmp_path_factory.mktemp("random") / "model", embedded_folder)
    config = json.loads(path.read_text())
    config["engine"]["kv_cache_bytes"] = 64 << 20
    return config


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that runs no engine, and two nodes that may have two each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    """Base URL of the head's proxy."""
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    return f"http://127.0.0.1:{port}"


def run(model: dict[str, Any], *, blocking: bool = True, **options: Any) -> None:
    application = build({"config": model, "cpus": 1, **options})
    serve._run(application, name="nf4", route_prefix="/", _blocking=blocking)


def running() -> list[str]:
    """Replicas of the engine that run."""
    details = serve.status().applications["nf4"].deployments["Engine"].replica_states
    return ["RUNNING"] * details.get("RUNNING", 0)


def replicas(deployment: str = "Engine") -> dict[str, str]:
    """Names of a deployment's actors that are alive with the nodes that they are on."""
    actors = ray._private.state.actors()
    every = ray.util.list_named_actors(all_namespaces=True)
    named = [each["name"] for each in every if f"#{deployment}#" in each["name"]]
    found = {name: actors[ray.get_actor(name, namespace="serve")._actor_id.hex()] for name in named}
    return {name: actor["Address"]["NodeID"] for name, actor in found.items() if actor["State"] == "ALIVE"}


def ask(url: str, number: int) -> str:
    """End of one streaming request: "whole", or its error's code. Everything else fails the test."""
    body = chat_body(messages=user(f"Write about {number * 7919}."), max_tokens=TOKENS, stream=True, ignore_eos=True)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S, trust_env=False) as answer:
        if answer.status_code != 200:
            text = answer.read().decode()
            error = json.loads(text)["error"]
            assert set(error) == {"message", "type", "param", "code"}, text
            assert int(answer.headers["retry-after"]) > 0, text
            return str(error["code"])
        lines = [line for line in answer.iter_lines() if line]
    if lines[-1] == "data: [DONE]":
        return "whole"
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}, lines[-1]
    return str(error["code"])


class Load:
    """Clients that ask one request after another until they are told to stop, and at least REQUESTS in all."""

    def __init__(self, url: str) -> None:
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(TOGETHER)
        self._clients: list[Future[list[str]]] = [self._pool.submit(self._client, url) for _ in range(TOGETHER)]

    def _client(self, url: str) -> list[str]:
        ends = []
        while (number := next(self._numbers)) < REQUESTS or not self._stop.is_set():
            ends.append(ask(url, number))
            if ends[-1] != "whole":
                time.sleep(1)  # as Retry-After says, more or less
        return ends

    def stop(self) -> Counter[str]:
        """Ends of all; what a request raised is raised."""
        self._stop.set()
        return Counter(end for client in self._clients for end in client.result(PATIENCE_S))


def test_a_replica_a_node_and_an_update(cluster: Cluster, url: str, model: dict[str, Any]) -> None:
    """200 streaming requests: each ends whole or with an error in OpenAI's shape, none hangs, replicas are back."""
    run(model, replicas=2)
    until(lambda: len(running()) == 2, PATIENCE_S)
    assert set(replicas("Ingress").values()) == {cluster.head_node.node_id}
    load = Load(url)
    time.sleep(5)
    ray.kill(ray.get_actor(next(iter(replicas())), namespace="serve"), no_restart=True)
    killed = time.monotonic()
    until(lambda: len(running()) < 2, PATIENCE_S)
    until(lambda: len(running()) == 2, PATIENCE_S)
    print(f"a replica was back after {time.monotonic() - killed:.1f} s")
    node = next(node for node in cluster.worker_nodes if node.node_id in replicas().values())
    cluster.add_node(num_cpus=2)
    time.sleep(10)  # what Ray itself starts on a new node takes some seconds of a core
    cluster.remove_node(node, allow_graceful=False)
    removed = time.monotonic()
    until(lambda: len(running()) < 2, PATIENCE_S)
    until(lambda: len(running()) == 2, PATIENCE_S)
    print(f"replicas were back {time.monotonic() - removed:.1f} s after a node was lost")
    changed = {**model, "http": {"max_queue": 128}}
    run(changed, replicas=2)
    ends = load.stop()
    print(dict(ends))
    assert set(ends) <= {"whole"} | KNOWN
    assert sum(ends.values()) >= REQUESTS
    assert ends["whole"] > 0.7 * sum(ends.values())
    assert ask(url, 1) == "whole"
