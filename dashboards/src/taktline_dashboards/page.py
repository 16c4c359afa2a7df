"""The frame that all dashboards share: data source, variables, links to each other, alerts as marks."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import bargauge, dashboard, heatmap, stat, table, timeseries, xychart
from grafana_foundation_sdk.models import dashboard as model
from taktline_protocol import slo

from taktline_dashboards.panels import DATASOURCE

TAG = "taktline"

Panel = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel | bargauge.Panel | xychart.Panel


class Variable:
    """A drop-down whose entries are the values of a label."""

    def __init__(self, name: str, series: str, heading: str, *, label: str = "", several: bool = True) -> None:
        """Values of `label` (the variable's own name where empty) of a series; `several` allows a choice of many."""
        self.name, self.series, self.heading, self.label, self.several = name, series, heading, label or name, several

    def build(self) -> dashboard.QueryVariable:
        """The same as Grafana's builder."""
        found = dashboard.QueryVariable(self.name).label(self.heading).datasource(DATASOURCE)
        found.query(f"label_values({self.series}, {self.label})")
        found.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.ALPHABETICAL_ASC)
        if self.several:
            everything = model.VariableOption(selected=True, text="All", value="$__all")
            found.multi(True).include_all(True).all_value(".*").current(everything)
        return found


class Page:
    """One dashboard, row by row."""

    def __init__(
        self, uid: str, title: str, about: str, variables: Sequence[Variable] = (), *, marks: str = ""
    ) -> None:
        """`marks` is the selector of the alerts that are drawn into the time series."""
        source = dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        found = dashboard.Dashboard(title).uid(uid).description(about).tags([TAG]).readonly()
        found.refresh("10s").time("now-1h", "now").timezone("browser")
        found.tooltip(model.DashboardCursorSync.CROSSHAIR)
        found.with_variable(source)
        for variable in variables:
            found.with_variable(variable.build())
        found.link(
            dashboard.DashboardLink("Taktline")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        found.annotation(
            dashboard.AnnotationQuery()
            .name("Alerts")
            .datasource(DATASOURCE)
            .enable(True)
            .icon_color("red")
            .expr(f'ALERTS{{alertname=~"Taktline.*",alertstate="firing"{marks}}}')
        )
        self._dashboard = found
        self._ids = 0

    def row(self, title: str, *panels: Panel) -> Page:
        """A heading and the panels under it, placed from left to right."""
        self._dashboard.with_row(dashboard.Row(title).id(self._next_id()))
        for panel in panels:
            self._dashboard.with_panel(panel.id(self._next_id()))
        return self

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def build(self) -> model.Dashboard:
        """The finished dashboard."""
        return self._dashboard.build()


POLICY = Variable("policy", slo.OBJECTIVE, "Policy", several=False)
POLICIES = Variable("policy", slo.OBJECTIVE, "Policies")
