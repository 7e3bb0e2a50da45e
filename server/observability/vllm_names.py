"""The metrics that vLLM has, too, under vLLM's names and labels, for routers and dashboards that ask for those."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

OURS = "nf4_"
THEIRS = "vllm:"

SHARED = frozenset({
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info", "lora_requests_info"),
    *("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "mm_cache_queries", "mm_cache_hits"),
    *("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "request_success"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_max_tokens", "request_params_n"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    "spec_decode_num_accepted_tokens_per_pos",
    *("request_max_num_generation_tokens", "request_prefill_kv_computed_tokens", "iteration_tokens_total"),
})  # fmt: skip
"""Names of metrics (counters without _total) that mean here what they mean in vLLM, without their prefixes."""

WITHOUT_MODEL = frozenset({"cache_config_info", "lora_requests_info"})
WITHOUT_ENGINE = frozenset({"lora_requests_info"})


class VllmNames(Collector):
    """A collector's metrics, with those of SHARED under vLLM's names, either instead of ours or beside them.

    vLLM numbers its engines in the label engine; there is one here, "0". Its cache_config_info and lora_requests_info lack
    the model's name, and the latter the engine.
    """

    def __init__(self, collector: Collector, *, keep_ours: bool) -> None:
        self._collector = collector
        self._keep_ours = keep_ours

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            bare = metric.name.removeprefix(OURS)
            shared = bare in SHARED and metric.name != bare
            if not shared or self._keep_ours:
                yield metric
            if shared:
                yield _renamed(metric, bare)


def _renamed(metric: Metric, bare: str) -> Metric:
    renamed = Metric(THEIRS + bare, metric.documentation, metric.type)
    for sample in metric.samples:
        labels = dict(sample.labels)
        if bare in WITHOUT_MODEL:
            labels.pop("model_name", None)
        if bare not in WITHOUT_ENGINE:
            labels["engine"] = "0"
        renamed.samples.append(
            Sample(THEIRS + sample.name.removeprefix(OURS), labels, sample.value, sample.timestamp, sample.exemplar)
        )
    return renamed
