"""Time until two replicas are there again after one was killed, or the node that one was on, while clients stream.

Three nodes of a Ray on this machine. A start of a replica is some 15 s of processor time, so other work slows it down.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from bench.processes import free_port
from bench.ray_serve.clients import Clients
from bench.ray_serve.cluster import ENVIRONMENT, application, running, until
from bench.ray_serve.processor_time import seconds_by_kind, spent

KILLS = 3
CLIENTS = 4
TOKENS = 48
SETTLING_S = 20.0
"""For a standby process, and for what Ray starts on a new node."""
REPLICAS = 2
PROMISED_S = 30.0


def measure() -> dict[str, Any]:
    """Seconds from each loss until it was noticed, and until all replicas ran again; how requests ended."""
    os.environ.update(ENVIRONMENT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    port = free_port()
    losses = []
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        with application(config={"engine": {"kv_cache_bytes": 1 << 27}}, replicas=REPLICAS):
            clients = Clients(f"http://127.0.0.1:{port}", TOKENS)
            clients.set_count(CLIENTS)
            try:
                losses += [_lose("replica", _kill_replica) for _ in range(KILLS)]
                cluster.add_node(num_cpus=2)
                time.sleep(SETTLING_S)
                losses.append(_lose("node", lambda: _remove_node(cluster)))
            finally:
                ends = clients.stop()
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {"nodes": 3, "replicas": REPLICAS, "clients": CLIENTS, "losses": losses, "ends": dict(ends)}


def _lose(what: str, act: Callable[[], None]) -> dict[str, Any]:
    """cores_had: what all of Ray's processes had of this machine's cores after it was noticed, other engines included."""
    load = os.getloadavg()[0]
    began = time.monotonic()
    act()
    until(lambda: running() < REPLICAS)
    noticed = time.monotonic() - began
    before = seconds_by_kind()  # without the processes that were lost
    until(lambda: running() == REPLICAS)
    back = time.monotonic() - began
    used = sum(spent(before, seconds_by_kind()).values()) / (back - noticed)
    row: dict[str, Any] = {
        "lost": what,
        "noticed_s": round(noticed, 1),
        "back_s": round(back, 1),
        "load_average_before": load,
    }
    row["cores_had"] = round(used, 2)
    print(row, file=sys.stderr, flush=True)
    time.sleep(SETTLING_S)
    return row


def _engines() -> dict[str, str]:
    """Names of the engines' actors that are alive with the nodes that they are on."""
    actors = ray._private.state.actors()
    named = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if "#Engine#" in each["name"]]
    found = {name: actors[ray.get_actor(name, namespace="serve")._actor_id.hex()] for name in named}
    return {name: actor["Address"]["NodeID"] for name, actor in found.items() if actor["State"] == "ALIVE"}


def _kill_replica() -> None:
    ray.kill(ray.get_actor(next(iter(_engines())), namespace="serve"), no_restart=True)


def _remove_node(cluster: Cluster) -> None:
    node = next(node for node in cluster.worker_nodes if node.node_id in _engines().values())
    cluster.remove_node(node, allow_graceful=False)


def failures(result: dict[str, Any]) -> list[str]:
    """Broken promises: a loss after which replicas were not back in time, or a request that hung."""
    late = [loss for loss in result["losses"] if loss["back_s"] > PROMISED_S]
    return [f"after a {loss['lost']} was lost, replicas were back after {loss['back_s']} s" for loss in late]
