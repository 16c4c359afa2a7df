"""Names of recorded series and alerts, shared by the operator that writes the rules and the dashboards that show them.

The recorded names follow the convention of the common SLO generators (`slo:sli_error:ratio_rate5m` and so on), so that
tools which know it know ours. Every series of a policy carries the labels `policy` and `slo`.
"""

from __future__ import annotations

SLO_ON_TIME = "on-time"
"""Value of the label `slo`: the share of observations that get their chunk before the hand-off deadline."""
LABEL_SLO = "slo"
LABEL_SEVERITY = "severity"

# What the ratios are made of; events are observations that had a deadline: on-time chunks and misses.
EVENTS_RATE = "slo:events:rate5m"
MISSES_RATE = "slo:misses:rate5m"
OBJECTIVE = "slo:objective:ratio"
ERROR_BUDGET = "slo:error_budget:ratio"
CURRENT_BURN = "slo:current_burn_rate:ratio"
PERIOD_BURN = "slo:period_burn_rate:ratio"
BUDGET_LEFT = "slo:period_error_budget_remaining:ratio"
PERIOD_DAYS = "slo:time_period:days"
CONTROL_BUDGET = "slo:control_budget:ms"
POOL_WANTED = "slo:pool_workers_wanted:count"

REVISION_MISSES = "slo:revision_misses:ratio_rate10m"
"""The share of a revision's own answers that were late; one series a revision."""

ERROR_WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")


def error_ratio(window: str) -> str:
    """The recorded share of observations that missed their deadline within `window`, or within `period`."""
    return f"slo:sli_error:ratio_rate{window}"


def cause_ratio(window: str) -> str:
    """The recorded share of observations that missed their deadline for one cause, a series a cause; 5m or 30m."""
    return f"slo:misses_by_cause:ratio_rate{window}"


# Alerts of one policy.
BURN_FAST = "TaktlineOnTimeBurnFast"
BURN_SLOW = "TaktlineOnTimeBurnSlow"
INFERENCE_LATE = "TaktlineInferenceLate"
QUEUE_LATE = "TaktlineQueueLate"
TRANSFER_LATE = "TaktlineTransferLate"
REFUSING = "TaktlineRefusing"
POOL_DOWN = "TaktlinePoolDown"
WORKER_SLOWED = "TaktlineWorkerSlowed"
REVISION_WORSE = "TaktlineRevisionWorse"
ROBOTS_SILENT = "TaktlineRobotsSilent"
POLICY_ALERTS = (
    BURN_FAST,
    BURN_SLOW,
    INFERENCE_LATE,
    QUEUE_LATE,
    TRANSFER_LATE,
    REFUSING,
    POOL_DOWN,
    WORKER_SLOWED,
    REVISION_WORSE,
    ROBOTS_SILENT,
)

# Alerts of the installation.
GATEWAY_DOWN = "TaktlineGatewayDown"
GATEWAY_FULL = "TaktlineGatewayFull"
SESSION_STORE_DOWN = "TaktlineSessionStoreDown"
OPERATOR_DOWN = "TaktlineOperatorDown"
OPERATOR_DEAF = "TaktlineOperatorDeaf"
RECONCILE_FAILING = "TaktlineReconcileFailing"
CERTIFICATE_ENDING = "TaktlineWebhookCertificateEnding"
POLICY_UNAVAILABLE = "TaktlinePolicyUnavailable"
POLICY_DEGRADED = "TaktlinePolicyDegraded"
ROLLED_BACK = "TaktlineRolledBack"
DELIVERY_STUCK = "TaktlineModelDeliveryStuck"
GPU_XID = "TaktlineGpuXid"
GPU_MEMORY_FAILING = "TaktlineGpuMemoryFailing"
GPU_HOT = "TaktlineGpuHot"
PLATFORM_ALERTS = (
    GATEWAY_DOWN,
    GATEWAY_FULL,
    SESSION_STORE_DOWN,
    OPERATOR_DOWN,
    OPERATOR_DEAF,
    RECONCILE_FAILING,
    CERTIFICATE_ENDING,
    POLICY_UNAVAILABLE,
    POLICY_DEGRADED,
    ROLLED_BACK,
    DELIVERY_STUCK,
    GPU_XID,
    GPU_MEMORY_FAILING,
    GPU_HOT,
)

# Dashboards, by the uid that links use.
DASHBOARD_FLEET = "taktline-fleet"
DASHBOARD_POLICY = "taktline-policy"
DASHBOARD_POOL = "taktline-pool"
DASHBOARD_ROLLOUT = "taktline-rollout"
DASHBOARD_OPERATOR = "taktline-operator"
