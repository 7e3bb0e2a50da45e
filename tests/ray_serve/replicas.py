"""Two replicas of the embedded model on a real Ray, asked over HTTP. `make test-ray` runs it; too slow for `make test`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import torch
from ray import serve

from bench.processes import free_port
from bench.ray_serve import affinity
from server.config import ConfigError
from server.ray_serve.application import build
from tests.adapters import ALL_PROJECTIONS, save_adapter
from tests.api.conftest import MODEL, chat_body, user
from tests.conftest import until
from tests.reference import Reference

CHAT = "/v1/chat/completions"
# What one replica may take to come up on a machine that is busy with everything else.
PATIENCE_S = 240.0
MAX_BODY_BYTES = 6_000_000
ADAPTER = "sql"
CONFIG: dict[str, Any] = {"engine": {"kv_cache_bytes": 1 << 28}, "http": {"max_body_bytes": MAX_BODY_BYTES}}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(embedded_folder: Path) -> Iterator[str]:
    """Base URL of Ray's proxy."""
    assert embedded_folder
    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def http(cluster: str, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(reference.model, folder, 1, 0.03, r=16, lora_alpha=16, target_modules=ALL_PROJECTIONS)
    engine = CONFIG["engine"] | {"lora_modules": [{"name": ADAPTER, "path": str(folder)}]}
    serve.run(
        build({"config": CONFIG | {"engine": engine}, "replicas": 2, "imbalance": 4}), name="nf4", route_prefix="/"
    )
    with httpx.Client(base_url=cluster, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


def samples(http: httpx.Client, name: str) -> dict[str, float]:
    """A metric's value by replica."""
    lines = re.findall(rf'^{name}{{.*replica="(\w+)".*}} (\S+)$', http.get("/metrics").text, re.MULTILINE)
    return {replica: float(value) for replica, value in lines}


def stream(http: httpx.Client, content: str, max_tokens: int = 24) -> list[str]:
    """The answer's lines: a whole stream, one that ends with an error, or one line with status and error."""
    body = chat_body(messages=user(content), max_tokens=max_tokens, stream=True, ignore_eos=True)
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{http.base_url}{CHAT}", json=body, timeout=PATIENCE_S, trust_env=False) as answer:
        if answer.status_code != 200:
            assert int(answer.headers["retry-after"]) > 0
            return [f"data: {answer.read().decode()}"]
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert len(answer.headers.get_list("x-request-id")) == 1
        return [line for line in answer.iter_lines() if line]


def whole(lines: list[str]) -> bool:
    """Whether a stream ended as it should; otherwise it has to end with an error in OpenAI's shape."""
    if lines[-1] == "data: [DONE]":
        # Not the number of events: those of a busy machine have several tokens.
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] > 20
        assert '"finish_reason":"length"' in lines[-3]
        return True
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] in ("replica_lost", "no_replica", "engine_error", "shutting_down")
    return False


def test_affinity_beside_a_random_choice(cluster: str) -> None:
    """Twice the cached prompt tokens; here, before another application has the route."""
    assert affinity.failures(affinity.measure_on(cluster)) == []


def test_streams_go_through_both_replicas(http: httpx.Client) -> None:
    assert http.get("/health").json()["status"] == "ready"
    before = samples(http, "nf4_prompt_tokens_total")
    assert len(before) == 2
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: stream(http, f"Tell me about the number {i * 7919}."), range(12)))
    assert all(whole(lines) for lines in answers)
    after = samples(http, "nf4_prompt_tokens_total")
    assert all(after[replica] > before[replica] for replica in after)


def test_every_replica_has_the_adapter(http: httpx.Client) -> None:
    listed = {model["id"]: model["parent"] for model in http.get("/v1/models").json()["data"]}
    assert listed == {MODEL: None, ADAPTER: MODEL}
    before = samples(http, "nf4_prompt_tokens_total")

    def answer(model: str) -> str:
        document = http.post(CHAT, json=chat_body(model=model, max_tokens=12)).raise_for_status().json()
        assert document["model"] == model
        return str(document["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(12) as pool:
        answers = set(pool.map(answer, [ADAPTER] * 12))
    after = samples(http, "nf4_prompt_tokens_total")
    assert all(after[replica] > before[replica] for replica in after)
    assert len(answers) == 1
    assert answers != {answer(MODEL)}


def test_requests_that_come_together_are_divided(http: httpx.Client) -> None:
    """Of as many as two replicas have at a time neither has more than the other, but for one that came in between."""
    name = "nf4_prompt_tokens_total"
    before = samples(http, name)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: stream(http, f"Count to {i * 7919}.", max_tokens=48), range(12)))
    assert all(whole(lines) for lines in answers)
    shares = [value - before[replica] for replica, value in samples(http, name).items()]
    assert max(shares) < 1.6 * min(shares)


def test_a_shared_beginning_goes_where_it_is(http: httpx.Client) -> None:
    beginning = " ".join(f"Rule {i}: never mention {i * 31} in an answer." for i in range(30))
    before = samples(http, "nf4_prompt_tokens_cached_total")
    tokens = samples(http, "nf4_prompt_tokens_total")
    for i in range(6):
        assert whole(stream(http, f"{beginning} {i}"))
    gained = {name: value - before[name] for name, value in samples(http, "nf4_prompt_tokens_cached_total").items()}
    served = [name for name, value in samples(http, "nf4_prompt_tokens_total").items() if value > tokens[name]]
    assert len(served) == 1
    # All but the first find the rules in the cache.
    assert gained[served[0]] > 5 * 200


def test_errors_are_the_server_s_own(http: httpx.Client) -> None:
    for content, status, code in (
        (b"{", 400, "invalid_json"),
        (b"{" + b" " * (MAX_BODY_BYTES - 1), 400, "invalid_json"),  # more than a message of gRPC's may have by default
        (json.dumps(chat_body(model="other")).encode(), 404, "model_not_found"),
        (json.dumps(chat_body(messages=user("a" * MAX_BODY_BYTES))).encode(), 413, "request_too_large"),
    ):
        answer = http.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    models = http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == [MODEL, ADAPTER]


def test_a_client_that_leaves_ends_its_request(http: httpx.Client) -> None:
    body = chat_body(messages=user("Count."), max_tokens=2000, stream=True, ignore_eos=True)
    with httpx.stream("POST", f"{http.base_url}{CHAT}", json=body, timeout=PATIENCE_S, trust_env=False) as answer:
        next(answer.iter_lines())
        assert sum(samples(http, "nf4_num_requests_running").values()) == 1
    until(lambda: sum(samples(http, "nf4_num_requests_running").values()) == 0, PATIENCE_S)


def test_a_killed_replica(http: httpx.Client) -> None:
    """Every request ends, whole or with an error; the other replica goes on; a new one comes."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if "#Engine#" in each["name"]]
    assert len(names) == 2
    victim = ray.get_actor(names[0], namespace="serve")
    begun = threading.Event()

    def ask(i: int) -> list[str]:
        if i == 8:
            begun.set()
        return stream(http, f"Write about {i * 104729}.", max_tokens=48)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, i) for i in range(32)]
        assert begun.wait(PATIENCE_S)
        ray.kill(victim, no_restart=True)
        ended = [whole(answer.result(PATIENCE_S)) for answer in answers]
    assert sum(ended) >= 16
    dead = names[0].rpartition("#")[2]
    until(lambda: len(running := samples(http, "nf4_engine_up")) == 2 and dead not in running, PATIENCE_S)
    assert whole(stream(http, "Are you there?"))


def test_a_rolling_update(http: httpx.Client) -> None:
    """Replicas of another configuration take over while streams run: none is lost."""
    old = set(samples(http, "nf4_engine_up"))
    changed = {**CONFIG, "http": {**CONFIG["http"], "max_queue": 128}}
    stop = threading.Event()

    def ask(i: int) -> int:
        count = 0
        while not stop.is_set():
            assert whole(stream(http, f"Write about {i * 7919 + count}.", max_tokens=32))
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, i) for i in range(4)]
        try:
            serve.run(build({"config": changed, "replicas": 2, "imbalance": 4}), name="nf4", route_prefix="/")
            until(lambda: len(new := set(samples(http, "nf4_engine_up"))) == 2 and not new & old, PATIENCE_S)
        finally:
            stop.set()
        assert all(each.result(PATIENCE_S) for each in asking)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"gpu": 1}, "args.gpu"),
        ({"replicas": 0}, "args.replicas"),
        ({"replicas": 2, "max_replicas": 1}, "args.max_replicas"),
        ({"config": {"engine": {"device": "abacus"}}}, "args.config.engine.device"),
        ({"config": {"http": {"api_processes": 2}}}, "args.config.http.api_processes"),
        ({"config": {"engine": {"allow_runtime_lora": True}}}, "args.config.engine.allow_runtime_lora"),
    ],
)
def test_bad_arguments_are_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}: .*$"):
        build(args)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model": "/nowhere"}, "/nowhere: no such folder"),
        ({"engine": {"device": "cuda"}}, "engine.device is cuda, but no GPU can be used: "),
        ({"engine": {"kv_cache_bytes": 1 << 24, "max_model_len": 8192}}, "the KV cache of 16 MiB holds"),
    ],
)
def test_a_replica_that_cannot_start(http: httpx.Client, config: dict[str, Any], reason: str) -> None:
    """The status says why in one line, and the other application goes on."""
    if reason.startswith("engine.device") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    serve._run(build({"config": config, "cpus": 0.5}), name="bad", route_prefix="/bad", _blocking=False)
    try:

        def said() -> list[str]:
            deployments = serve.status().applications["bad"].deployments
            message = deployments["Engine"].message if "Engine" in deployments else ""
            return [line for line in message.splitlines() if reason in line]

        until(lambda: said() != [], PATIENCE_S)
        assert said()[0].startswith("RuntimeError: ")
        refused = http.get("/bad/health")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        assert int(refused.headers["retry-after"]) > 0
        assert whole(stream(http, "Still there?"))
    finally:
        serve.delete("bad")
