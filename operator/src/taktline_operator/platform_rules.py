"""Prometheus alerts of the installation itself, the same for every factory: gateways, operator, GPUs."""

from __future__ import annotations

from typing import Any

from taktline_protocol import metrics, outside, slo

from taktline_operator.slo_rules import RUNBOOKS, alert
from taktline_operator.slo_windows import PAGE, TICKET, Clock

Json = dict[str, Any]

GATEWAY_CORES = 0.9  # a gateway is one process with one loop: near one core its queue decisions come late
HOT_C = 85
CERTIFICATE_DAYS = 7  # renewal begins with a third of its time left, a month before the end of one of three
SILENT_S = 240  # the operator's own /healthz fails from here on


def platform_groups(*, runbooks: str = RUNBOOKS, clock: Clock | None = None) -> list[Json]:
    """Rule groups of the installation, as a Prometheus rule file and a PrometheusRule hold them."""
    found = _Platform(runbooks, clock or Clock())
    return [
        {
            "name": "taktline-platform",
            "interval": found.clock("30s"),
            "rules": [*found.gateways(), *found.operators(), *found.policies(), *found.gpus()],
        }
    ]


class _Platform:
    def __init__(self, runbooks: str, clock: Clock) -> None:
        self.runbooks = runbooks
        self.clock = clock

    def _alert(self, name: str, expr: str, hold: str, severity: str, dashboard: str, summary: str, impact: str) -> Json:
        return alert(
            name,
            expr,
            hold=self.clock(hold),
            severity=severity,
            summary=summary,
            impact=impact,
            dashboard=f"/d/{dashboard}",
            runbooks=self.runbooks,
        )

    def gateways(self) -> list[Json]:
        """Alerts of the gateway processes."""
        cores = f"rate(process_cpu_seconds_total[{self.clock('5m')}]) and on(instance) {metrics.BUILD}"
        return [
            self._alert(
                slo.GATEWAY_DOWN,
                f"absent({metrics.BUILD})",
                "1m",
                PAGE,
                slo.DASHBOARD_OPERATOR,
                "no gateway answers Prometheus",
                "Either no robot is served, or nobody would see it: alerts of policies rest on these series.",
            ),
            self._alert(
                slo.GATEWAY_FULL,
                f"({cores}) > {GATEWAY_CORES}",
                "10m",
                TICKET,
                slo.DASHBOARD_OPERATOR,
                "gateway {{ $labels.instance }} uses {{ $value | humanize }} of its one core",
                "The queue and transfer terms of every policy grow; add a gateway.",
            ),
            self._alert(
                slo.SESSION_STORE_DOWN,
                f"min({metrics.SESSION_STORE_UP}) == 0",
                "2m",
                TICKET,
                slo.DASHBOARD_OPERATOR,
                "a gateway cannot reach the session store",
                "Streams go on; a robot whose gateway dies now has to send its keyframes anew.",
            ),
        ]

    def operators(self) -> list[Json]:
        """Alerts of the operator."""
        result = metrics.LABEL_RESULT
        window = self.clock("15m")
        bad = f'sum(increase({metrics.OPERATOR_RECONCILES}{{{result}!="done"}}[{window}]))'
        every = f"sum(increase({metrics.OPERATOR_RECONCILES}[{window}]))"
        return [
            self._alert(
                slo.OPERATOR_DOWN,
                f"(sum({metrics.OPERATOR_LEADS}) or vector(0)) < 1",
                "5m",
                TICKET,
                slo.DASHBOARD_OPERATOR,
                "no operator works",
                "Robots are served on; nothing is replaced, scaled, rolled out or rolled back.",
            ),
            self._alert(
                slo.OPERATOR_DEAF,
                f"max({metrics.OPERATOR_SILENCE}) > {SILENT_S} or max({metrics.OPERATOR_WATCH_DEAD}) == 1",
                "2m",
                TICKET,
                slo.DASHBOARD_OPERATOR,
                "the operator does not hear the cluster",
                "Changes of PolicyDeployments and lost workers go unnoticed.",
            ),
            self._alert(
                slo.RECONCILE_FAILING,
                f"{bad} / ({every} > 0) > 0.1 and {bad} >= 10",
                "5m",
                TICKET,
                slo.DASHBOARD_OPERATOR,
                "{{ $value | humanizePercentage }} of the reconciliations fail",
                "Some PolicyDeployments do not become what they say.",
            ),
            self._alert(
                slo.CERTIFICATE_ENDING,
                f"min({metrics.OPERATOR_CERTIFICATE}) < {CERTIFICATE_DAYS}",
                "1h",
                TICKET,
                slo.DASHBOARD_OPERATOR,
                "the admission webhook's certificate runs out in {{ $value | humanize }} days and is not renewed",
                "From then on edits are refused or pass unchecked, as webhook.failurePolicy says; robots are served.",
            ),
        ]

    def policies(self) -> list[Json]:
        """Alerts from the conditions of PolicyDeployments."""
        condition = metrics.POLICY_CONDITION
        where = "PolicyDeployment {{ $labels.namespace }}/{{ $labels.policy }}"
        return [
            self._alert(
                slo.POLICY_UNAVAILABLE,
                f'{condition}{{condition="Available",reason!="ScaledToZero"}} == 0',
                "15m",
                TICKET,
                f"{slo.DASHBOARD_POLICY}?var-policy={{{{ $labels.policy }}}}",
                f"{where} has no worker that serves: {{{{ $labels.reason }}}}",
                "Its robots get no chunks.",
            ),
            self._alert(
                slo.POLICY_DEGRADED,
                f'{condition}{{condition="Degraded"}} == 1',
                "10m",
                TICKET,
                f"{slo.DASHBOARD_POLICY}?var-policy={{{{ $labels.policy }}}}",
                f"{where}: a worker fails ({{{{ $labels.reason }}}})",
                "Less capacity than wanted; a rollout may stand still.",
            ),
            self._alert(
                slo.ROLLED_BACK,
                f'{metrics.POLICY_ROLLOUT}{{phase=~"RollingBack|RolledBack",reason!~"Superseded|Aborted"}} >= 0',
                "0s",
                TICKET,
                f"{slo.DASHBOARD_ROLLOUT}?var-policy={{{{ $labels.policy }}}}",
                f"{where}: the new revision was taken back ({{{{ $labels.reason }}}})",
                "The old revision serves on; the change that somebody wanted is not there.",
            ),
            self._delivery(where),
        ]

    def _delivery(self, where: str) -> Json:
        """A checkpoint on its way that has come no further within half an hour; a slow one moves by a percent."""
        percent, window = metrics.POLICY_DELIVERY, self.clock("30m")
        return self._alert(
            slo.DELIVERY_STUCK,
            f"{percent} < 100 and {percent} == {percent} offset {window} and changes({percent}[{window}]) == 0",
            "5m",
            TICKET,
            f"{slo.DASHBOARD_POLICY}?var-policy={{{{ $labels.policy }}}}",
            f"{where}: the checkpoint stands at {{{{ $value }}}} percent on its way to a node",
            "The workers that wait for it do not start; those that serve go on.",
        )

    def gpus(self) -> list[Json]:
        """Alerts from NVIDIA's DCGM exporter; without one they never fire."""
        where = "GPU {{ $labels.gpu }} of {{ $labels.Hostname }}"
        remapped = f"increase({outside.DCGM_UNCORRECTABLE}[{self.clock('1h')}]) > 0"
        return [
            self._alert(
                slo.GPU_XID,
                # The exporter shows the last code for good: a change within the window is an event.
                f"{outside.DCGM_XID} > 0 and changes({outside.DCGM_XID}[{self.clock('15m')}]) > 0",
                "0s",
                TICKET,
                slo.DASHBOARD_POOL,
                f"{where} reported Xid {{{{ $value }}}}",
                "Workers on it may have lost batches, or hang.",
            ),
            self._alert(
                slo.GPU_MEMORY_FAILING,
                f"{outside.DCGM_ROW_REMAP_FAILURE} > 0 or {remapped}",
                "0s",
                TICKET,
                slo.DASHBOARD_POOL,
                f"{where} has failing memory",
                "The next uncorrectable error ends its worker; after a failed remap the GPU has to be replaced.",
            ),
            self._alert(
                slo.GPU_HOT,
                f"{outside.DCGM_GPU_TEMP} > {HOT_C}",
                "5m",
                TICKET,
                slo.DASHBOARD_POOL,
                f"{where} is {{{{ $value }}}} degrees warm",
                "It lowers its clock, and every batch on it takes longer.",
            ),
        ]
