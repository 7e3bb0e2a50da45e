"""The engine's latest state as metrics, read when they are scraped rather than written at every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.types import EngineStats


@dataclass(frozen=True)
class CacheConfig:
    """Configuration of an engine's KV cache."""

    block_size: int
    num_blocks: int
    prefix_caching: bool


class EngineCollector(Collector):
    """Gauges of the engine's state after its last step, and its counters since it started.

    The counters begin at zero with every engine, as Prometheus expects after a restart.
    """

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self.stats = EngineStats()
        self.state: Callable[[], tuple[str, int]] = lambda: ("loading", 0)
        """Gives the engine's state, one word, and its number of restarts."""
        self.cache: CacheConfig | None = None

    def collect(self) -> Iterable[Metric]:
        stats, cache = self.stats, self.cache
        state, restarts = self.state()
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield from self._gauges(
            ("num_requests_running", "Requests in the engine's batches.", stats.running),
            ("num_requests_waiting", "Requests waiting in the engine.", stats.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage),
            (
                "weight_bytes",
                "Bytes of the codes and scales of all NF4 layers, which a step reads at least once.",
                stats.nf4_weight_bytes,
            ),
            ("kv_cache_blocks", "Blocks of the KV cache.", stats.kv_blocks_total),
            ("state_slots", "Sequences whose states there is memory for.", stats.state_slots),
            ("state_slots_used", "Sequences that hold states.", stats.running if stats.state_slots else 0),
            ("state_snapshot_slots", "Snapshots of states that there is memory for.", stats.state_snapshot_slots),
            ("state_snapshots", "Snapshots of states that can be found on the device.", stats.state_snapshots),
            ("state_snapshots_on_host", "Those that can be found in host memory.", stats.state_snapshots_on_host),
            ("engine_up", "1 when the engine takes requests.", float(state == "ready")),
        )
        if cache is not None:
            yield self._family(
                GaugeMetricFamily,
                "cache_config_info",
                "Configuration of the KV cache, in the labels.",
                ("block_size", "num_gpu_blocks", "enable_prefix_caching"),
                [((str(cache.block_size), str(cache.num_blocks), str(cache.prefix_caching)), 1)],
            )
        yield from self._memory(stats)
        yield from self._counters(
            ("num_preemptions", "Preemptions since the engine started.", stats.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("state_snapshot_hits", "Sequences that began with a snapshot of states.", stats.state_snapshot_hits),
            (
                "state_snapshot_host_hits",
                "Those of them whose snapshot only the host had.",
                stats.state_snapshot_host_hits,
            ),
            ("spec_decode_num_drafts", "Times that a step verified draft tokens of a sequence.", stats.drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens that were verified.", stats.draft_tokens),
            (
                "spec_decode_num_accepted_tokens",
                "Draft tokens that were accepted.",
                sum(stats.accepted_by_place),
            ),
            ("images_computed", "Images that the model's tower has computed.", stats.images_computed),
            (
                "image_feature_hits",
                "Times that a step needed an image's features and found them kept.",
                stats.image_feature_hits,
            ),
            ("image_tower_seconds", "Time spent in the image tower.", stats.image_tower_seconds),
            ("graph_replays", "CUDA graphs replayed since the engine started.", stats.graph_replays),
            ("engine_restarts", "How often the engine was restarted.", restarts),
            (
                "dequant_seconds",
                "Time spent dequantizing NF4 weights since the engine started.",
                stats.dequant_seconds_total,
            ),
            ("linear_seconds", "Time spent in NF4 linear layers since the engine started.", stats.linear_seconds_total),
        )
        yield from self._labelled(stats)

    def _labelled(self, stats: EngineStats) -> Iterator[Metric]:
        """Those with labels beside the model's name."""
        yield self._family(
            CounterMetricFamily,
            "failed_steps",
            "Steps that failed, by cause: a request's data, or a fault of the engine.",
            ("cause",),
            [((cause,), count) for cause, count in stats.failed_steps.items()],
        )
        yield self._family(
            CounterMetricFamily,
            "kernel_seconds",
            "Time spent in NF4 kernels since the engine started, by kind and variant.",
            ("kind", "variant"),
            [(kind_and_variant(kernel), seconds) for kernel, seconds in sorted(stats.kernel_seconds.items())],
        )
        if stats.accepted_by_place:
            yield self._family(
                CounterMetricFamily,
                "spec_decode_num_accepted_tokens_per_pos",
                "Draft tokens that were accepted, by their place among a sequence's draft tokens of a step, from 0 on.",
                ("position",),
                [((str(place),), count) for place, count in enumerate(stats.accepted_by_place)],
            )
        if stats.lora_slots:
            # One series at a time, as in vLLM, for routers that send a request to where its adapter is.
            running, waiting = ",".join(stats.running_adapters), ",".join(stats.waiting_adapters)
            yield self._family(
                GaugeMetricFamily,
                "lora_requests_info",
                "LoRA adapters of running and of waiting requests, and how many can be loaded; the value is the time.",
                ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
                [((str(stats.lora_slots), running, waiting), time.time())],
            )

    def _gauges(self, *rows: tuple[str, str, float]) -> Iterator[Metric]:
        for name, text, value in rows:
            yield self._family(GaugeMetricFamily, name, text, (), [((), value)])

    def _counters(self, *rows: tuple[str, str, float]) -> Iterator[Metric]:
        for name, text, value in rows:
            yield self._family(CounterMetricFamily, name, text, (), [((), value)])

    def _memory(self, stats: EngineStats) -> Iterator[Metric]:
        """A series for each rank of tensor parallelism; a single series without that label where there is one rank."""
        ranks = [(stats.device_memory_used, stats.device_memory_total), *stats.other_device_memory]
        labels = ("rank",) if len(ranks) > 1 else ()
        for index, (name, text) in enumerate(
            (
                ("used", "Memory in use: the GPU's, or on CPU the engine's."),
                ("total", "Memory in total: the GPU's, or on CPU the machine's."),
            )
        ):
            series = [((str(rank),)[: len(labels)], values[index]) for rank, values in enumerate(ranks)]
            yield self._family(GaugeMetricFamily, f"device_memory_{name}_bytes", text, labels, series)

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        labels: tuple[str, ...],
        series: Iterable[tuple[tuple[str, ...], float]],
    ) -> Metric:
        """A metric with the model's name and these labels; series: their values, and the series' value."""
        family = kind(f"nf4_{name}", text, labels=["model_name", *labels])
        for values, value in series:
            family.add_metric([self._model, *values], value)
        return family


def kind_and_variant(kernel: str) -> tuple[str, str]:
    """A key of EngineStats.kernel_seconds as labels: kind ("dequantize" or "linear") and variant (device and kernel).

    >>> kind_and_variant("cuda_dequantize"), kind_and_variant("cuda_wgmma"), kind_and_variant("cpu_linear")
    (('dequantize', 'cuda'), ('linear', 'cuda_wgmma'), ('linear', 'cpu'))
    """
    for kind in ("dequantize", "linear"):
        if kernel.endswith(f"_{kind}"):
            return kind, kernel.removesuffix(f"_{kind}")
    return "linear", kernel
