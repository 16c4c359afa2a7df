"""Names, labels and help texts of every metric, shared by what exports them and what queries them.

No label ever names a robot, a request or anything else that a client invents: `policy` is one of the routing table (or
`UNKNOWN_POLICY`), `pool` and `revision` come from it too and are empty where no worker answered, the others are one of
the fixed sets below. Times are in ms where the name says so and in seconds otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

REQUESTS = "taktline_requests_total"
GOODPUT = "taktline_goodput_total"
DEADLINE_MISSES = "taktline_deadline_misses_total"
REFUSED = "taktline_refused_total"
SUPERSEDED = "taktline_superseded_total"
HEDGES = "taktline_hedges_total"
DEGRADED = "taktline_degraded_total"
LATENCY_TERM = "taktline_latency_term_ms"
CRITICAL_PATH = "taktline_critical_path_ms"
MARGIN = "taktline_control_margin_ms"
ENVIRONMENT_TIME = "taktline_environment_ms"
CONTROL_PERIOD = "taktline_control_period_ms"
BATCH_SIZE = "taktline_batch_size"
BATCH_ROWS = "taktline_batch_rows_total"
T_SYNC = "taktline_t_sync_ms"
T_SYNC_PREDICTED = "taktline_t_sync_predicted_ms"
T_SYNC_RATIO = "taktline_t_sync_measured_ratio"
QUEUE_DEPTH = "taktline_queue_depth"
IN_FLIGHT = "taktline_in_flight"
WORKERS = "taktline_workers"
WORKERS_BY_STATE = "taktline_workers_by_state"
WORKERS_BY_BATCH_PORT = "taktline_workers_by_batch_port"
BUILD = "taktline_build_info"

# The timed stream's, on the gateway's page.
STREAMS = "taktline_streams"
STREAM_OBSERVATIONS = "taktline_stream_observations_total"
STREAM_BYTES = "taktline_stream_bytes_total"
STREAM_SESSIONS = "taktline_stream_sessions_total"
STREAM_CLOSED = "taktline_stream_closed_total"
SESSION_STORE_UP = "taktline_session_store_up"

# The worker's own, on its own port.
WORKER_INFO = "taktline_worker_info"
WORKER_ITEMS = "taktline_worker_items_total"
WORKER_DROPPED = "taktline_worker_dropped_batches_total"
WORKER_PHASE = "taktline_worker_phase_ms"
WORKER_BUSY = "taktline_worker_engine_busy_seconds_total"
WORKER_CALIBRATION = "taktline_worker_calibration_ms"
WORKER_START = "taktline_worker_start_seconds"
WORKER_GRAPHS = "taktline_worker_graphs"
WORKER_GRAPH_CAPTURE = "taktline_worker_graph_capture_seconds"
WORKER_GRAPH_MEMORY = "taktline_worker_graph_memory_bytes"
WORKER_CACHE = "taktline_worker_cache_lookups_total"
WORKER_GPU_MEMORY = "taktline_worker_gpu_memory_bytes"
WORKER_REPLICAS = "taktline_worker_replicas"
WORKER_REPLICA_RESTARTS = "taktline_worker_replica_restarts_total"

# The operator's own, beside its health endpoints.
OPERATOR_LEADS = "taktline_operator_leads"
OPERATOR_RECONCILES = "taktline_operator_reconciles_total"
OPERATOR_RECONCILE = "taktline_operator_reconcile_seconds"
OPERATOR_QUEUE = "taktline_operator_queue_depth"
OPERATOR_REQUESTS = "taktline_operator_api_requests_total"
OPERATOR_REQUEST = "taktline_operator_api_request_seconds"
OPERATOR_SILENCE = "taktline_operator_api_silence_seconds"
OPERATOR_WATCH_DEAD = "taktline_operator_watch_dead"
OPERATOR_REVIEWS = "taktline_operator_admission_reviews_total"
OPERATOR_CERTIFICATE = "taktline_operator_webhook_certificate_days"
POLICY_CONDITION = "taktline_policydeployment_condition"
POLICY_REPLICAS = "taktline_policydeployment_workers"
POLICY_REVISION = "taktline_policydeployment_revision_info"
POLICY_ROLLOUT = "taktline_policydeployment_rollout_weight"
POLICY_DEMAND = "taktline_policydeployment_wanted_workers"
POLICY_DELIVERY = "taktline_policydeployment_delivery_percent"

LABEL_POLICY = "policy"
LABEL_POOL = "pool"
LABEL_REVISION = "revision"
LABEL_CODE = "code"
LABEL_TERM = "term"
LABEL_CAUSE = "cause"
LABEL_STATE = "state"
LABEL_BATCH = "batch"
LABEL_QUANTILE = "quantile"
LABEL_ROWS = "rows"
LABEL_PHASE = "phase"
LABEL_STAGE = "stage"
LABEL_CACHE = "cache"
LABEL_RESULT = "result"
LABEL_KIND = "kind"
LABEL_NAMESPACE = "namespace"
LABEL_CONDITION = "condition"
LABEL_REASON = "reason"
LABEL_VERB = "verb"
LABEL_TRACK = "track"
LABEL_KIND = "kind"

UNKNOWN_POLICY = "_unknown"
"""The policy label of requests for a policy that is not served; no PolicyDeployment can have this name."""
TERMS = ("observe", "transfer", "queue", "inference", "actuate")
MISS_CAUSES = ("queue", "inference", "transfer", "refused")
WORKER_STATES = ("idle", "busy", "suspended", "draining", "down")
BATCH_PORT_STATES = ("open", "none", "version", "unreachable")
QUANTILES = ("0.5", "0.99")
HEDGE_RESULTS = ("attempted", "won")
DEGRADED_KINDS = ("solver_steps", "action_horizon", "policy")
WORKER_PHASES = ("preprocess", "engine", "postprocess", "total")
WORKER_STAGES = ("load", "calibrate")
RECONCILE_RESULTS = ("done", "api_error", "failed")
REVIEW_RESULTS = ("allowed", "refused", "malformed")
REPLICA_STATES = ("desired", "updated", "ready")
REVISION_TRACKS = ("current", "candidate")

_SERVED = (LABEL_POLICY, LABEL_POOL, LABEL_REVISION)
_T_SYNC = (*_SERVED, LABEL_BATCH)


@dataclass(frozen=True)
class Metric:
    """One metric as it is exported; a query may rely on its name, kind and labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


GATEWAY_METRICS = (
    Metric(
        REQUESTS,
        "counter",
        (LABEL_POLICY, LABEL_CODE),
        "Requests by outcome: ok, an error code, or client_gone where the robot closed the connection first.",
    ),
    Metric(GOODPUT, "counter", _SERVED, "Chunks that left before their hand-off deadline; the rate is the goodput."),
    Metric(
        DEADLINE_MISSES,
        "counter",
        (*_SERVED, LABEL_CAUSE),
        "Requests that got no chunk in time, each with exactly one cause: the first term with which the budget was"
        " gone (inference, queue, transfer), or refused where there is no chunk at all.",
    ),
    Metric(
        REFUSED,
        "counter",
        (LABEL_POLICY, LABEL_CODE),
        "Sound requests that the platform turned away, by error code; adds up to the misses with cause refused.",
    ),
    Metric(SUPERSEDED, "counter", (LABEL_POLICY,), "Queued observations replaced by a newer one of their robot."),
    Metric(
        HEDGES,
        "counter",
        (LABEL_POLICY, LABEL_RESULT),
        "Observations of a silent worker: attempted is each that was queued again for another one, won each that the"
        " other one answered first.",
    ),
    Metric(
        DEGRADED,
        "counter",
        (LABEL_POLICY, LABEL_KIND),
        "Chunks that were made cheaper rather than refused, by what was lowered: solver_steps, action_horizon (fewer"
        " actions), or policy (a smaller one answered).",
    ),
    Metric(
        LATENCY_TERM,
        "histogram",
        (*_SERVED, LABEL_TERM),
        "The five terms of the critical path of answered requests: observe, transfer, queue, inference, actuate.",
    ),
    Metric(CRITICAL_PATH, "histogram", _SERVED, "L_critical of answered requests, the sum of their five terms."),
    Metric(MARGIN, "histogram", _SERVED, "Control margin of answered requests; negative is a deadline miss."),
    Metric(
        ENVIRONMENT_TIME,
        "histogram",
        (LABEL_POLICY,),
        "L_env: time that the robots' own motion took between two observations, stalls for a late chunk excluded.",
    ),
    Metric(
        CONTROL_PERIOD,
        "histogram",
        (LABEL_POLICY,),
        "L_control: time between two observations of one robot, by its own clock.",
    ),
    Metric(BATCH_SIZE, "histogram", _SERVED, "Observations in a batch, when it was sent."),
    Metric(
        BATCH_ROWS,
        "counter",
        (*_SERVED, LABEL_ROWS),
        "Rows that the engine ran, observations and padding; padding over both is the padding share.",
    ),
    Metric(
        T_SYNC,
        "histogram",
        _T_SYNC,
        "Measured time of a batch from send to answer, less its wait for the batch before it, by batch bucket.",
    ),
    Metric(
        T_SYNC_PREDICTED,
        "gauge",
        (*_T_SYNC, LABEL_QUANTILE),
        "The same as the queue predicts it now, median (0.5) and tail (0.99); the slowest worker where there are more.",
    ),
    Metric(
        T_SYNC_RATIO,
        "histogram",
        _SERVED,
        "Measured time of a batch over the predicted median; above 1 the worker is slower than its table says.",
    ),
    Metric(QUEUE_DEPTH, "gauge", (LABEL_POLICY,), "Observations waiting for a batch."),
    Metric(IN_FLIGHT, "gauge", (LABEL_POLICY,), "Observations that are on a worker."),
    Metric(WORKERS, "gauge", (LABEL_POLICY, LABEL_POOL), "Workers that may get batches."),
    Metric(
        WORKERS_BY_STATE,
        "gauge",
        (LABEL_POLICY, LABEL_POOL, LABEL_STATE),
        "Workers by state: idle, busy (a batch is on it), suspended (it failed and rests), draining, down.",
    ),
    Metric(
        WORKERS_BY_BATCH_PORT,
        "gauge",
        (LABEL_POLICY, LABEL_POOL, LABEL_STATE),
        "Workers that may get batches, by their batch port: open, none (they have none), version (they speak another"
        " one), unreachable. In all but the first, batches go through gRPC, which costs more.",
    ),
    Metric(BUILD, "gauge", ("version",), "1; the gateway's version is in the label."),
)

STREAM_METRICS = (
    Metric(STREAMS, "gauge", (LABEL_POLICY,), "Robots connected by stream."),
    Metric(
        STREAM_OBSERVATIONS,
        "counter",
        (LABEL_POLICY, LABEL_KIND),
        "Observations that came by stream: keyframe (every camera whole) or delta (some by reference).",
    ),
    Metric(
        STREAM_BYTES,
        "counter",
        (LABEL_POLICY, LABEL_KIND),
        "Bytes of stream frames, received and sent, without WebSocket headers.",
    ),
    Metric(
        STREAM_SESSIONS,
        "counter",
        (LABEL_POLICY, LABEL_RESULT),
        "Hellos by result: new, resumed (here), moved (from another gateway), lost (its session was not found).",
    ),
    Metric(
        STREAM_CLOSED,
        "counter",
        (LABEL_POLICY, LABEL_CODE),
        "Streams that ended: bye, dropped (the connection broke), or the error code with which the gateway closed.",
    ),
    Metric(
        SESSION_STORE_UP,
        "gauge",
        (),
        "1 while the store of sessions is reachable, 0 while sessions cannot move to another gateway; only with one.",
    ),
)

WORKER_METRICS = (
    Metric(
        WORKER_INFO,
        "gauge",
        (LABEL_POLICY, LABEL_REVISION, "family", "precision", "device"),
        "1; what this worker serves, to join with the other worker metrics.",
    ),
    Metric(WORKER_ITEMS, "counter", (LABEL_POLICY, LABEL_CODE), "Observations by outcome: ok or an error code."),
    Metric(WORKER_DROPPED, "counter", (LABEL_POLICY,), "Batches dropped before they began."),
    Metric(
        WORKER_PHASE,
        "histogram",
        (LABEL_POLICY, LABEL_PHASE),
        "Time of one batch by phase; total is from receive to answer, waiting for the engine included.",
    ),
    Metric(WORKER_BUSY, "counter", (LABEL_POLICY,), "Time that the engine ran; the rate is the share it is busy."),
    Metric(
        WORKER_CALIBRATION,
        "gauge",
        (LABEL_POLICY, LABEL_BATCH, LABEL_QUANTILE),
        "T_sync of each batch bucket as measured at start, median (0.5) and tail (0.99).",
    ),
    Metric(WORKER_START, "gauge", (LABEL_POLICY, LABEL_STAGE), "Time that each stage of the start took."),
    Metric(WORKER_GRAPHS, "gauge", (LABEL_POLICY,), "CUDA graphs captured; 0 where the engine runs eagerly."),
    Metric(WORKER_GRAPH_CAPTURE, "gauge", (LABEL_POLICY, LABEL_BATCH), "Warm-up and capture of a bucket's graphs."),
    Metric(WORKER_GRAPH_MEMORY, "gauge", (LABEL_POLICY,), "GPU memory that the captured graphs hold."),
    Metric(
        WORKER_CACHE,
        "counter",
        (LABEL_POLICY, LABEL_CACHE, LABEL_RESULT),
        "Look-ups in the engine's caches, by result: hit or miss.",
    ),
    Metric(
        WORKER_GPU_MEMORY,
        "gauge",
        (LABEL_POLICY, LABEL_KIND),
        "GPU memory of this process: allocated, and reserved by its allocator.",
    ),
    Metric(WORKER_REPLICAS, "gauge", (LABEL_POLICY,), "Replicas of this worker that serve, where it has several."),
    Metric(
        WORKER_REPLICA_RESTARTS,
        "counter",
        (LABEL_POLICY,),
        "Replicas of this worker that ended and were started again.",
    ),
)

_OWNED = (LABEL_NAMESPACE, LABEL_POLICY)

OPERATOR_METRICS = (
    Metric(OPERATOR_LEADS, "gauge", (), "1 while this operator works, 0 while it stands by for another one."),
    Metric(
        OPERATOR_RECONCILES,
        "counter",
        (LABEL_RESULT,),
        "Reconciliations by result: done, api_error (comes back later), failed (a fault; logged whole).",
    ),
    Metric(OPERATOR_RECONCILE, "histogram", (), "Time of one reconciliation, its API requests included."),
    Metric(OPERATOR_QUEUE, "gauge", (), "PolicyDeployments that wait to be reconciled now."),
    Metric(
        OPERATOR_REQUESTS,
        "counter",
        (LABEL_VERB, LABEL_KIND, LABEL_CODE),
        "Requests to the API server by HTTP method, kind and status; code 0: no answer. Watches are not among them.",
    ),
    Metric(OPERATOR_REQUEST, "histogram", (LABEL_VERB,), "Time of one request to the API server, by HTTP method."),
    Metric(OPERATOR_SILENCE, "gauge", (), "Time since the API server last answered a list or a lease renewal."),
    Metric(OPERATOR_WATCH_DEAD, "gauge", (), "1 where a watch misses what lists show; /healthz fails with it."),
    Metric(
        OPERATOR_REVIEWS,
        "counter",
        (LABEL_RESULT,),
        "Reviews of the admission webhook by result: allowed, refused, malformed.",
    ),
    Metric(
        OPERATOR_CERTIFICATE,
        "gauge",
        (),
        "Days until the webhook's certificate runs out; absent without a webhook.",
    ),
    Metric(
        POLICY_CONDITION,
        "gauge",
        (*_OWNED, LABEL_CONDITION, LABEL_REASON),
        "Conditions of each PolicyDeployment: 1 true, 0 false, -1 unknown; one series a condition, with its reason.",
    ),
    Metric(
        POLICY_REPLICAS,
        "gauge",
        (*_OWNED, LABEL_POOL, LABEL_STATE),
        "Workers of each pool: desired, updated (of the present spec), ready.",
    ),
    Metric(
        POLICY_REVISION,
        "gauge",
        (*_OWNED, LABEL_REVISION, LABEL_TRACK),
        "1; the current revision of each PolicyDeployment, and the candidate while one is rolled out.",
    ),
    Metric(
        POLICY_ROLLOUT,
        "gauge",
        (*_OWNED, LABEL_PHASE, LABEL_REASON),
        "Percent of the robots that the candidate serves; the phase of the rollout, and why it was taken back.",
    ),
    Metric(
        POLICY_DEMAND,
        "gauge",
        _OWNED,
        "Workers that demand asks for, of PolicyDeployments with spec.scaling; other autoscalers may follow it.",
    ),
    Metric(
        POLICY_DELIVERY,
        "gauge",
        _OWNED,
        "Percent of the checkpoint's bytes on the node that is furthest behind, of policies that fetch theirs.",
    ),
)

BY_NAME: dict[str, Metric] = {
    metric.name: metric for metric in (*GATEWAY_METRICS, *STREAM_METRICS, *WORKER_METRICS, *OPERATOR_METRICS)
}
