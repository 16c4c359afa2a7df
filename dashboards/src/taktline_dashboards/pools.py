"""Pools and their GPUs: is there room, is a worker slow, is a GPU ill."""

from __future__ import annotations

from taktline_protocol import metrics, outside, slo

from taktline_dashboards.page import POLICIES, Page, Variable
from taktline_dashboards.panels import BAD, GOOD, WARN, Query, rows, single, time_series
from taktline_dashboards.queries import mean, quantile, rate, selected, share
from taktline_dashboards.scales import STATE_COLOURS

_CHOSEN = selected(policy="$policy", pool="$pool")
_POLICY = selected(policy="$policy")
_HOST = selected(Hostname="$host")
_GPU = "{{Hostname}} GPU {{gpu}}"


def page() -> Page:
    """The pool and GPU page."""
    found = Page(
        slo.DASHBOARD_POOL,
        "Taktline / Pools and GPUs",
        "Capacity of each pool, how full it is, and the health of the GPUs under it (utilisation, saturation, errors).",
        [
            POLICIES,
            Variable("pool", slo.POOL_WANTED, "Pools"),
            Variable("host", outside.DCGM_GPU_UTIL, "GPU nodes", label="Hostname"),
        ],
    )
    _capacity(found)
    _saturation(found)
    _gpus(found)
    _health(found)
    return found


def _capacity(found: Page) -> None:
    allocatable = f'sum({outside.KUBE_ALLOCATABLE}{{resource="{outside.GPU_RESOURCE}"}})'
    requested = f'sum({outside.KUBE_REQUESTS}{{resource="{outside.GPU_RESOURCE}"}})'
    pods = '{namespace!="",pod=~".*-($pool)-.*"'
    found.row(
        "Is there room?",
        time_series(
            "Workers by state",
            "As the gateways see them.",
            Query(f"sum by (state) (max by (policy, pool, state) ({metrics.WORKERS_BY_STATE}{_CHOSEN}))", "{{state}}"),
            unit="none",
            stacked=True,
            colours=STATE_COLOURS,
            width=8,
        ),
        time_series(
            "Missing workers",
            "Workers that the PolicyDeployments want and no gateway can use.",
            Query(
                f"{slo.POOL_WANTED}{_CHOSEN} - on(policy, pool) max by (policy, pool) ({metrics.WORKERS}{_CHOSEN})",
                "{{policy}} {{pool}}",
            ),
            unit="none",
            width=8,
        ),
        single(
            "GPUs of the cluster",
            "That nodes offer (kube-state-metrics).",
            Query(allocatable),
            unit="none",
            width=4,
        ),
        single(
            "GPUs free",
            "Offered and not requested by any pod (kube-state-metrics).",
            Query(f"{allocatable} - ({requested} or vector(0))"),
            unit="none",
            steps=((None, BAD), (1.0, WARN), (2.0, GOOD)),
            width=4,
        ),
        rows(
            "Worker pods that wait",
            "Containers that cannot run, with the kubelet's reason (kube-state-metrics).",
            {"Containers": f"sum by (namespace, pod, reason) ({outside.KUBE_WAITING}{pods}}}) > 0"},
            labels=["namespace", "pod", "reason"],
            width=12,
            height=6,
        ),
        time_series(
            "Restarts of worker pods",
            "Within 15 minutes (kube-state-metrics).",
            Query(f"sum by (pod) (increase({outside.KUBE_RESTARTS}{pods}}}[15m]))", "{{pod}}"),
            unit="none",
            width=6,
            height=6,
        ),
        time_series(
            "Pods by phase",
            "Worker pods (kube-state-metrics).",
            Query(f"sum by (phase) ({outside.KUBE_POD_PHASE}{pods}}})", "{{phase}}"),
            unit="none",
            stacked=True,
            width=6,
            height=6,
        ),
    )


def _saturation(found: Page) -> None:
    padding = f'{_CHOSEN[:-1]},{metrics.LABEL_ROWS}="padding"}}'
    predicted = f'{_CHOSEN[:-1]},{metrics.LABEL_QUANTILE}="0.5"}}'
    found.row(
        "Is a pool full, or slow?",
        time_series(
            "Engine busy",
            "Share of the time in which the engine runs, by policy, mean over its workers.",
            Query(f"avg by (policy) (rate({metrics.WORKER_BUSY}{_POLICY}[$__rate_interval]))", "{{policy}}"),
            unit="percentunit",
            maximum=1.0,
            width=8,
        ),
        time_series(
            "Inference term, p99",
            "By policy and pool.",
            Query(
                quantile(
                    0.99, metrics.LATENCY_TERM, "policy, pool", f'{_CHOSEN[:-1]},{metrics.LABEL_TERM}="inference"}}'
                ),
                "{{policy}} {{pool}}",
            ),
            unit="ms",
            width=8,
        ),
        time_series(
            "T_sync(1) as the queue predicts it",
            "The slowest worker of each pool; a step up without a new revision is a GPU that got slower.",
            Query(
                f'max by (policy, pool, revision) ({metrics.T_SYNC_PREDICTED}{predicted[:-1]},batch="1"}})',
                "{{policy}} {{pool}} {{revision}}",
            ),
            unit="ms",
            width=8,
        ),
        time_series(
            "Observations by pool",
            "Rows that are real observations, a second.",
            Query(
                rate(metrics.BATCH_ROWS, "policy, pool", f'{_CHOSEN[:-1]},{metrics.LABEL_ROWS}="observation"}}'),
                "{{policy}} {{pool}}",
            ),
            unit="reqps",
            stacked=True,
            width=8,
        ),
        time_series(
            "Batch size, mean",
            "Observations that share an inference.",
            Query(mean(metrics.BATCH_SIZE, "policy, pool", _CHOSEN), "{{policy}} {{pool}}"),
            unit="none",
            width=8,
        ),
        time_series(
            "Padding",
            "Share of the engine's rows that fill up a bucket.",
            Query(
                share(
                    rate(metrics.BATCH_ROWS, "policy, pool", padding), rate(metrics.BATCH_ROWS, "policy, pool", _CHOSEN)
                ),
                "{{policy}} {{pool}}",
            ),
            unit="percentunit",
            maximum=1.0,
            width=8,
        ),
    )


def _gpus(found: Page) -> None:
    used, free = outside.DCGM_FB_USED, outside.DCGM_FB_FREE
    found.row(
        "GPUs: utilisation (DCGM)",
        time_series(
            "Engine active",
            "Share of the time in which any graphics or compute engine is active.",
            Query(f"{outside.DCGM_ENGINE_ACTIVE}{_HOST}", _GPU),
            unit="percentunit",
            maximum=1.0,
            width=6,
        ),
        time_series(
            "Tensor cores active",
            "Share of the cycles in which the tensor pipe is active.",
            Query(f"{outside.DCGM_TENSOR_ACTIVE}{_HOST}", _GPU),
            unit="percentunit",
            maximum=1.0,
            width=6,
        ),
        time_series(
            "Memory interface active",
            "Share of the cycles in which the memory is read or written; near 1 a policy is bandwidth bound.",
            Query(f"{outside.DCGM_DRAM_ACTIVE}{_HOST}", _GPU),
            unit="percentunit",
            maximum=1.0,
            width=6,
        ),
        time_series(
            "Memory used",
            "Of the GPU's memory.",
            Query(f"{used}{_HOST} / ({used}{_HOST} + {free}{_HOST})", _GPU),
            unit="percentunit",
            maximum=1.0,
            width=6,
        ),
    )


def _health(found: Page) -> None:
    found.row(
        "GPUs: saturation and errors (DCGM)",
        time_series(
            "Temperature", "Of the GPU.", Query(f"{outside.DCGM_GPU_TEMP}{_HOST}", _GPU), unit="celsius", width=6
        ),
        time_series("Power", "Drawn now.", Query(f"{outside.DCGM_POWER}{_HOST}", _GPU), unit="watt", width=6),
        time_series(
            "SM clock",
            "A clock that falls under load is throttled: heat or power.",
            Query(f"{outside.DCGM_SM_CLOCK}{_HOST} * 1e6", _GPU),
            unit="hertz",
            width=6,
        ),
        time_series(
            "GPU utilisation",
            "As nvidia-smi shows it.",
            Query(f"{outside.DCGM_GPU_UTIL}{_HOST} / 100", _GPU),
            unit="percentunit",
            maximum=1.0,
            width=6,
        ),
        rows(
            "GPU errors",
            "Last Xid code (0: none), rows of memory remapped for good, failed remaps, PCIe replays within an hour.",
            {
                "Last Xid": f"{outside.DCGM_XID}{_HOST}",
                "Remapped rows": f"{outside.DCGM_UNCORRECTABLE}{_HOST}",
                "Remap failed": f"{outside.DCGM_ROW_REMAP_FAILURE}{_HOST}",
                "PCIe replays 1h": f"increase({outside.DCGM_PCIE_REPLAY}{_HOST}[1h])",
                "Memory temp": f"{outside.DCGM_MEMORY_TEMP}{_HOST}",
            },
            labels=["Hostname", "gpu", "modelName"],
            units={"Memory temp": "celsius", "PCIe replays 1h": "none"},
            steps={
                "Last Xid": ((None, GOOD), (1.0, BAD)),
                "Remap failed": ((None, GOOD), (1.0, BAD)),
                "PCIe replays 1h": ((None, GOOD), (10.0, WARN)),
            },
            width=12,
        ),
        time_series(
            "Memory of the worker processes",
            "Allocated by tensors, and reserved by the allocator; the worker's own count, also where there is no DCGM.",
            Query(f"sum by (policy, kind) ({metrics.WORKER_GPU_MEMORY}{_POLICY})", "{{policy}} {{kind}}"),
            unit="bytes",
            width=6,
        ),
        time_series(
            "NVLink traffic",
            "Sum over the links of a GPU.",
            Query(f"{outside.DCGM_NVLINK}{_HOST} * 1048576", _GPU),
            unit="Bps",
            width=6,
        ),
    )
