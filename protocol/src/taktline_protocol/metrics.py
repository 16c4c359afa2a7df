"""Names of metrics and labels, shared by what exports them and what queries them."""

REQUESTS = "taktline_requests_total"
LATENCY_TERM = "taktline_latency_term_ms"
MARGIN = "taktline_control_margin_ms"
DEADLINE_MISSES = "taktline_deadline_misses_total"
BATCH_SIZE = "taktline_batch_size"
QUEUE_DEPTH = "taktline_queue_depth"
SUPERSEDED = "taktline_superseded_total"
WORKERS = "taktline_workers"

LABEL_POLICY = "policy"
LABEL_POOL = "pool"
LABEL_REVISION = "revision"
LABEL_CODE = "code"
LABEL_TERM = "term"
LABEL_CAUSE = "cause"

TERMS = ("observe", "transfer", "queue", "inference", "actuate")
MISS_CAUSES = ("queue", "inference", "transfer", "refused")

# The worker's own.
WORKER_ITEMS = "taktline_worker_items_total"
WORKER_DROPPED = "taktline_worker_dropped_batches_total"
WORKER_PHASE = "taktline_worker_phase_ms"
LABEL_PHASE = "phase"
