"""Prometheus rules of one PolicyDeployment: ratios of its SLO, burn-rate alerts, and alerts that name the cause.

The SLI is the share of observations that missed their hand-off deadline; an observation without a deadline, a bad one
and one that its robot replaced are no events. Ratios over a day or more weigh each event alike: they sum the recorded
five-minute rates, which stays cheap and is not diluted by a night without robots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taktline_protocol import metrics, slo

from taktline_operator.slo_windows import INFO, PAGE, PERIODS, TICKET, BurnPair, Clock
from taktline_operator.spec import PolicyDeployment, Pool

Json = dict[str, Any]

RUNBOOKS = "https://taktline.dev/runbooks"
MIN_MISSES = 10
"""Fewer misses than this in the long window never alert: one late chunk of a test robot is no incident."""
CAUSE_FACTOR = 6.0  # a cause is named when it alone burns the budget this many times too fast
SLOWED_RATIO = 1.5
CAUSE_WINDOWS = ("5m", "30m")
DIRECT_WINDOWS = ("5m", "30m", "1h", "2h", "6h")  # short enough for a rate over the counters themselves
LATE_ALERTS = {"inference": slo.INFERENCE_LATE, "queue": slo.QUEUE_LATE, "transfer": slo.TRANSFER_LATE}


def policy_groups(
    policy: PolicyDeployment,
    *,
    period_days: int | None = None,
    runbooks: str = RUNBOOKS,
    clock: Clock | None = None,
) -> list[Json]:
    """Rule groups of a policy, as a Prometheus rule file and a PrometheusRule hold them.

    Args:
        period_days: the SLO period, one of `slo_windows.PERIODS`; None is the policy's own, slo.windowDays.
        runbooks: base URL of the runbook pages.
        clock: shortened windows for tests.
    """
    found = _Rules(policy, period_days or policy.spec.slo.window_days, runbooks, clock or Clock())
    prefix = f"taktline-{policy.namespace}-{policy.name}"
    return [
        {"name": f"{prefix}-slo", "interval": found.clock("30s"), "rules": [*found.ratios(), *found.facts()]},
        {"name": f"{prefix}-slo-period", "interval": found.clock("5m"), "rules": found.period_ratios()},
        {"name": f"{prefix}-alerts", "interval": found.clock("30s"), "rules": found.alerts()},
    ]


def alert(
    name: str,
    expr: str,
    *,
    hold: str,
    severity: str,
    summary: str,
    impact: str,
    dashboard: str,
    runbooks: str,
    labels: Json | None = None,
) -> Json:
    """One alerting rule. `dashboard` is the path of the page to open, `impact` says who feels it."""
    return {
        "alert": name,
        "expr": expr,
        "for": hold,
        "labels": {slo.LABEL_SEVERITY: severity, **(labels or {})},
        "annotations": {
            "summary": summary,
            "impact": impact,
            "dashboard": dashboard,
            "runbook_url": f"{runbooks}/{name}.md",
        },
    }


class _Rules:
    def __init__(self, policy: PolicyDeployment, period_days: int, runbooks: str, clock: Clock) -> None:
        self.policy = policy
        self.period_days = period_days
        self.runbooks = runbooks
        self.clock = clock
        self.pairs: tuple[BurnPair, ...] = PERIODS[period_days]
        self.objective = policy.spec.slo.on_time_objective
        self.budget = round(1.0 - self.objective, 12)
        self.labels = {
            metrics.LABEL_POLICY: policy.name,
            slo.LABEL_SLO: slo.SLO_ON_TIME,
            "namespace": policy.namespace,
        }
        self.of_policy = f'{metrics.LABEL_POLICY}="{policy.name}"'
        self.recorded = f'{{{self.of_policy},{slo.LABEL_SLO}="{slo.SLO_ON_TIME}"}}'

    def _record(self, name: str, expr: str, **labels: str) -> Json:
        return {"record": name, "expr": expr, "labels": self.labels | labels}

    def _rate(self, metric: str, window: str, more: str = "") -> str:
        return f"sum(rate({metric}{{{self.of_policy}{more}}}[{self.clock(window)}]))"

    def _misses(self, window: str) -> str:
        return f"({self._rate(metrics.DEADLINE_MISSES, window)} or vector(0))"

    def _events(self, window: str) -> str:
        return f"(({self._rate(metrics.GOODPUT, window)} or vector(0)) + {self._misses(window)})"

    def ratios(self) -> list[Json]:
        """Rates of events and misses, and the error ratio of the windows up to six hours."""
        rules = [
            self._record(slo.EVENTS_RATE, self._events("5m")),
            self._record(slo.MISSES_RATE, self._misses("5m")),
        ]
        for window in DIRECT_WINDOWS:  # without events there is no ratio, rather than one of 0 or NaN
            expr = f"{self._misses(window)} / ({self._events(window)} > 0)"
            rules.append(self._record(slo.error_ratio(window), expr))
        for window in CAUSE_WINDOWS:
            cause = metrics.LABEL_CAUSE
            counted = f"sum by ({cause}) (rate({metrics.DEADLINE_MISSES}{{{self.of_policy}}}[{self.clock(window)}]))"
            expr = f"{counted} / on() group_left() ({self._events(window)} > 0)"
            rules.append(self._record(slo.cause_ratio(window), expr))
        rules.append(self._record(slo.REVISION_MISSES, self._revision_misses()))
        current = f"{slo.error_ratio('5m')}{self.recorded} / {self.budget}"
        return [*rules, self._record(slo.CURRENT_BURN, current)]

    def facts(self) -> list[Json]:
        """What the spec says, as series that panels and other rules can use."""
        facts = [
            (slo.OBJECTIVE, self.objective),
            (slo.ERROR_BUDGET, self.budget),
            (slo.PERIOD_DAYS, self.period_days),
            (slo.CONTROL_BUDGET, self.policy.spec.slo.control_budget_ms),
        ]
        rules = [self._record(name, f"vector({value})") for name, value in facts]
        wanted = self.policy.spec.desired_replicas()
        pools = [
            self._record(slo.POOL_WANTED, f"vector({wanted[pool.name]})", **{metrics.LABEL_POOL: pool.name})
            for pool in self.policy.spec.pools
        ]
        return [*rules, *pools]

    def period_ratios(self) -> list[Json]:
        """The error ratio of a day, three days and the whole period, and what is left of the budget."""
        rules = []
        for window, length in (("1d", "1d"), ("3d", "3d"), ("period", f"{self.period_days}d")):
            misses = f"sum_over_time({slo.MISSES_RATE}{self.recorded}[{self.clock(length)}])"
            events = f"sum_over_time({slo.EVENTS_RATE}{self.recorded}[{self.clock(length)}])"
            rules.append(self._record(slo.error_ratio(window), f"{misses} / ({events} > 0)"))
        burn = f"{slo.error_ratio('period')}{self.recorded} / {self.budget}"
        left = f"1 - {slo.PERIOD_BURN}{self.recorded}"
        return [*rules, self._record(slo.PERIOD_BURN, burn), self._record(slo.BUDGET_LEFT, left)]

    def alerts(self) -> list[Json]:
        """Every alert of the policy."""
        causes = [self._late(cause, name) for cause, name in LATE_ALERTS.items()]
        pools = [
            self._pool_down(pool) for pool in self.policy.spec.pools if self.policy.spec.desired_replicas()[pool.name]
        ]
        return [
            self._burn(slo.BURN_FAST, PAGE, "2m"),
            self._burn(slo.BURN_SLOW, TICKET, "15m"),
            *causes,
            self._refusing(),
            *pools,
            self._worker_slowed(),
            self._revision_worse(),
            self._robots_silent(),
        ]

    def _alert(self, name: str, expr: str, hold: str, severity: str, summary: str, impact: str, **labels: str) -> Json:
        return alert(
            name,
            expr,
            hold=self.clock(hold),
            severity=severity,
            summary=summary,
            impact=impact,
            dashboard=f"/d/{slo.DASHBOARD_POLICY}?var-policy={self.policy.name}",
            runbooks=self.runbooks,
            labels=self.labels | labels,
        )

    def _enough(self, window: str, more: str = "") -> str:
        """At least `MIN_MISSES` misses in the window."""
        counted = f"sum(increase({metrics.DEADLINE_MISSES}{{{self.of_policy}{more}}}[{self.clock(window)}]))"
        return f"and on() ({counted} >= {MIN_MISSES})"

    def _burn(self, name: str, severity: str, hold: str) -> Json:
        pairs = [pair for pair in self.pairs if pair.severity == severity]
        parts = []
        for pair in pairs:
            threshold = f"{pair.factor(self.period_days) * self.budget:.6g}"
            short, long = (
                f"{slo.error_ratio(window)}{self.recorded} > {threshold}" for window in (pair.short, pair.long)
            )
            parts.append(f"({short} and {long} {self._enough(pair.long)})")
        spent = " or ".join(f"{100 * pair.budget_share:g}% of it in {pair.long}" for pair in pairs)
        return self._alert(
            name,
            "\nor\n".join(parts),
            hold,
            severity,
            f"{self.policy.name} misses its deadlines: {{{{ $value | humanizePercentage }}}} of the observations are"
            f" late (objective {100 * self.objective:g}% on time)",
            f"Robots of this policy stop or act on old chunks, and the error budget of {self.period_days} days goes"
            f" faster than {spent}.",
        )

    def _late(self, cause: str, name: str) -> Json:
        more = f',{metrics.LABEL_CAUSE}="{cause}"'
        threshold = f"{CAUSE_FACTOR * self.budget:.6g}"
        recorded = f"{self.recorded[:-1]}{more}}}"
        short, long = (f"{slo.cause_ratio(window)}{recorded} > {threshold}" for window in CAUSE_WINDOWS)
        words = {
            "inference": "the engine alone takes longer than the budget",
            "queue": "the engine would be in time, but observations wait too long for it",
            "transfer": "engine and queue are in time, but the way there and back is too long",
        }
        return self._alert(
            name,
            f"{short} and {long} {self._enough('30m', more)}",
            "2m",
            TICKET,
            f"{self.policy.name}: {words[cause]} ({{{{ $value | humanizePercentage }}}} of the observations)",
            f"The {cause} term breaks the control budget of {self.policy.spec.slo.control_budget_ms:g} ms.",
            term=cause,
        )

    def _refusing(self) -> Json:
        code = metrics.LABEL_CODE
        parts = [
            f"sum by ({code}) (rate({metrics.REFUSED}{{{self.of_policy}}}[{self.clock(window)}]))"
            f" / on() group_left() ({self._events(window)} > 0) > {CAUSE_FACTOR * self.budget:.6g}"
            for window in CAUSE_WINDOWS
        ]
        enough = self._enough("30m", f',{metrics.LABEL_CAUSE}="refused"')
        return self._alert(
            slo.REFUSING,
            f"({parts[0]}) and ({parts[1]}) {enough}",
            "2m",
            TICKET,
            f"{self.policy.name} turns away {{{{ $value | humanizePercentage }}}} of the observations with"
            " {{ $labels.code }}",
            "These robots get no chunk at all; deadline_unreachable means more load than capacity, worker_unavailable"
            " that no worker serves.",
        )

    def _pool_down(self, pool: Pool) -> Json:
        selector = f'{{{self.of_policy},{metrics.LABEL_POOL}="{pool.name}"}}'
        alone = len(self.policy.spec.pools) == 1
        # A pool that never served is a deployment in progress: its PolicyDeployment says so, nobody is paged.
        served = f"max(max_over_time({metrics.WORKERS}{selector}[{self.clock('7d')}])) >= 1"
        return self._alert(
            slo.POOL_DOWN,
            f"(max({metrics.WORKERS}{selector}) or vector(0)) < 1 and on() ({served}) and on() ({_gateway_up()})",
            "2m",
            PAGE if alone else TICKET,
            f"{self.policy.name}: pool {pool.name} has no worker that serves",
            "Every observation is refused." if alone else "The other pools carry its load as far as they can.",
            pool=pool.name,
        )

    def _worker_slowed(self) -> Json:
        by, window = f"{metrics.LABEL_POOL}, {metrics.LABEL_REVISION}, {metrics.LABEL_BATCH}", self.clock("10m")
        total, count = (
            f"sum by ({by}) (rate({metrics.T_SYNC}_{part}{{{self.of_policy}}}[{window}]))" for part in ("sum", "count")
        )
        predicted = f'{metrics.T_SYNC_PREDICTED}{{{self.of_policy},{metrics.LABEL_QUANTILE}="0.5"}}'
        best = f"min by ({by}) (min_over_time({predicted}[{self.clock('1d')}]))"
        # The queue's table follows a slower worker with care, so what is measured is compared, not what is predicted.
        slower = f"{total} / ({count} > 0) / ({best} > 0)"
        return self._alert(
            slo.WORKER_SLOWED,
            f"max by ({metrics.LABEL_POOL}, {metrics.LABEL_REVISION}) ({slower}) > {SLOWED_RATIO}",
            "5m",
            TICKET,
            f"{self.policy.name}: a worker of pool {{{{ $labels.pool }}}} takes {{{{ $value | humanize }}}} times as"
            " long for a batch as at its best of the last day",
            "Less capacity, and a longer inference term for every robot it serves.",
        )

    def _revision_misses(self) -> str:
        revision, window = metrics.LABEL_REVISION, self.clock("10m")
        of_revision = f'{{{self.of_policy},{revision}!=""}}'
        misses = f"sum by ({revision}) (rate({metrics.DEADLINE_MISSES}{of_revision}[{window}]))"
        on_time = f"sum by ({revision}) (rate({metrics.GOODPUT}{of_revision}[{window}]))"
        # `or` fills in the side that has no series yet: a revision that is always late, or never.
        late, kept = f"({misses} or {on_time} * 0)", f"({on_time} or {misses} * 0)"
        return f"{late} / ({late} + {kept} > 0)"

    def _revision_worse(self) -> Json:
        revision = metrics.LABEL_REVISION
        share = f"{slo.REVISION_MISSES}{self.recorded}"
        margin = max(0.01, CAUSE_FACTOR * self.budget)
        of_revision = f'{{{self.of_policy},{revision}!=""}}'
        counted = f"sum by ({revision}) (increase({metrics.DEADLINE_MISSES}{of_revision}[{self.clock('10m')}]))"
        return self._alert(
            slo.REVISION_WORSE,
            f"{share} > on() group_left() (min({share}) + {margin:.6g}) and on({revision}) ({counted} >= {MIN_MISSES})",
            "1m",
            TICKET,
            f"{self.policy.name}: revision {{{{ $labels.revision }}}} misses {{{{ $value | humanizePercentage }}}} of"
            " its deadlines, far more than the other revision that serves",
            "Robots that are routed to this revision act late.",
        )

    def _robots_silent(self) -> Json:
        now = f"{slo.EVENTS_RATE}{self.recorded} == 0"
        before = f"avg_over_time({slo.EVENTS_RATE}{self.recorded}[{self.clock('1h')}] offset {self.clock('15m')}) > 0.1"
        return self._alert(
            slo.ROBOTS_SILENT,
            f"{now} and {before} and on() ({_gateway_up()})",
            "10m",
            INFO,
            f"{self.policy.name}: no robot asks any more",
            "The end of a shift looks the same; within a shift robots or their network have stopped.",
        )


def _gateway_up() -> str:
    return f"count({metrics.BUILD}) > 0"


def rule_file(groups: Sequence[Json]) -> Json:
    """The content of a plain Prometheus rule file."""
    return {"groups": list(groups)}
