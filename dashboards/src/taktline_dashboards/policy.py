"""One policy: which term of its control budget breaks, and why."""

from __future__ import annotations

from taktline_protocol import metrics, slo

from taktline_dashboards.page import POLICY, Page
from taktline_dashboards.panels import BAD, GOOD, WARN, Query, heat_map, scatter, single, time_series
from taktline_dashboards.queries import mean, quantile, rate, roofline_x, roofline_y, selected, share
from taktline_dashboards.scales import BURN_STEPS, CAUSE_COLOURS, LEFT_STEPS, ON_TIME_STEPS, STATE_COLOURS, TERM_COLOURS

_CHOSEN = selected(policy="$policy")
_BUDGET = Query(f"max({slo.CONTROL_BUDGET}{_CHOSEN})", "control budget")


def page() -> Page:
    """The policy detail."""
    found = Page(
        slo.DASHBOARD_POLICY,
        "Taktline / Policy",
        "One policy as its robots see it: on time or not, the five terms of the critical path, and what causes them.",
        [POLICY],
        marks=',policy=~"$policy"',
    )
    _now(found)
    _critical_path(found)
    _queue_and_batches(found)
    _roofline(found)
    _workers(found)
    _streams(found)
    return found


def _now(found: Page) -> None:
    one_hour, budget = f"{slo.error_ratio('1h')}{_CHOSEN}", f"{slo.ERROR_BUDGET}{_CHOSEN}"
    found.row(
        "Is it on time?",
        single(
            "On time",
            "Last 5 minutes; the objective is in the PolicyDeployment.",
            Query(f"1 - {slo.error_ratio('5m')}{_CHOSEN}"),
            unit="percentunit",
            steps=ON_TIME_STEPS,
            decimals=2,
        ),
        single(
            "Error budget left",
            "Of the SLO period; below 0 the objective is missed.",
            Query(f"{slo.BUDGET_LEFT}{_CHOSEN}"),
            unit="percentunit",
            steps=LEFT_STEPS,
            decimals=1,
        ),
        single(
            "Burn, 1 h",
            "How many times faster than evenly the error budget went within the last hour.",
            Query(f"{one_hour} / on(policy) group_left() {budget}"),
            unit="none",
            steps=BURN_STEPS,
            decimals=1,
        ),
        single(
            "L_critical p99",
            "99% of the answers took no longer, from capture to actuation.",
            Query(quantile(0.99, metrics.CRITICAL_PATH, selector=_CHOSEN)),
            unit="ms",
        ),
        single("Control budget", "The time that a robot has.", Query(f"{slo.CONTROL_BUDGET}{_CHOSEN}"), unit="ms"),
        single(
            "Chunks in time",
            "Goodput, a second.",
            Query(rate(metrics.GOODPUT, selector=_CHOSEN)),
            unit="reqps",
            decimals=1,
        ),
    )


def _critical_path(found: Page) -> None:
    term = metrics.LABEL_TERM
    found.row(
        "Which term of the control budget?",
        time_series(
            "The five terms, mean",
            "Mean of each term of the answered observations, stacked: their sum is the mean L_critical. The dashed line"
            " is the control budget.",
            Query(mean(metrics.LATENCY_TERM, term, _CHOSEN), "{{term}}"),
            _BUDGET,
            unit="ms",
            stacked=True,
            limit=_BUDGET.legend,
            colours=TERM_COLOURS,
        ),
        heat_map(
            "Control margin",
            "M_ctrl = budget - L_critical of each answer. Below 0 the chunk was late.",
            f"sum by (le) (increase({metrics.MARGIN}_bucket{_CHOSEN}[$__rate_interval]))",
            unit="ms",
        ),
        time_series(
            "The five terms, p99",
            "Tails do not add up; the tallest is where to look.",
            Query(quantile(0.99, metrics.LATENCY_TERM, term, _CHOSEN), "{{term}}"),
            Query(quantile(0.99, metrics.CRITICAL_PATH, selector=_CHOSEN), "L_critical"),
            _BUDGET,
            unit="ms",
            limit=_BUDGET.legend,
            colours={**TERM_COLOURS, "L_critical": "text"},
        ),
        time_series(
            "Misses by cause",
            "The first term with which the budget was gone; refused: no chunk at all.",
            Query(rate(metrics.DEADLINE_MISSES, "cause", _CHOSEN), "{{cause}}"),
            unit="reqps",
            stacked=True,
            colours=CAUSE_COLOURS,
            width=6,
        ),
        time_series(
            "Turned away, by code",
            "Sound observations without a chunk. deadline_unreachable: more load than capacity. worker_unavailable: no"
            " worker. worker_failed: a batch was lost.",
            Query(rate(metrics.REFUSED, metrics.LABEL_CODE, _CHOSEN), "{{code}}"),
            unit="reqps",
            width=6,
        ),
        time_series(
            "All requests, by outcome",
            "Requests of this policy by outcome, client errors included.",
            Query(rate(metrics.REQUESTS, metrics.LABEL_CODE, _CHOSEN), "{{code}}"),
            unit="reqps",
            width=12,
            height=6,
        ),
        time_series(
            "Margin that 99% and 50% of the answers exceed",
            "Below 0 is late.",
            Query(quantile(0.01, metrics.MARGIN, selector=_CHOSEN), "99% exceed"),
            Query(quantile(0.5, metrics.MARGIN, selector=_CHOSEN), "50% exceed"),
            Query("vector(0)", "late"),
            unit="ms",
            minimum=None,
            limit="late",
            height=6,
        ),
    )


def _queue_and_batches(found: Page) -> None:
    by_pool = metrics.LABEL_POOL
    padding = f'{_CHOSEN[:-1]},{metrics.LABEL_ROWS}="padding"}}'
    tail = f'{_CHOSEN[:-1]},{metrics.LABEL_QUANTILE}="0.5"}}'
    found.row(
        "Queue and batches",
        time_series(
            "Waiting and on a worker",
            "Observations in the deadline queue, and those in a batch that is being computed.",
            Query(f"sum({metrics.QUEUE_DEPTH}{_CHOSEN})", "waiting"),
            Query(f"sum({metrics.IN_FLIGHT}{_CHOSEN})", "on a worker"),
            unit="none",
            width=8,
        ),
        time_series(
            "Batch size",
            "Mean number of observations that share an inference, and the largest tenth.",
            Query(mean(metrics.BATCH_SIZE, by_pool, _CHOSEN), "{{pool}} mean"),
            Query(f"ceil({quantile(0.9, metrics.BATCH_SIZE, by_pool, _CHOSEN)})", "{{pool}} p90"),
            unit="none",
            width=8,
        ),
        time_series(
            "Padding",
            "Share of the engine's rows that fill up a bucket; buckets that fit the fleet better save time.",
            Query(
                share(rate(metrics.BATCH_ROWS, by_pool, padding), rate(metrics.BATCH_ROWS, by_pool, _CHOSEN)),
                "{{pool}}",
            ),
            unit="percentunit",
            maximum=1.0,
            width=8,
        ),
        time_series(
            "T_sync by batch",
            "Time of a whole batch as the queue predicts it now: what the batch size is chosen by.",
            Query(f"max by (pool, batch) ({metrics.T_SYNC_PREDICTED}{tail})", "{{pool}} B={{batch}}"),
            unit="ms",
            width=8,
        ),
        time_series(
            "T_sync, measured over predicted",
            "Above 1 a worker is slower than its table says; the table follows within seconds.",
            Query(mean(metrics.T_SYNC_RATIO, by_pool, _CHOSEN), "{{pool}} mean"),
            Query(quantile(0.99, metrics.T_SYNC_RATIO, by_pool, _CHOSEN), "{{pool}} p99"),
            unit="none",
            width=8,
        ),
        time_series(
            "Replaced by a newer observation",
            "Queued observations whose robot sent a newer one: work saved, not a miss.",
            Query(rate(metrics.SUPERSEDED, selector=_CHOSEN), "superseded"),
            unit="reqps",
            width=8,
        ),
        time_series(
            "Hedged from silent workers",
            "Observations that were sent to another worker as theirs did not answer, and those that the other one"
            " answered first. Many of them: a worker stalls without failing.",
            Query(rate(metrics.HEDGES, metrics.LABEL_RESULT, _CHOSEN), "{{result}}"),
            unit="reqps",
            width=8,
        ),
        time_series(
            "Made cheaper rather than refused",
            "Chunks with fewer solver steps, fewer actions, or of a smaller policy, where spec.degrade allows it: there"
            " was no time for full quality. For long: add workers.",
            Query(rate(metrics.DEGRADED, metrics.LABEL_KIND, _CHOSEN), "{{kind}}"),
            unit="reqps",
            width=8,
        ),
    )


def _roofline(found: Page) -> None:
    found.row(
        "Control-time roofline",
        scatter(
            "X-Y",
            "Left of X = 1 the engine bounds the pace: a faster pool or fewer solver steps help. Right of it the"
            " robots' motion does. Y is the share of the cycle in which a robot moves; below 1 it waits.",
            Query(roofline_x(_CHOSEN), "X = L_env / L_inference"),
            Query(roofline_y(_CHOSEN), "Y = L_env / L_control"),
            labels=["policy"],
        ),
        time_series(
            "X and Y over time",
            "X = L_env / L_inference, Y = L_env / L_control.",
            Query(roofline_x(_CHOSEN), "X"),
            Query(roofline_y(_CHOSEN), "Y"),
            Query("vector(1)", "bound"),
            unit="none",
            limit="bound",
        ),
    )


def _workers(found: Page) -> None:
    phase = metrics.LABEL_PHASE
    parts = f'{_CHOSEN[:-1]},{phase}!="total"}}'
    found.row(
        "Workers",
        time_series(
            "Workers by state",
            "As the gateways see them: suspended failed and rests, down cannot be reached.",
            Query(f"sum by (state) (max by (pool, state) ({metrics.WORKERS_BY_STATE}{_CHOSEN}))", "{{state}}"),
            unit="none",
            stacked=True,
            colours=STATE_COLOURS,
            width=8,
        ),
        time_series(
            "Inside a batch, mean",
            "Mean time of each phase in the worker.",
            Query(mean(metrics.WORKER_PHASE, phase, parts), "{{phase}}"),
            unit="ms",
            stacked=True,
            width=8,
        ),
        time_series(
            "Engine busy",
            "Share of the time in which the engine runs, mean over the workers. Near 1: no room for more robots.",
            Query(f"avg(rate({metrics.WORKER_BUSY}{_CHOSEN}[$__rate_interval]))", "busy"),
            unit="percentunit",
            maximum=1.0,
            width=8,
        ),
        single(
            "Batches dropped, last hour",
            "Batches that a worker did not begin: their deadline had passed, or the gateway was gone.",
            Query(f"sum(increase({metrics.WORKER_DROPPED}{_CHOSEN}[1h]))"),
            unit="none",
            steps=((None, GOOD), (1.0, WARN), (100.0, BAD)),
            width=6,
            decimals=0,
        ),
        time_series(
            "Observations in the workers, by outcome",
            "ok, or the error code of what a worker could not answer.",
            Query(rate(metrics.WORKER_ITEMS, metrics.LABEL_CODE, _CHOSEN), "{{code}}"),
            unit="reqps",
            width=6,
            height=6,
        ),
        time_series(
            "T_sync as measured at start",
            "Median by batch; compare with what the queue predicts now.",
            Query(f'max by (batch) ({metrics.WORKER_CALIBRATION}{_CHOSEN[:-1]},quantile="0.5"}})', "B={{batch}}"),
            unit="ms",
            width=6,
            height=6,
        ),
        time_series(
            "Start of a worker",
            "How long each stage of the last start took: what a replacement costs.",
            Query(f"max by (stage) ({metrics.WORKER_START}{_CHOSEN})", "{{stage}}"),
            unit="s",
            width=6,
            height=6,
        ),
    )


def _streams(found: Page) -> None:
    found.row(
        "Streams",
        time_series(
            "Robots connected",
            "By stream; robots that ask request by request are not among them.",
            Query(f"sum({metrics.STREAMS}{_CHOSEN})", "streams"),
            unit="none",
            width=6,
        ),
        time_series(
            "Observations by stream",
            "keyframe carries every camera whole, delta refers to what is known already.",
            Query(rate(metrics.STREAM_OBSERVATIONS, metrics.LABEL_KIND, _CHOSEN), "{{kind}}"),
            unit="reqps",
            stacked=True,
            width=6,
        ),
        time_series(
            "Bytes by stream",
            "Frames received and sent.",
            Query(rate(metrics.STREAM_BYTES, metrics.LABEL_KIND, _CHOSEN), "{{kind}}"),
            unit="Bps",
            width=6,
        ),
        time_series(
            "Sessions that began",
            "moved came from another gateway; lost was not found and sends its keyframes anew.",
            Query(rate(metrics.STREAM_SESSIONS, metrics.LABEL_RESULT, _CHOSEN), "{{result}}"),
            unit="reqps",
            stacked=True,
            width=6,
        ),
    )
