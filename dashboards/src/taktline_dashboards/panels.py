"""Panels as Taktline draws them: every one has a unit, a sentence that says what it answers, and Prometheus queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
    xychart,
)
from grafana_foundation_sdk.cog import builder as cogbuilder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models import prometheus as prometheus_model
from grafana_foundation_sdk.models import xychart as xychart_model

DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

# Grafana's own colour names: they follow the light and the dark theme.
GOOD, WARN, BAD, CALM = "green", "orange", "red", "blue"

Step = tuple[float | None, str]
"""From this value on (None: from the start) this colour."""

_Panel = TypeVar("_Panel", timeseries.Panel, stat.Panel, heatmap.Panel, table.Panel, bargauge.Panel, xychart.Panel)


class Query(NamedTuple):
    """A PromQL expression and what its series are called; `{{label}}` in the legend is replaced."""

    expr: str
    legend: str = ""


def time_series(
    title: str,
    about: str,
    *queries: Query,
    unit: str,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    minimum: float | None = 0.0,
    maximum: float | None = None,
    limit: str = "",
    colours: Mapping[str, str] | None = None,
) -> timeseries.Panel:
    """Lines over time.

    Args:
        stacked: areas on top of each other: only for parts of a sum.
        limit: legend of the series that is a limit: drawn dashed, red, never stacked.
        colours: fixed colours by legend.
    """
    panel = _basics(timeseries.Panel(), title, about, unit, width, height)
    panel.legend(
        common.VizLegendOptions()
        .display_mode(common_model.LegendDisplayMode.LIST)
        .placement(common_model.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel.tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
    panel.line_width(1 if stacked else 2).show_points(common_model.VisibilityMode.NEVER)
    if stacked:
        panel.fill_opacity(60).stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if minimum is not None:
        panel.min(minimum)
    if maximum is not None:
        panel.max(maximum)
    for legend, colour in (colours or {}).items():
        panel.override_by_name(legend, [_property("color", {"mode": "fixed", "fixedColor": colour})])
    if limit:
        panel.override_by_name(
            limit,
            [
                _property("color", {"mode": "fixed", "fixedColor": BAD}),
                _property("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),
                _property("custom.fillOpacity", 0),
                _property("custom.stacking", {"mode": "none", "group": "limit"}),
            ],
        )
    return _asked(panel, queries)


def single(
    title: str,
    about: str,
    query: Query,
    *,
    unit: str,
    steps: Sequence[Step] = ((None, CALM),),
    width: int = 4,
    height: int = 4,
    decimals: int | None = None,
    names: bool = False,
) -> stat.Panel:
    """One large number, or one for each series of the query where `names` is set."""
    panel = _basics(stat.Panel(), title, about, unit, width, height)
    panel.graph_mode(common_model.BigValueGraphMode.NONE).color_mode(common_model.BigValueColorMode.BACKGROUND)
    panel.text_mode(common_model.BigValueTextMode.VALUE_AND_NAME if names else common_model.BigValueTextMode.VALUE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.thresholds(_thresholds(steps))
    if decimals is not None:
        panel.decimals(decimals)
    return _asked(panel, [query], instant=True)


def bars(
    title: str,
    about: str,
    query: Query,
    *,
    unit: str,
    steps: Sequence[Step] = ((None, CALM),),
    width: int = 8,
    height: int = 8,
    minimum: float | None = 0.0,
    maximum: float | None = None,
) -> bargauge.Panel:
    """One horizontal bar for each series of the query."""
    panel = _basics(bargauge.Panel(), title, about, unit, width, height)
    panel.orientation(common_model.VizOrientation.HORIZONTAL).display_mode(common_model.BarGaugeDisplayMode.BASIC)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.thresholds(_thresholds(steps))
    if minimum is not None:
        panel.min(minimum)
    if maximum is not None:
        panel.max(maximum)
    return _asked(panel, [query], instant=True)


def heat_map(title: str, about: str, expr: str, *, unit: str, width: int = 12, height: int = 8) -> heatmap.Panel:
    """A histogram over time; `expr` keeps the label `le`."""
    panel = _basics(heatmap.Panel(), title, about, unit, width, height)
    panel.calculate(False).cell_gap(1)
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(heatmap_model.HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .scale(heatmap_model.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
    )
    panel.y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(common_model.AxisPlacement.LEFT))
    target = prometheus.Dataquery().expr(expr).legend_format("{{le}}").ref_id("A")
    target.format(prometheus_model.PromQueryFormat.HEATMAP).range()
    return panel.with_target(target)


def rows(
    title: str,
    about: str,
    columns: Mapping[str, str],
    *,
    labels: Sequence[str],
    units: Mapping[str, str] | None = None,
    steps: Mapping[str, Sequence[Step]] | None = None,
    width: int = 24,
    height: int = 8,
) -> table.Panel:
    """A table: one row for each combination of `labels`, one column for each entry of `columns` (heading: expression).

    Args:
        units: unit by heading.
        steps: colours of a column's cells by heading.
    """
    panel = _basics(table.Panel(), title, about, "short", width, height)
    for letter, expr in zip("ABCDEFGHIJKL", columns.values(), strict=False):
        panel.with_target(_instant_table(expr, letter))
    panel.transformations(_joined(labels, list(columns)))
    for heading, unit in (units or {}).items():
        panel.override_by_name(heading, [_property("unit", unit)])
    for heading, found in (steps or {}).items():
        colours = _thresholds(found).build().to_json()
        panel.override_by_name(
            heading,
            [
                _property("thresholds", colours),
                _property("color", {"mode": "thresholds"}),
                _property("custom.cellOptions", {"type": "color-background", "mode": "basic"}),
            ],
        )
    return panel


def scatter(
    title: str,
    about: str,
    x: Query,
    y: Query,
    *,
    labels: Sequence[str],
    width: int = 12,
    height: int = 8,
) -> xychart.Panel:
    """One point for each combination of `labels`; the legends of `x` and `y` name the axes."""
    panel = _basics(xychart.Panel(), title, about, "short", width, height)
    panel.with_target(_instant_table(x.expr, "A")).with_target(_instant_table(y.expr, "B"))
    panel.transformations(_joined(labels, [x.legend, y.legend]))
    panel.mapping(xychart_model.SeriesMapping.MANUAL)
    panel.legend(common.VizLegendOptions().show_legend(False))
    panel.show(xychart_model.XYShowMode.POINTS)
    series = xychart_model.XYSeriesConfig(
        frame=xychart_model.XychartXYSeriesConfigFrame(xychart_model.MatcherConfig("byIndex", 0)),
        x=xychart_model.XychartXYSeriesConfigX(xychart_model.MatcherConfig("byName", x.legend)),
        y=xychart_model.XychartXYSeriesConfigY(xychart_model.MatcherConfig("byName", y.legend)),
    )
    return panel.series([_Built(series)])


class _Built(cogbuilder.Builder[xychart_model.XYSeriesConfig]):
    """A builder whose object is there already: the generated one of a series cannot set its matchers."""

    def __init__(self, built: xychart_model.XYSeriesConfig) -> None:
        self._built = built

    def build(self) -> xychart_model.XYSeriesConfig:
        return self._built


def _basics(panel: _Panel, title: str, about: str, unit: str, width: int, height: int) -> _Panel:
    return panel.title(title).description(about).datasource(DATASOURCE).unit(unit).span(width).height(height)


def _asked(panel: _Panel, queries: Sequence[Query], *, instant: bool = False) -> _Panel:
    for letter, query in zip("ABCDEFGHIJKL", queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).ref_id(letter)
        target.legend_format(query.legend or "__auto")
        panel.with_target(target.instant() if instant else target.range())
    return panel


def _instant_table(expr: str, letter: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expr).ref_id(letter).instant().format(prometheus_model.PromQueryFormat.TABLE)


def _joined(labels: Sequence[str], headings: Sequence[str]) -> list[model.DataTransformerConfig]:
    """Merges the answers of several instant queries into one table and names the columns."""
    values = ["Value"] if len(headings) == 1 else [f"Value #{letter}" for letter in "ABCDEFGHIJKL"[: len(headings)]]
    organised: dict[str, Any] = {
        "renameByName": dict(zip(values, headings, strict=True)),
        "indexByName": {name: index for index, name in enumerate([*labels, *values])},
        "includeByName": dict.fromkeys([*labels, *values], True),
    }
    return [
        model.DataTransformerConfig(id_val="merge", options={}),
        model.DataTransformerConfig(id_val="organize", options=organised),
    ]


def _thresholds(steps: Sequence[Step]) -> dashboard.ThresholdsConfig:
    found = [model.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(found)


def _property(name: str, value: object) -> model.DynamicConfigValue:
    return model.DynamicConfigValue(id_val=name, value=value)
