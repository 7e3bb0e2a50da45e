"""The NF4 dashboard: time in NF4 linear layers, beside the floor that the memory's bandwidth sets."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import MODEL, board, choice, graph, heat, mean, number, quantiles, total

BANDWIDTHS = (
    ("CPU (20 GB/s)", "2e10"),
    ("L4 (0.3 TB/s)", "3e11"),
    ("A100 80 GB (2.0 TB/s)", "2.04e12"),
    ("H100 SXM (3.35 TB/s)", "3.35e12"),
    ("H200 (4.8 TB/s)", "4.8e12"),
    ("B200 (8 TB/s)", "8e12"),
)
STEPS = total("nf4_engine_step_seconds_count")
BUSY = total("nf4_engine_step_seconds_sum")
FLOOR = f"max(nf4_weight_bytes{{{MODEL}}}) / $bandwidth"
LINEAR = total("nf4_linear_seconds_total")
DEQUANT = total("nf4_dequant_seconds_total")


def nf4() -> dashboard.Dashboard:
    """The dashboard."""
    found = board("nf4-kernels", "NF4 server: NF4 layers", "Time in NF4 layers, in steps and in requests.")
    found.with_variable(choice("bandwidth", "Memory bandwidth", BANDWIDTHS, 3))
    busy = "Share of the engine's steps."
    for panel in (
        number("Linear layers", "percentunit", f"{LINEAR} / {BUSY}", busy, 6),
        number("Dequantization", "percentunit", f"{DEQUANT} / {BUSY}", busy, 6),
        number("Linear time of a step", "s", f"{LINEAR} / {STEPS}", "Mean.", 6),
        number("Floor of a step", "s", FLOOR, "Bytes of codes and scales over the bandwidth chosen above.", 6),
    ):
        found.with_panel(panel)
    _steps(found)
    _requests(found)
    return found


def _steps(found: dashboard.Dashboard) -> None:
    found.with_row(dashboard.Row("Steps"))
    step = [(f"{LINEAR} / {STEPS}", "linear layers"), (f"{DEQUANT} / {STEPS}", "dequantization"), (FLOOR, "floor")]
    found.with_panel(graph("Time of a step in NF4 layers", "s", step, "Mean, and the time to read the weights once."))
    found.with_panel(
        graph(
            "Linear time over the floor",
            "none",
            [(f"{LINEAR} / {STEPS} / ({FLOOR})", "times")],
            "1 is the least there can be.",
        )
    )
    shares = [(f"{LINEAR} / {BUSY}", "linear layers"), (f"{DEQUANT} / {BUSY}", "dequantization")]
    found.with_panel(graph("Share of the engine's time", "percentunit", shares))
    variants = [(total("nf4_kernel_seconds_total", "kind", "variant"), "{{kind}} {{variant}}")]
    found.with_panel(graph("By kernel", "percentunit", variants, "Seconds per second.", 12))
    graphs = [(total("nf4_graph_replays_total"), "graph replays"), (STEPS, "steps")]
    found.with_panel(
        graph("CUDA graphs", "short", graphs, "Replays and steps per second; there are no graphs on CPU.", 12)
    )


def _requests(found: dashboard.Dashboard) -> None:
    found.with_row(dashboard.Row("Requests"))
    for phase in ("prefill", "decode"):
        labels = f'{MODEL}, phase="{phase}"'
        found.with_panel(
            graph(f"Dequantization, {phase}", "s", quantiles("nf4_request_dequant_seconds", labels), "", 6)
        )
        found.with_panel(graph(f"Linear, {phase}", "s", quantiles("nf4_request_linear_seconds", labels), "", 6))
    share = f"{mean('nf4_request_dequant_seconds', 'phase')} / ({mean('nf4_request_linear_seconds', 'phase')})"
    found.with_panel(
        graph("Dequantization, share of linear time", "percentunit", [(share, "{{phase}}")], "By phase.", 12)
    )
    found.with_panel(heat("Linear time of a request", "nf4_request_linear_seconds", width=12))
