"""The overview dashboard: load, latency, objectives, engine and HTTP."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import board, choice, graph, heat, mean, number, quantiles, rate, total, within

TTFT_LIMITS = ("0.1", "0.2", "0.5", "1.0", "2.5", "5.0")
TOKEN_LIMITS = ("0.01", "0.02", "0.05", "0.1", "0.2")
TTFT = "nf4_time_to_first_token_seconds"
TOKEN = "nf4_inter_token_latency_seconds"
REQUEST = "nf4_e2e_request_latency_seconds"


def overview() -> dashboard.Dashboard:
    """The dashboard."""
    found = board("nf4-overview", "NF4 server: overview", "Load, latency, objectives, cache, queue and errors.")
    found.with_variable(choice("ttft_slo", "First token within", [(f"{v} s", v) for v in TTFT_LIMITS], 3))
    found.with_variable(choice("token_slo", "Tokens within", [(f"{v} s", v) for v in TOKEN_LIMITS], 2))
    for part in (_numbers, _load, _latency, _distributions, _engine, _http):
        part(found)
    return found


def _numbers(found: dashboard.Dashboard) -> None:
    succeeded = total("nf4_request_success_total", labels='model_name=~"$model", finished_reason=~"stop|length"')
    for panel in (
        number("Engine", "bool_on_off", 'min(nf4_engine_up{model_name=~"$model"})'),
        number("Requests answered", "reqps", succeeded),
        number("Tokens generated", "short", total("nf4_generation_tokens_total"), "Per second."),
        number("First token in time", "percentunit", within(TTFT, "$ttft_slo"), "Share of sequences."),
        number("Tokens in time", "percentunit", within(TOKEN, "$token_slo"), "Share of tokens after the first."),
        number("Engine restarts", "short", 'sum(nf4_engine_restarts_total{model_name=~"$model"})', "Since the start."),
    ):
        found.with_panel(panel)


def _load(found: dashboard.Dashboard) -> None:
    found.with_row(dashboard.Row("Load"))
    found.with_panel(
        graph(
            "Sequences ended",
            "reqps",
            [(total("nf4_request_success_total", "finished_reason"), "{{finished_reason}}")],
            stacked=True,
        )
    )
    tokens = [
        (total("nf4_prompt_tokens_total"), "prompt"),
        (total("nf4_prompt_tokens_cached_total"), "of the prompt cached"),
        (total("nf4_generation_tokens_total"), "generated"),
    ]
    found.with_panel(graph("Tokens", "short", tokens, "Per second."))
    lengths = [(mean("nf4_request_prompt_tokens"), "prompt"), (mean("nf4_request_generation_tokens"), "answer")]
    found.with_panel(graph("Length of sequences", "short", lengths, "Mean, in tokens."))


def _latency(found: dashboard.Dashboard) -> None:
    found.with_row(dashboard.Row("Latency"))
    found.with_panel(graph("Time to first token", "s", quantiles(TTFT)))
    found.with_panel(graph("Time between tokens", "s", quantiles(TOKEN)))
    found.with_panel(graph("Whole request", "s", quantiles(REQUEST), "Sequences that ended by stop or length."))
    phases = [(mean(f"nf4_request_{phase}_time_seconds"), phase) for phase in ("queue", "prefill", "decode")]
    found.with_panel(graph("Where the time goes", "s", phases, "Mean of a sequence.", stacked=True))
    kept = [(within(TTFT, "$ttft_slo"), "first token"), (within(TOKEN, "$token_slo"), "later tokens")]
    found.with_panel(graph("Objectives kept", "percentunit", kept, "Share within the limits chosen above."))
    found.with_panel(graph("Waiting in the queue", "s", quantiles("nf4_request_queue_time_seconds")))


def _distributions(found: dashboard.Dashboard) -> None:
    found.with_panel(heat("Time to first token", TTFT))
    found.with_panel(heat("Time between tokens", TOKEN))
    found.with_panel(heat("Whole request", REQUEST))


def _engine(found: dashboard.Dashboard) -> None:
    found.with_row(dashboard.Row("Engine"))
    sequences = [
        ('sum(nf4_num_requests_running{model_name=~"$model"})', "running"),
        ('sum(nf4_num_requests_waiting{model_name=~"$model"})', "waiting"),
        ('sum(nf4_state_slots{model_name=~"$model"})', "states for"),
        ('sum(nf4_state_snapshots{model_name=~"$model"})', "snapshots of states"),
        ('sum(nf4_state_snapshots_on_host{model_name=~"$model"})', "snapshots in host memory"),
    ]
    found.with_panel(graph("Sequences", "short", sequences, "States: of hybrid models, 0 with others."))
    hits = f"{total('nf4_prefix_cache_hits_total')} / {total('nf4_prefix_cache_queries_total')}"
    cache = [('max(nf4_kv_cache_usage_perc{model_name=~"$model"})', "blocks in use"), (hits, "prefix hits")]
    found.with_panel(
        graph("KV cache", "percentunit", cache, "KV blocks in use; share of prompt tokens found in the prefix cache.")
    )
    found.with_panel(graph("Preemptions", "short", [(total("nf4_num_preemptions_total"), "per second")]))
    found.with_panel(graph("Step time", "s", quantiles("nf4_engine_step_seconds")))
    found.with_panel(heat("Sequences in a step", "nf4_engine_step_batch_size", "short"))
    drafted, accepted = "nf4_spec_decode_num_draft_tokens_total", "nf4_spec_decode_num_accepted_tokens_total"
    drafts = [(total(drafted), "verified"), (total(accepted), "accepted")]
    found.with_panel(graph("Draft tokens", "short", drafts, "Speculation: draft tokens per second."))
    share = [(f"{total(accepted)} / {total(drafted)}", "share")]
    found.with_panel(graph("Accepted draft tokens", "percentunit", share))
    gained = [(f"1 + {total(accepted)} / {total('nf4_spec_decode_num_drafts_total')}", "tokens")]
    found.with_panel(
        graph("Tokens per verified step", "short", gained, "A sequence's mean in a step with draft tokens.")
    )
    _images(found)
    memory = [
        ('sum(nf4_device_memory_used_bytes{model_name=~"$model"})', "used"),
        ('sum(nf4_device_memory_total_bytes{model_name=~"$model"})', "total"),
    ]
    found.with_panel(graph("Device memory", "bytes", memory))


def _images(found: dashboard.Dashboard) -> None:
    asked, computed = total("nf4_mm_cache_queries_total"), total("nf4_images_computed_total")
    images = [(asked, "in requests"), (computed, "computed by the tower")]
    found.with_panel(graph("Images", "short", images, "Per second."))
    hits = total("nf4_image_feature_hits_total")
    kept = [
        (f"{total('nf4_mm_cache_hits_total')} / {asked}", "prepared before"),
        (f"{hits} / ({hits} + {computed})", "features"),
    ]
    found.with_panel(graph("Images found in caches", "percentunit", kept, "Prepared images; features that steps need."))
    tower = f"{total('nf4_image_tower_seconds_total')} / {computed}"
    times = [(mean("nf4_image_preparation_seconds"), "prepared"), (tower, "computed by the tower")]
    found.with_panel(graph("Time of an image", "s", times, "Mean."))


def _http(found: dashboard.Dashboard) -> None:
    found.with_row(dashboard.Row("HTTP"))
    by_status = [(f"sum by (route, status) ({rate('nf4_http_requests_total', '')})", "{{route}} {{status}}")]
    found.with_panel(graph("Answers", "reqps", by_status, "By route and status."))
    reasons = [(f"sum by (reason) ({rate('nf4_request_rejections_total', '')})", "{{reason}}")]
    found.with_panel(
        graph("Requests refused or failed", "reqps", reasons, "By reason; there is no data before the first one.")
    )
    found.with_panel(graph("In flight", "short", [("sum(nf4_http_requests_in_flight)", "requests")]))
