"""Metrics under vLLM's names: what routers read from a vLLM they read here."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from server.config import MetricsNames
from server.observability.metrics import Metrics
from server.observability.timeline import RequestTimeline
from server.observability.vllm_names import OURS, SHARED, THEIRS
from server.types import EngineReady, EngineStats, RequestOutput, StepOutputs

# (name, labels, value) as llm-d's endpoint picker looks for them.
PICKER_READS = [
    ("vllm:num_requests_waiting", {"engine": "0", "model_name": "m"}, 2.0),
    ("vllm:num_requests_running", {"engine": "0", "model_name": "m"}, 3.0),
    ("vllm:kv_cache_usage_perc", {"engine": "0", "model_name": "m"}, 0.25),
    (
        "vllm:cache_config_info",
        {"engine": "0", "block_size": "16", "num_gpu_blocks": "20", "enable_prefix_caching": "True"},
        1.0,
    ),
]


def used(names: MetricsNames) -> Metrics:
    metrics = Metrics("m", names)
    metrics.engine_ready(
        EngineReady(
            max_model_len=64, vocab_size=9, eos_token_ids=[1], block_size=16, num_blocks=20, device="cpu",
            dtype="float32", kernels="cpu",
        ),
        prefix_caching=True,
    )  # fmt: skip
    stats = EngineStats(
        running=3, waiting=2, kv_blocks_used=5, kv_blocks_total=20, lora_slots=4,
        running_adapters=["a", "b"], waiting_adapters=["c"], accepted_by_place=[1],
    )  # fmt: skip
    metrics.step_done(StepOutputs([], stats))
    timeline = RequestTimeline(prompt_tokens=7)
    metrics.tokens_received(timeline, RequestOutput("1", [5], num_cached_tokens=4))
    return metrics


def samples(metrics: Metrics, accept: str = "") -> dict[str, list[tuple[dict[str, str], float]]]:
    body, content_type = metrics.exposition(accept)
    assert content_type.startswith("text/plain; version=0.0.4")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parse(body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


# The second is what Prometheus 3 sends.
@pytest.mark.parametrize(
    "accept",
    ["", "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4"],
)
@pytest.mark.parametrize("names", ["vllm", "both"])
def test_what_an_endpoint_picker_reads(names: MetricsNames, accept: str) -> None:
    found = samples(used(names), accept)
    for name, labels, value in PICKER_READS:
        assert found[name] == [(labels, value)]
    ((labels, when),) = found["vllm:lora_requests_info"]
    assert labels == {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert when > 1.7e9
    # Counters and histograms keep what makes them such.
    assert found["vllm:prompt_tokens_total"] == [({"engine": "0", "model_name": "m"}, 7.0)]
    assert found["vllm:time_to_first_token_seconds_count"] == [({"engine": "0", "model_name": "m"}, 1.0)]
    assert {labels["le"] for labels, _ in found["vllm:time_to_first_token_seconds_bucket"]} >= {"0.5", "+Inf"}


def test_types_are_kept() -> None:
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", used("both").exposition("")[0].decode(), re.MULTILINE))
    renamed = {name: kind for name, kind in kinds.items() if name.startswith(THEIRS)}
    assert len(renamed) == len(SHARED)
    for name, kind in renamed.items():
        assert kinds[OURS + name.removeprefix(THEIRS)] == kind


def test_each_choice_gives_what_it_says() -> None:
    ours, theirs, both = (set(samples(used(names))) for names in ("nf4", "vllm", "both"))
    assert not any(name.startswith(THEIRS) for name in ours)
    assert ours | theirs == both
    # What vLLM does not have keeps its name.
    assert "nf4_engine_up" in theirs
    assert "nf4_num_requests_running" not in theirs
    assert len(theirs) == len(ours)


def test_all_shared_names_exist() -> None:
    """A metric that is renamed here must be renamed in SHARED, too."""
    existing = {family.name.removeprefix(OURS) for family in used("nf4").registry.collect()}
    assert existing >= SHARED
