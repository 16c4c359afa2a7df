"""The page to open first: all policies of the factory on one screen."""

from __future__ import annotations

from taktline_protocol import metrics, slo

from taktline_dashboards.page import POLICIES, Page
from taktline_dashboards.panels import BAD, GOOD, WARN, Query, bars, rows, scatter, single, time_series
from taktline_dashboards.queries import quantile, rate, roofline_x, roofline_y, selected
from taktline_dashboards.scales import BURN_STEPS, CAUSE_COLOURS, LEFT_STEPS, ON_TIME_STEPS

_CHOSEN = selected(policy="$policy")
_FIRING = 'ALERTS{alertname=~"Taktline.*",alertstate="firing"'


def page() -> Page:
    """The fleet overview."""
    found = Page(
        slo.DASHBOARD_FLEET,
        "Taktline / Fleet",
        "Which policies keep their takt, how much error budget is left, and which term breaks where it is not kept.",
        [POLICIES],
    )
    found.row(
        "Now",
        single(
            "On time",
            "Chunks that left before their hand-off deadline over all observations that had one, last 5 minutes.",
            Query(f"1 - sum({slo.MISSES_RATE}{_CHOSEN}) / (sum({slo.EVENTS_RATE}{_CHOSEN}) > 0)"),
            unit="percentunit",
            steps=ON_TIME_STEPS,
            decimals=2,
        ),
        single(
            "Observations",
            "Observations with a deadline, a second.",
            Query(f"sum({slo.EVENTS_RATE}{_CHOSEN})"),
            unit="reqps",
            decimals=1,
        ),
        single(
            "Missed",
            "Observations that got no chunk in time, a second.",
            Query(f"sum({slo.MISSES_RATE}{_CHOSEN})"),
            unit="reqps",
            steps=((None, GOOD), (0.01, WARN), (1.0, BAD)),
            decimals=2,
        ),
        single(
            "Workers",
            "Workers that may get batches, over those that the PolicyDeployments want.",
            Query(f"sum(max by (policy, pool) ({metrics.WORKERS}{_CHOSEN})) / sum({slo.POOL_WANTED}{_CHOSEN})"),
            unit="percentunit",
            steps=((None, BAD), (0.999, GOOD)),
        ),
        single(
            "Pages open",
            "Alerts that wake somebody.",
            Query(f'count({_FIRING},severity="page"}}) or vector(0)'),
            unit="none",
            steps=((None, GOOD), (1.0, BAD)),
        ),
        single(
            "Tickets open",
            "Alerts that can wait for the working day.",
            Query(f'count({_FIRING},severity="ticket"}}) or vector(0)'),
            unit="none",
            steps=((None, GOOD), (1.0, WARN)),
        ),
    )
    found.row(
        "Policies",
        rows(
            "Policies",
            "Budget left: what remains of the SLO period's error budget. Burn 1h: how many times faster"
            " than evenly it went within the last hour.",
            {
                "On time 5m": f"1 - {slo.error_ratio('5m')}{_CHOSEN}",
                "On time 1h": f"1 - {slo.error_ratio('1h')}{_CHOSEN}",
                "Budget left": f"{slo.BUDGET_LEFT}{_CHOSEN}",
                "Burn 1h": f"{slo.error_ratio('1h')}{_CHOSEN} / on(policy) group_left() {slo.ERROR_BUDGET}{_CHOSEN}",
                "L_critical p99": quantile(0.99, metrics.CRITICAL_PATH, "policy", _CHOSEN),
                "Control budget": f"{slo.CONTROL_BUDGET}{_CHOSEN}",
                "Chunks/s": rate(metrics.GOODPUT, "policy", _CHOSEN),
                "Queue": f"sum by (policy) ({metrics.QUEUE_DEPTH}{_CHOSEN})",
                "Workers": f"sum by (policy) (max by (policy, pool) ({metrics.WORKERS}{_CHOSEN}))",
                "Wanted": f"sum by (policy) ({slo.POOL_WANTED}{_CHOSEN})",
            },
            labels=["policy"],
            units={
                "On time 5m": "percentunit",
                "On time 1h": "percentunit",
                "Budget left": "percentunit",
                "Burn 1h": "none",
                "L_critical p99": "ms",
                "Control budget": "ms",
                "Chunks/s": "none",
            },
            steps={
                "On time 5m": ON_TIME_STEPS,
                "On time 1h": ON_TIME_STEPS,
                "Budget left": LEFT_STEPS,
                "Burn 1h": BURN_STEPS,
            },
        ),
    )
    found.row(
        "Is the takt kept?",
        time_series(
            "On time by policy",
            "Share of observations whose chunk left before the hand-off deadline.",
            Query(f"1 - {slo.error_ratio('5m')}{_CHOSEN}", "{{policy}}"),
            unit="percentunit",
            minimum=None,
            maximum=1.0,
        ),
        time_series(
            "Misses by cause",
            "Each miss has one cause: the first term with which the budget was gone; refused: no chunk at all.",
            Query(rate(metrics.DEADLINE_MISSES, "cause", _CHOSEN), "{{cause}}"),
            unit="reqps",
            stacked=True,
            colours=CAUSE_COLOURS,
        ),
        time_series(
            "Error budget burn, 1 h",
            "1 spends the budget evenly over its period. Alerts look at this window and a short one together.",
            Query(
                f"{slo.error_ratio('1h')}{_CHOSEN} / on(policy) group_left() {slo.ERROR_BUDGET}{_CHOSEN}", "{{policy}}"
            ),
            unit="none",
        ),
        bars(
            "Error budget left",
            "What remains of the SLO period's budget; below 0 the objective is missed. Cut off at -100%.",
            Query(f"clamp_min({slo.BUDGET_LEFT}{_CHOSEN}, -1)", "{{policy}}"),
            unit="percentunit",
            steps=LEFT_STEPS,
            width=12,
            minimum=None,
            maximum=1.0,
        ),
    )
    found.row(
        "Is there enough of everything?",
        time_series(
            "Chunks in time",
            "Goodput by policy.",
            Query(rate(metrics.GOODPUT, "policy", _CHOSEN), "{{policy}}"),
            unit="reqps",
            stacked=True,
            width=8,
        ),
        time_series(
            "Workers that serve",
            "By policy and pool, as the gateways see them.",
            Query(f"max by (policy, pool) ({metrics.WORKERS}{_CHOSEN})", "{{policy}} {{pool}}"),
            unit="none",
            width=8,
        ),
        scatter(
            "Control-time roofline",
            "Left of 1 the engine bounds the pace and a faster pool helps; right of it the robots' own"
            " motion does, and more speed buys nothing. The height is the share of the cycle in which a robot moves.",
            Query(roofline_x(_CHOSEN), "X = L_env / L_inference"),
            Query(roofline_y(_CHOSEN), "Y = L_env / L_control"),
            labels=["policy"],
            width=8,
        ),
        time_series(
            "Open alerts",
            "Alerts that fire, by name.",
            Query(f"count by (alertname) ({_FIRING}}})", "{{alertname}}"),
            unit="none",
            width=24,
            height=6,
        ),
    )
    return found
