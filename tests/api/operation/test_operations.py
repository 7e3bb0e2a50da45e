"""GET /health, /metrics, /v1/models, and the headers of every answer."""

from __future__ import annotations

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import MODEL, chat_body, metric


def test_health(http: httpx.Client) -> None:
    answer = http.get("/health")
    assert answer.status_code == 200
    document = answer.json()
    assert document["status"] == "ready"
    assert document["model"] == MODEL
    assert document["device"]
    assert document["kernels"]
    assert document["max_model_len"] > 1000
    assert document["engine_restarts"] == 0


def test_head_is_answered_wherever_get_is(http: httpx.Client) -> None:
    for path in ("/health", "/ping", "/version", "/metrics", "/v1/models", "/openapi.json", "/", "/docs"):
        head, whole = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert (
            head.headers["content-type"] == whole.headers["content-type"] if "content-type" in whole.headers else True
        )
        assert path == "/metrics" or head.headers["content-length"] == whole.headers["content-length"]
        assert http.get("/ping").status_code == 200, "the connection goes on"
    assert http.head("/v1/models/nowhere").status_code == 404
    assert http.head("/v1/chat/completions").status_code == 405


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_unknown_model(http: httpx.Client) -> None:
    answer = http.get("/v1/models/a/b")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_server_timing_of_a_whole_answer(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=chat_body(timings=True, n=2))
    parts = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(parts) == ["queue", "prefill", "decode", "dequant", "linear"]
    timings = [choice["timings"] for choice in answer.json()["choices"]]
    linear = sum(t["linear_prefill"] + t["linear_decode"] for t in timings)
    assert float(parts["linear"]) > 0
    assert abs(float(parts["linear"]) - 1000 * linear) < 0.01
    assert abs(float(parts["prefill"]) - 1000 * max(t["prefill"] for t in timings)) < 0.01
    assert "server-timing" not in http.get("/health").headers


def test_request_id_goes_through_or_is_made(http: httpx.Client) -> None:
    assert http.get("/health", headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = [http.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    odd = http.get("/health", headers={"X-Request-ID": "x" * 500}).headers["x-request-id"]
    assert len(odd) < 100


def test_metrics_account_for_a_request(http: httpx.Client) -> None:
    before = {name: metric(http, name) for name in ("nf4_generation_tokens_total", "nf4_prompt_tokens_total")}
    first = metric(http, "nf4_time_to_first_token_seconds_count")
    lengths = metric(http, "nf4_request_success_total", finished_reason="length")
    usage = http.post("/v1/chat/completions", json=chat_body(max_tokens=3)).json()["usage"]
    assert metric(http, "nf4_generation_tokens_total") - before["nf4_generation_tokens_total"] == 3
    assert metric(http, "nf4_prompt_tokens_total") - before["nf4_prompt_tokens_total"] == usage["prompt_tokens"]
    assert metric(http, "nf4_time_to_first_token_seconds_count") == first + 1
    assert metric(http, "nf4_request_success_total", finished_reason="length") == lengths + 1
    assert metric(http, "nf4_engine_up") == 1
    assert metric(http, "nf4_cache_config_info", block_size="16", enable_prefix_caching="True") == 1
    assert metric(http, "nf4_num_requests_running") == 0
    for phase in ("prefill", "decode"):
        assert metric(http, "nf4_request_dequant_seconds_count", phase=phase) > 0
        assert metric(http, "nf4_request_linear_seconds_count", phase=phase) > 0


def test_answers_to_a_prompt_are_counted_prompt_by_prompt(http: httpx.Client) -> None:
    names = ("nf4_request_params_n_count", "nf4_request_params_n_sum", "nf4_request_max_num_generation_tokens_sum")
    before = [metric(http, name) for name in names]
    body = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "max_tokens": 3, "ignore_eos": True, "temperature": 1}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert [metric(http, name) - was for name, was in zip(names, before, strict=True)] == [2, 4, 6]


def test_rejections_and_answers_are_counted(http: httpx.Client) -> None:
    labels = {"route": "/v1/chat/completions", "status": "400", "method": "POST"}
    answers, unknown = metric(http, "nf4_http_requests_total", **labels), "unsupported_parameter"
    rejections = metric(http, "nf4_request_rejections_total", reason=unknown)
    http.post("/v1/chat/completions", json=chat_body(logits_processors=["x"]))
    assert metric(http, "nf4_http_requests_total", **labels) == answers + 1
    assert metric(http, "nf4_request_rejections_total", reason=unknown) == rejections + 1


def test_paths_of_clients_do_not_become_labels(http: httpx.Client) -> None:
    http.get("/some/random/path")
    http.request("BREW", "/health")
    text = http.get("/metrics").text
    assert "random" not in text
    assert "BREW" not in text


def test_exposition_formats(http: httpx.Client) -> None:
    plain = http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(plain.text)}
    assert families["nf4_inter_token_latency_seconds"].type == "histogram"
    assert all(family.documentation for family in families.values())
    openmetrics = http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.text.endswith("# EOF\n")


def test_adapters_are_not_loaded_at_run_time_unless_allowed(http: httpx.Client) -> None:
    for path, body in (("load", {"lora_name": "a", "lora_path": "/a"}), ("unload", {"lora_name": "a"})):
        refused = http.post(f"/v1/{path}_lora_adapter", json=body)
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "runtime_lora_disabled"
