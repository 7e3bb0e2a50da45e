"""The metrics' names, buckets and arithmetic."""

from __future__ import annotations

import re
import time
from pathlib import Path

from server.observability.engine_state import kind_and_variant
from server.observability.metrics import KERNEL_BUCKETS, TOKEN_BUCKETS, Metrics
from server.observability.timeline import RequestTimeline, server_timing
from server.types import EngineReady, EngineStats, RequestOutput, RequestTimings, StepOutputs

MODEL = {"model_name": "m"}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, MODEL | labels)


def test_two_steps_that_end_together_count_twice() -> None:
    metrics = Metrics("m")
    steps = [EngineStats(step_batch=batch, step_tokens=tokens, step_seconds=0.5) for batch, tokens in ((2, 2), (3, 40))]
    metrics.step_done(StepOutputs([], steps[1], before=steps[0]))
    metrics.step_done(StepOutputs([], EngineStats()))
    assert value(metrics, "nf4_engine_step_seconds_count") == 2
    assert value(metrics, "nf4_engine_step_seconds_sum") == 1.0
    assert value(metrics, "nf4_engine_step_batch_size_sum") == 5


def test_engine_state_is_read_when_scraped() -> None:
    metrics = Metrics("m")
    assert value(metrics, "nf4_engine_up") == 0
    stats = EngineStats(
        failed_steps={"request": 2, "engine": 1},
        running=3, waiting=2, kv_blocks_used=5, kv_blocks_total=20, preemptions=1, step_batch=3, step_tokens=40,
        step_seconds=0.002, dequant_seconds_total=1.5, linear_seconds_total=2.5,
        drafts=3, draft_tokens=9, accepted_by_place=[2, 1],
        images_computed=3, image_feature_hits=2, image_tower_seconds=0.25,
        prefix_cache_queries=10, prefix_cache_hits=4, graph_replays=7, device_memory_used=2**30,
        device_memory_total=2**31, nf4_weight_bytes=12, kernel_seconds={"cuda_rows": 1.0, "cuda_dequantize": 0.5},
    )  # fmt: skip
    metrics.step_done(StepOutputs([], stats))
    metrics.watch_engine(lambda: ("ready", 4))
    assert value(metrics, "nf4_num_requests_running") == 3
    assert value(metrics, "nf4_num_requests_waiting") == 2
    assert value(metrics, "nf4_kv_cache_usage_perc") == 0.25
    assert value(metrics, "nf4_num_preemptions_total") == 1
    assert value(metrics, "nf4_failed_steps_total", cause="request") == 2
    assert value(metrics, "nf4_failed_steps_total", cause="engine") == 1
    assert value(metrics, "nf4_engine_up") == 1
    assert value(metrics, "nf4_engine_restarts_total") == 4
    assert value(metrics, "nf4_dequant_seconds_total") == 1.5
    assert value(metrics, "nf4_linear_seconds_total") == 2.5
    assert value(metrics, "nf4_engine_step_seconds_sum") == 0.002
    assert value(metrics, "nf4_iteration_tokens_total_sum") == 40
    assert value(metrics, "nf4_prefix_cache_queries_total") == 10
    assert value(metrics, "nf4_prefix_cache_hits_total") == 4
    assert value(metrics, "nf4_graph_replays_total") == 7
    assert value(metrics, "nf4_images_computed_total") == 3
    assert value(metrics, "nf4_image_feature_hits_total") == 2
    assert value(metrics, "nf4_image_tower_seconds_total") == 0.25
    assert value(metrics, "nf4_spec_decode_num_drafts_total") == 3
    assert value(metrics, "nf4_spec_decode_num_draft_tokens_total") == 9
    assert value(metrics, "nf4_spec_decode_num_accepted_tokens_total") == 3
    assert value(metrics, "nf4_spec_decode_num_accepted_tokens_per_pos_total", position="1") == 1
    assert value(metrics, "nf4_device_memory_used_bytes") == 2**30
    assert value(metrics, "nf4_device_memory_total_bytes") == 2**31
    assert value(metrics, "nf4_weight_bytes") == 12
    assert value(metrics, "nf4_kernel_seconds_total", kind="linear", variant="cuda_rows") == 1.0
    assert value(metrics, "nf4_kernel_seconds_total", kind="dequantize", variant="cuda") == 0.5
    metrics.engine_ended()
    assert value(metrics, "nf4_num_requests_running") == 0


def test_memory_of_several_ranks_is_told_by_rank() -> None:
    metrics = Metrics("m")
    stats = EngineStats(device_memory_used=5, device_memory_total=9, other_device_memory=[(6, 9), (7, 8)])
    metrics.step_done(StepOutputs([], stats))
    for rank, (used, total) in enumerate(((5, 9), (6, 9), (7, 8))):
        assert value(metrics, "nf4_device_memory_used_bytes", rank=str(rank)) == used
        assert value(metrics, "nf4_device_memory_total_bytes", rank=str(rank)) == total
    assert value(metrics, "nf4_device_memory_used_bytes") is None


def test_adapters_in_use_are_one_series_at_a_time() -> None:
    metrics = Metrics("m")
    assert "lora" not in metrics.exposition("")[0].decode()
    for running, waiting in (([], []), (["a", "b"], ["c"]), (["b"], [])):
        stats = EngineStats(lora_slots=4, running_adapters=running, waiting_adapters=waiting)
        metrics.step_done(StepOutputs([], stats))
        (sample,) = (s for f in metrics.registry.collect() for s in f.samples if s.name == "nf4_lora_requests_info")
        names = {"running_lora_adapters": ",".join(running), "waiting_lora_adapters": ",".join(waiting)}
        assert sample.labels == MODEL | {"max_lora": "4"} | names
        assert abs(sample.value - time.time()) < 5


def test_the_caches_set_up_is_that_of_the_last_engine() -> None:
    metrics = Metrics("m")
    for blocks in (100, 90):
        metrics.engine_ready(EngineReady(64, 10, [2], 16, blocks, "cpu", "float32", "amx"), prefix_caching=True)
    families = [family for family in metrics.registry.collect() if family.name == "nf4_cache_config_info"]
    (sample,) = families[0].samples
    labels = {"block_size": "16", "num_gpu_blocks": "90", "enable_prefix_caching": "True"}
    assert (sample.labels, sample.value) == (MODEL | labels, 1)


def test_a_sequence_from_first_token_to_last() -> None:
    metrics, timeline, begun = Metrics("m"), RequestTimeline(prompt_tokens=7), time.monotonic()
    metrics.tokens_received(timeline, RequestOutput("0", [1], num_cached_tokens=4))
    time.sleep(0.01)
    metrics.tokens_received(timeline, RequestOutput("0", [2, 3]))
    elapsed = time.monotonic() - begun
    metrics.tokens_received(timeline, RequestOutput("0", []))
    timeline.finish_reason = "length"
    metrics.sequence_finished(timeline)
    assert value(metrics, "nf4_prompt_tokens_total") == 7
    assert value(metrics, "nf4_prompt_tokens_cached_total") == 4
    assert value(metrics, "nf4_generation_tokens_total") == 3
    assert value(metrics, "nf4_time_to_first_token_seconds_count") == 1
    # Two tokens at once share the time since the token before them.
    assert value(metrics, "nf4_inter_token_latency_seconds_count") == 2
    assert 0.01 <= (value(metrics, "nf4_inter_token_latency_seconds_sum") or 0) <= elapsed
    assert value(metrics, "nf4_request_generation_tokens_sum") == 3
    assert value(metrics, "nf4_request_success_total", finished_reason="length") == 1
    assert timeline.total is not None
    assert timeline.tokens_per_second is not None
    assert value(metrics, "nf4_e2e_request_latency_seconds_count") == 1


def test_images_are_counted_with_those_that_had_been_prepared() -> None:
    metrics = Metrics("m", "both")
    for seconds in (0.5, None, 0.25, None, None):
        metrics.image_taken(seconds)
    assert value(metrics, "nf4_mm_cache_queries_total") == 5
    assert value(metrics, "nf4_mm_cache_hits_total") == 3
    assert value(metrics, "nf4_image_preparation_seconds_count") == 2
    assert value(metrics, "nf4_image_preparation_seconds_sum") == 0.75
    assert 'vllm:mm_cache_hits_total{engine="0",model_name="m"} 3.0' in metrics.exposition("")[0].decode()


def test_kernels_as_labels() -> None:
    assert kind_and_variant("cuda_dequantize") == ("dequantize", "cuda")
    assert kind_and_variant("cuda_wgmma") == ("linear", "cuda_wgmma")
    assert kind_and_variant("cpu_linear") == ("linear", "cpu")


def test_timings_of_a_sequence() -> None:
    metrics, timeline = Metrics("m"), RequestTimeline(prompt_tokens=8, max_tokens=20, finish_reason="stop")
    timings = RequestTimings(
        queue=1.0, prefill=2.0, decode=4.0, dequant_prefill=0.5, dequant_decode=0.25, linear_decode=2.0
    )
    metrics.tokens_received(timeline, RequestOutput("0", [1], num_cached_tokens=3, timings=timings))
    metrics.sequence_finished(timeline)
    assert value(metrics, "nf4_request_inference_time_seconds_sum") == 6.0
    assert value(metrics, "nf4_request_params_max_tokens_sum") == 20
    assert value(metrics, "nf4_request_prefill_kv_computed_tokens_sum") == 5
    assert value(metrics, "nf4_request_dequant_seconds_sum", phase="prefill") == 0.5
    assert value(metrics, "nf4_request_dequant_seconds_sum", phase="decode") == 0.25
    assert value(metrics, "nf4_request_linear_seconds_sum", phase="decode") == 2.0
    other = RequestTimeline(timings=RequestTimings(queue=3.0, dequant_prefill=0.001))
    assert server_timing([timeline, other, RequestTimeline()]) == (
        "queue;dur=3000.000, prefill;dur=2000.000, decode;dur=4000.000, dequant;dur=751.000, linear;dur=2000.000"
    )
    assert server_timing([RequestTimeline()]) == ""


def test_latencies_of_aborted_sequences_are_left_out() -> None:
    metrics, timeline = Metrics("m"), RequestTimeline(finish_reason="abort")
    metrics.sequence_finished(timeline)
    assert value(metrics, "nf4_request_success_total", finished_reason="abort") == 1
    assert value(metrics, "nf4_e2e_request_latency_seconds_count") == 0
    assert value(metrics, "nf4_request_queue_time_seconds_count") == 0


def test_buckets_resolve_what_they_must() -> None:
    around = [bucket for bucket in TOKEN_BUCKETS if 0.001 <= bucket <= 0.004]
    assert len(around) >= 6
    assert KERNEL_BUCKETS[0] == 1e-6


def test_every_metric_is_documented() -> None:
    text = Path("docs/metrics.md").read_text()
    for family in Metrics("m").registry.collect():
        if not family.name.startswith("process_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            assert f"`{name}" in text, name


def test_every_documented_metric_exists() -> None:
    found = {family.name for family in Metrics("m").registry.collect()}
    # Metrics that only some configurations have are looked for in the code.
    code = "".join(path.read_text() for path in Path("server/observability").glob("*.py"))
    for documented in re.findall(r"`(nf4_\w+)", Path("docs/metrics.md").read_text()):
        name = documented.removesuffix("_total")
        assert {name, documented} & found or name in code or f'"{name.removeprefix("nf4_")}"' in code, documented


def test_names_have_the_prefix() -> None:
    names = [family.name for family in Metrics("m").registry.collect()]
    assert all(name.startswith(("nf4_", "process_")) for name in names)
    assert len(names) == len(set(names))
