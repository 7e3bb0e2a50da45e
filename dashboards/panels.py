"""Panels of PromQL queries, and the variables that all dashboards share."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import heatmap as heatmap_shapes
from grafana_foundation_sdk.models import prometheus as prometheus_shapes
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableHide,
    VariableOption,
    VariableRefresh,
)

MODEL = 'model_name=~"$model"'
SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
HEIGHT = 8
QUANTILES = (0.5, 0.9, 0.99)

Query = tuple[str, str]
"""PromQL, and the legend of its series."""


def rate(metric: str, labels: str = MODEL) -> str:
    """A counter's rate per second, of the chosen models."""
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def total(metric: str, *by: str, labels: str = MODEL) -> str:
    """The sum of a counter's rates, by labels."""
    return f"sum{' by (' + ', '.join(by) + ')' if by else ''} ({rate(metric, labels)})"


def quantiles(histogram: str, labels: str = MODEL) -> list[Query]:
    """p50, p90 and p99 of a histogram."""
    buckets = total(f"{histogram}_bucket", "le", labels=labels)
    return [(f"histogram_quantile({q}, {buckets})", f"p{100 * q:g}") for q in QUANTILES]


def mean(histogram: str, *by: str) -> str:
    """A histogram's mean, by labels."""
    return f"{total(histogram + '_sum', *by)} / {total(histogram + '_count', *by)}"


def within(histogram: str, limit: str) -> str:
    """The share of a histogram's observations that are at most limit, which must be one of its bucket bounds."""
    inside = total(f"{histogram}_bucket", labels=f'{MODEL}, le="{limit}"')
    return f"{inside} / {total(histogram + '_count')}"


def _target(query: Query, index: int) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(query[0]).legend_format(query[1]).ref_id(chr(ord("A") + index)).range()


def graph(
    title: str, unit: str, queries: Sequence[Query], text: str = "", width: int = 8, *, stacked: bool = False
) -> timeseries.Panel:
    """A panel of lines over time; width is in columns, of which there are 24."""
    panel = timeseries.Panel().title(title).description(text).unit(unit).min(0).span(width).height(HEIGHT)
    panel = panel.datasource(SOURCE).fill_opacity(30 if stacked else 5).show_points(shapes.VisibilityMode.NEVER)
    panel = panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(shapes.LegendDisplayMode.LIST)
        .placement(shapes.LegendPlacement.BOTTOM)
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL))
    return panel.targets([_target(query, index) for index, query in enumerate(queries)])


def heat(title: str, histogram: str, unit: str = "s", width: int = 8) -> heatmap.Panel:
    """A heat map of a histogram's observations over time."""
    query = (total(f"{histogram}_bucket", "le"), "{{le}}")
    return (
        heatmap.Panel()
        .title(title)
        .span(width)
        .height(HEIGHT)
        .datasource(SOURCE)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(heatmap.HeatmapColorOptions().mode(heatmap_shapes.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .targets([_target(query, 0).format(prometheus_shapes.PromQueryFormat.HEATMAP)])
    )


def number(title: str, unit: str, query: str, text: str = "", width: int = 4) -> stat.Panel:
    """A panel with one number, the latest value."""
    panel = stat.Panel().title(title).description(text).unit(unit).span(width).height(4).datasource(SOURCE)
    panel = panel.color_mode(shapes.BigValueColorMode.VALUE).graph_mode(shapes.BigValueGraphMode.AREA)
    return panel.targets([_target((query, title), 0)])


def choice(name: str, label: str, options: Sequence[tuple[str, str]], chosen: int) -> dashboard.CustomVariable:
    """A variable with fixed options of (text, value)."""
    values = [VariableOption(text=text, value=value, selected=i == chosen) for i, (text, value) in enumerate(options)]
    query = ", ".join(f"{text} : {value}" for text, value in options)
    return dashboard.CustomVariable(name).label(label).values(query).options(values).current(values[chosen])


def board(uid: str, title: str, text: str) -> dashboard.Dashboard:
    """An empty dashboard with the variables datasource and model."""
    everything = VariableOption(text="All", value="$__all", selected=True)
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags(["nf4-server"])
        .time("now-30m", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("model")
            .label("Model")
            .datasource(SOURCE)
            .query("label_values(nf4_engine_up, model_name)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .hide(VariableHide.DONT_HIDE)
            .include_all(True)
            .all_value(".*")
            .current(everything)
        )
    )
