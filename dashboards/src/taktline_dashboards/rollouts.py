"""A change of a policy: which revision serves whom, and whether the new one is as good."""

from __future__ import annotations

from taktline_protocol import metrics, slo

from taktline_dashboards.page import POLICY, Page
from taktline_dashboards.panels import BAD, GOOD, WARN, Query, rows, time_series
from taktline_dashboards.queries import mean, quantile, rate, selected

_CHOSEN = selected(policy="$policy")
_REVISIONS = f'{_CHOSEN[:-1]},{metrics.LABEL_REVISION}!=""}}'
_BY = metrics.LABEL_REVISION


def page() -> Page:
    """The rollout page."""
    found = Page(
        slo.DASHBOARD_ROLLOUT,
        "Taktline / Rollout",
        "Revisions of one policy side by side: traffic, deadlines, latency. A bad one stands out.",
        [POLICY],
        marks=',policy=~"$policy"',
    )
    kept = rate(metrics.GOODPUT, _BY, _REVISIONS)
    missed = rate(metrics.DEADLINE_MISSES, _BY, _REVISIONS)
    found.row(
        "Who serves?",
        time_series(
            "Chunks by revision",
            "Chunks in time, by the revision that made them.",
            Query(kept, "{{revision}}"),
            unit="reqps",
            stacked=True,
            width=8,
        ),
        time_series(
            "Share of the traffic",
            "Of all observations that a worker answered.",
            Query(
                f"({kept} + ({missed} or {kept} * 0)) / on() group_left() (sum({kept}) + (sum({missed}) or vector(0)))",
                "{{revision}}",
            ),
            unit="percentunit",
            maximum=1.0,
            width=8,
        ),
        rows(
            "Revisions",
            "One row a revision that answered within the last minutes.",
            {
                "Chunks/s": kept,
                "Late": f"{slo.REVISION_MISSES}{_CHOSEN}",
                "L_critical p99": quantile(0.99, metrics.CRITICAL_PATH, _BY, _REVISIONS),
                "Inference p50": quantile(
                    0.5, metrics.LATENCY_TERM, _BY, f'{_REVISIONS[:-1]},{metrics.LABEL_TERM}="inference"}}'
                ),
            },
            labels=["revision"],
            units={"Chunks/s": "none", "Late": "percentunit", "L_critical p99": "ms", "Inference p50": "ms"},
            steps={"Late": ((None, GOOD), (0.001, WARN), (0.01, BAD))},
            width=8,
        ),
    )
    candidate = selected(policy="$policy", track="candidate")
    found.row(
        "The rollout itself",
        time_series(
            "Robots that the candidate serves",
            "Percent, by phase: Shadow compares answers that no robot uses, Shifting moves robots step by step.",
            Query(f"{metrics.POLICY_ROLLOUT}{_CHOSEN}", "{{phase}}"),
            unit="percent",
            maximum=100.0,
            height=6,
        ),
        rows(
            "Phase",
            "Where the rollout stands, the reason where it was taken back; kubectl describe pd has the sentence.",
            {"Candidate serves %": f"{metrics.POLICY_ROLLOUT}{_CHOSEN}"},
            labels=["namespace", "policy", "phase", "reason"],
            width=7,
            height=6,
        ),
        rows(
            "Candidate",
            "The revision on trial, as its PolicyDeployment names it.",
            {"On trial": f"{metrics.POLICY_REVISION}{candidate}"},
            labels=["policy", "revision"],
            width=5,
            height=6,
        ),
    )
    found.row(
        "Is the new one as good?",
        time_series(
            "Late answers by revision",
            "Share of each revision's own answers that came after the deadline.",
            Query(f"{slo.REVISION_MISSES}{_CHOSEN}", "{{policy}} {{revision}}"),
            unit="percentunit",
        ),
        time_series(
            "L_critical p99 by revision",
            "From capture to actuation.",
            Query(quantile(0.99, metrics.CRITICAL_PATH, _BY, _REVISIONS), "{{revision}}"),
            Query(f"max({slo.CONTROL_BUDGET}{_CHOSEN})", "control budget"),
            unit="ms",
            limit="control budget",
        ),
        time_series(
            "Inference by revision, mean",
            "The engine's part of it.",
            Query(
                mean(metrics.LATENCY_TERM, _BY, f'{_REVISIONS[:-1]},{metrics.LABEL_TERM}="inference"}}'), "{{revision}}"
            ),
            unit="ms",
        ),
        time_series(
            "Margin that 99% of the answers exceed, by revision",
            "Below 0 is late.",
            Query(quantile(0.01, metrics.MARGIN, _BY, _REVISIONS), "{{revision}}"),
            Query("vector(0)", "late"),
            unit="ms",
            minimum=None,
            limit="late",
        ),
    )
    found.row(
        "Did robots notice?",
        time_series(
            "Requests that failed",
            "Sound observations that the platform turned away; a rollout should add none.",
            Query(rate(metrics.REFUSED, metrics.LABEL_CODE, _CHOSEN), "{{code}}"),
            unit="reqps",
            width=8,
        ),
        time_series(
            "Workers that serve",
            "By pool, as the gateways see them, beside what the PolicyDeployment wants.",
            Query(f"max by (pool) ({metrics.WORKERS}{_CHOSEN})", "{{pool}}"),
            Query(f"sum by (pool) ({slo.POOL_WANTED}{_CHOSEN})", "{{pool}} wanted"),
            unit="none",
            width=8,
        ),
        time_series(
            "Workers by revision",
            "Worker processes that report, by what they serve.",
            Query(f"count by (revision) ({metrics.WORKER_INFO}{_CHOSEN})", "{{revision}}"),
            unit="none",
            stacked=True,
            width=8,
        ),
    )
    return found
