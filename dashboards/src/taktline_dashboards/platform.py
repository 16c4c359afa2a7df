"""The platform itself: operator, its conversation with the API server, and the gateway processes."""

from __future__ import annotations

from taktline_protocol import metrics, slo

from taktline_dashboards.page import Page
from taktline_dashboards.panels import BAD, GOOD, WARN, Query, rows, single, time_series
from taktline_dashboards.queries import increase, quantile, rate

_WRITES = f'{{{metrics.LABEL_VERB}!="GET",{metrics.LABEL_KIND}!="Lease"}}'
_OPERATOR = f"and on(instance) {metrics.OPERATOR_LEADS}"
_GATEWAY = f"and on(instance) {metrics.BUILD}"


def page() -> Page:
    """The operator page."""
    found = Page(
        slo.DASHBOARD_OPERATOR,
        "Taktline / Operator and gateways",
        "Is every PolicyDeployment as it should be, does the API server answer, do the gateways live.",
    )
    _now(found)
    _policies(found)
    _reconciliation(found)
    _processes(found)
    return found


def _now(found: Page) -> None:
    condition = metrics.POLICY_CONDITION
    found.row(
        "Now",
        single(
            "Operators that work",
            "Exactly one: the others stand by for it.",
            Query(f"sum({metrics.OPERATOR_LEADS})"),
            unit="none",
            steps=((None, BAD), (1.0, GOOD), (2.0, BAD)),
        ),
        single(
            "Policies not available",
            "PolicyDeployments without a worker that serves.",
            Query(f'count({condition}{{condition="Available"}} == 0) or vector(0)'),
            unit="none",
            steps=((None, GOOD), (1.0, BAD)),
        ),
        single(
            "Policies degraded",
            "PolicyDeployments of which a worker fails.",
            Query(f'count({condition}{{condition="Degraded"}} == 1) or vector(0)'),
            unit="none",
            steps=((None, GOOD), (1.0, WARN)),
        ),
        single(
            "Reconciliation p99",
            "From taking a policy off the queue to the last write, last 5 minutes.",
            Query(quantile(0.99, metrics.OPERATOR_RECONCILE, window="5m")),
            unit="s",
            steps=((None, GOOD), (2.0, WARN), (10.0, BAD)),
            decimals=2,
        ),
        single(
            "API server silent for",
            "Time since it last answered a list or a lease renewal; the longest of the operators.",
            Query(f"max({metrics.OPERATOR_SILENCE})"),
            unit="s",
            steps=((None, GOOD), (120.0, WARN), (240.0, BAD)),
            decimals=0,
        ),
        single(
            "Writes, last hour",
            "Writes to the API server but for the lease: 0 while nothing changes.",
            Query(increase(metrics.OPERATOR_REQUESTS, "", _WRITES, "1h")),
            unit="none",
            decimals=0,
        ),
    )


def _policies(found: Page) -> None:
    owner = "namespace, policy"
    condition = metrics.POLICY_CONDITION
    found.row(
        "PolicyDeployments",
        rows(
            "What is wrong",
            "Conditions that are not as they should be, with their reason; kubectl describe pd has the sentence.",
            {
                "Value": f'{condition}{{condition=~"Accepted|Available"}} < 1'
                f' or {condition}{{condition="Degraded"}} == 1'
                f' or {condition}{{condition="Progressing",reason="Stalled"}} == 0',
            },
            labels=["namespace", "policy", "condition", "reason"],
            width=12,
        ),
        time_series(
            "Workers",
            "Desired, built from the present spec, and ready; all pools.",
            Query(f"sum by (state) ({metrics.POLICY_REPLICAS})", "{{state}}"),
            unit="none",
            width=6,
        ),
        time_series(
            "Rollouts under way",
            "PolicyDeployments with a candidate revision.",
            Query(f'count({metrics.POLICY_REVISION}{{track="candidate"}}) or vector(0)', "candidates"),
            Query(f"count(count by ({owner}) ({metrics.POLICY_REVISION}))", "policies"),
            unit="none",
            width=6,
        ),
    )


def _reconciliation(found: Page) -> None:
    verb, code = metrics.LABEL_VERB, metrics.LABEL_CODE
    found.row(
        "Reconciliation and the API server",
        time_series(
            "Reconciliations",
            "done; api_error comes back by itself; failed is a fault of the operator.",
            Query(rate(metrics.OPERATOR_RECONCILES, metrics.LABEL_RESULT), "{{result}}"),
            unit="ops",
            stacked=True,
            width=8,
            colours={"done": GOOD, "api_error": WARN, "failed": BAD},
        ),
        time_series(
            "Time of a reconciliation",
            "API requests included.",
            Query(quantile(0.5, metrics.OPERATOR_RECONCILE), "p50"),
            Query(quantile(0.99, metrics.OPERATOR_RECONCILE), "p99"),
            unit="s",
            width=8,
        ),
        time_series(
            "Policies that wait",
            "For a free reconciler.",
            Query(f"sum({metrics.OPERATOR_QUEUE})", "queue"),
            unit="none",
            width=8,
        ),
        time_series(
            "Requests",
            "To the API server, by method; watches are not among them.",
            Query(rate(metrics.OPERATOR_REQUESTS, verb), "{{verb}}"),
            unit="reqps",
            stacked=True,
            width=8,
        ),
        time_series(
            "Answers of the API server",
            "By status. 409: a conflict, tried again. 429: throttled. 0: no answer.",
            Query(rate(metrics.OPERATOR_REQUESTS, code), "{{code}}"),
            unit="reqps",
            width=8,
        ),
        time_series(
            "Time of a request, p99",
            "By method.",
            Query(quantile(0.99, metrics.OPERATOR_REQUEST, verb), "{{verb}}"),
            unit="s",
            width=8,
        ),
    )


def _processes(found: Page) -> None:
    found.row(
        "Processes",
        time_series(
            "Memory",
            "Resident, of operators and gateways.",
            Query(f"process_resident_memory_bytes {_OPERATOR}", "operator {{instance}}"),
            Query(f"process_resident_memory_bytes {_GATEWAY}", "gateway {{instance}}"),
            unit="bytes",
            width=8,
        ),
        time_series(
            "CPU",
            "Cores used by operators and gateways; a gateway near 1 is full: add one.",
            Query(f"rate(process_cpu_seconds_total[$__rate_interval]) {_OPERATOR}", "operator {{instance}}"),
            Query(f"rate(process_cpu_seconds_total[$__rate_interval]) {_GATEWAY}", "gateway {{instance}}"),
            unit="none",
            width=8,
        ),
        time_series(
            "Requests by gateway",
            "How evenly robots are spread.",
            Query(rate(metrics.REQUESTS, "instance"), "{{instance}}"),
            unit="reqps",
            stacked=True,
            width=8,
        ),
    )
