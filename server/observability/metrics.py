"""Every Prometheus metric of the server. Names and meanings are vLLM's, with the prefix nf4_, where vLLM has one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from server.config import MetricsNames
from server.observability.engine_state import CacheConfig, EngineCollector
from server.observability.many_processes import Processes
from server.observability.timeline import RequestTimeline
from server.observability.vllm_names import VllmNames
from server.types import EngineReady, EngineStats, RequestOutput, StepOutputs

# These would add a second series to every counter and histogram, for which Prometheus has no use.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Seconds. The buckets are narrow around 2 ms, the time of a token of a small model on a GPU.
TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
REQUEST_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
KERNEL_BUCKETS = tuple(digit * 10.0**power for power in range(-6, 2) for digit in (1.0, 2.0, 5.0))
"""1 microsecond to 50 s."""
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16_384)
N_BUCKETS = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, names: MetricsNames = "nf4", processes: Processes | None = None) -> None:
        """processes: all that answer HTTP, with their files of values; None: this one is alone."""
        self.registry = CollectorRegistry()
        everything = self.registry
        if processes is None:
            ProcessCollector(registry=self.registry)
        else:
            everything = CollectorRegistry()
            processes.collect_into(everything)
        self._exposed: Collector = everything
        if names != "nf4":
            self._exposed = VllmNames(everything, keep_ours=names == "both")
        self._plain_only = names != "nf4"
        self._model = model_name
        self._engine = EngineCollector(model_name)
        everything.register(self._engine)
        self._define_request_metrics()
        self._define_engine_metrics()
        self._define_http_metrics()

    def _define_request_metrics(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prefill tokens processed.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.generation_tokens = self._counter("generation_tokens", "Generation tokens processed.")
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a request.", TOKEN_BUCKETS
        )
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token of a request after its first.", TOKEN_BUCKETS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Time from arrival to the end.", REQUEST_BUCKETS)
        self._queue = self._histogram(
            "request_queue_time_seconds", "Time spent waiting in the engine.", REQUEST_BUCKETS
        )
        self._prefill = self._histogram("request_prefill_time_seconds", "Time spent in prefill.", REQUEST_BUCKETS)
        self._decode = self._histogram("request_decode_time_seconds", "Time spent in decode.", REQUEST_BUCKETS)
        self._inference = self._histogram(
            "request_inference_time_seconds", "Time from being scheduled to the last token.", REQUEST_BUCKETS
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS)
        self._answer_length = self._histogram(
            "request_generation_tokens", "Generated tokens of a request.", LENGTH_BUCKETS
        )
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request.", LENGTH_BUCKETS)
        self._n = self._histogram("request_params_n", "Answers that a request asked for to one prompt.", N_BUCKETS)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest answer to a prompt.", LENGTH_BUCKETS
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", LENGTH_BUCKETS
        )
        self._images = self._counter("mm_cache_queries", "Images of requests, looked up among the prepared ones.")
        self._prepared_images = self._counter("mm_cache_hits", "Images of requests that had been prepared already.")
        self._preparation = self._histogram(
            "image_preparation_seconds", "Time to decode and prepare an image, its turn included.", REQUEST_BUCKETS
        )
        success = Counter(
            "nf4_request_success",
            "Requests ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._finished = {
            reason: success.labels(self._model, reason) for reason in ("stop", "length", "abort", "error")
        }
        self._dequant = self._by_phase(
            "request_dequant_seconds", "A request's share of the time its steps spent dequantizing NF4 weights."
        )
        self._linear = self._by_phase(
            "request_linear_seconds", "A request's share of the time its steps spent in NF4 linear layers as a whole."
        )

    def _define_engine_metrics(self) -> None:
        self._step_seconds = self._histogram("engine_step_seconds", "Duration of one engine step.", TOKEN_BUCKETS)
        self._step_batch = self._histogram("engine_step_batch_size", "Sequences in one engine step.", BATCH_BUCKETS)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens in one engine step.", BATCH_BUCKETS)

    def _define_http_metrics(self) -> None:
        self._http_requests = Counter(
            "nf4_http_requests", "HTTP answers.", ["method", "route", "status"], registry=self.registry
        )
        self._http_seconds = Histogram(
            "nf4_http_request_duration_seconds",
            "Time from the head of an HTTP request to the end of its answer.",
            ["route"],
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._rejections = Counter(
            "nf4_request_rejections", "Requests answered with an error, by reason.", ["reason"], registry=self.registry
        )
        self.http_in_flight = Gauge(
            "nf4_http_requests_in_flight",
            "HTTP requests being answered.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"nf4_{name}", text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"nf4_{name}", text, ["model_name"], buckets=buckets, registry=self.registry).labels(
            self._model
        )

    def _by_phase(self, name: str, text: str) -> dict[str, Histogram]:
        histogram = Histogram(
            f"nf4_{name}", text, ["model_name", "phase"], buckets=KERNEL_BUCKETS, registry=self.registry
        )
        return {phase: histogram.labels(self._model, phase) for phase in ("prefill", "decode")}

    def watch_engine(self, state: Callable[[], tuple[str, int]]) -> None:
        """At every scrape call state for the engine's state, one word, and its number of restarts."""
        self._engine.state = state

    def step_done(self, step: StepOutputs) -> None:
        """Count the step, or the two steps, that ended in one call of the engine."""
        self._engine.stats = step.stats
        for stats in (step.before, step.stats):
            if stats is not None and stats.step_batch:
                self._step_seconds.observe(stats.step_seconds)
                self._step_batch.observe(stats.step_batch)
                self._step_tokens.observe(stats.step_tokens)

    def engine_ready(self, ready: EngineReady, *, prefix_caching: bool) -> None:
        """Note the configuration of a new engine's KV cache."""
        self._engine.cache = CacheConfig(ready.block_size, ready.num_blocks, prefix_caching)

    def engine_ended(self) -> None:
        """Forget the state of an engine that is gone."""
        self._engine.stats = EngineStats()

    def tokens_received(self, timeline: RequestTimeline, output: RequestOutput) -> None:
        """Count one output of the engine, and note it in the sequence's timeline."""
        if output.timings is not None:
            timeline.timings = output.timings
        count = len(output.new_token_ids)
        if output.embedding is not None:
            self._prompt_computed(timeline, output)
        if not count:
            return
        now = time.monotonic()
        if timeline.last_token is None:
            timeline.first_token = now
            self._time_to_first_token.observe(now - timeline.arrival)
            self._prompt_computed(timeline, output)
        else:
            # A step that yields several tokens at once spreads its time over them.
            interval = (now - timeline.last_token) / count
            for _ in range(count):
                self._inter_token.observe(interval)
        timeline.last_token = now
        timeline.generation_tokens += count
        self.generation_tokens.inc(count)

    def _prompt_computed(self, timeline: RequestTimeline, output: RequestOutput) -> None:
        timeline.cached_tokens = output.num_cached_tokens
        self.prompt_tokens.inc(timeline.prompt_tokens)
        self.cached_tokens.inc(output.num_cached_tokens)

    def sequence_finished(self, timeline: RequestTimeline) -> None:
        """Count a sequence that has ended; its finish_reason must be set."""
        timeline.finished = time.monotonic()
        self._finished[timeline.finish_reason or "error"].inc()
        self._prompt_length.observe(timeline.prompt_tokens)
        if timeline.max_tokens:
            self._max_tokens.observe(timeline.max_tokens)
        if timeline.first_token is not None:
            self._computed.observe(timeline.prompt_tokens - timeline.cached_tokens)
        self._answer_length.observe(timeline.generation_tokens)
        if timeline.finish_reason in ("stop", "length"):
            self._e2e.observe(timeline.finished - timeline.arrival)
            rate = timeline.tokens_per_second
            if rate:
                self._time_per_output_token.observe(1 / rate)
        timings = timeline.timings
        if timings is not None:
            self._queue.observe(timings.queue)
            self._prefill.observe(timings.prefill)
            self._decode.observe(timings.decode)
            self._inference.observe(timings.prefill + timings.decode)
            self._dequant["prefill"].observe(timings.dequant_prefill)
            self._dequant["decode"].observe(timings.dequant_decode)
            self._linear["prefill"].observe(timings.linear_prefill)
            self._linear["decode"].observe(timings.linear_decode)

    def image_taken(self, seconds: float | None) -> None:
        """Count an image of a request; seconds: what preparing it took, None where that had been done."""
        self._images.inc()
        if seconds is None:
            self._prepared_images.inc()
        else:
            self._preparation.observe(seconds)

    def prompt_finished(self, answers: int, longest: int) -> None:
        """Count one prompt: how many answers were asked for, and the tokens of the longest."""
        self._n.observe(answers)
        self._longest.observe(longest)

    def rejected(self, reason: str) -> None:
        """Count a request that was answered with an error; reason is one of a fixed set of words."""
        self._rejections.labels(reason).inc()

    def http_answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one HTTP answer; route is a path template, never the path itself."""
        self._http_requests.labels(method, route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the format that an Accept header asks for, and its content type.

        vLLM's names come in the plain format only: prometheus_client replaces their colons in OpenMetrics' samples.
        """
        encode, content_type = choose_encoder("" if self._plain_only else accept)
        return encode(self._exposed), content_type
