"""What an accelerator class means to Kubernetes: extended resource, node affinity, architecture, default requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from taktline_operator.naming import LABEL_ACCELERATOR, LABEL_QUARANTINE

GPU_RESOURCE = "nvidia.com/gpu"
GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
LOST_NODE_S = 30
CLAIM = "accelerator"  # a pod's resource claim, where its pool names a ResourceClaimTemplate
SPOT_TAINTS = ("cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority", "karpenter.sh/capacity-type")
ARCH_LABEL = "kubernetes.io/arch"


class AcceleratorClass(msgspec.Struct, frozen=True, kw_only=True):
    """How pods of one class ask for their node.

    Attributes:
        products: values of GPU feature discovery's product label that belong to the class, without sharing suffixes.
        requests: default resource requests of one worker.
        runtime_class: runtime class that injects the driver, where the node's default runtime does not.
    """

    device: Literal["cpu", "cuda"]
    products: tuple[str, ...] = ()
    arch: str | None = None
    runtime_class: str | None = None
    requests: dict[str, str]


_SERVER_REQUESTS = {"cpu": "4", "memory": "24Gi"}

CLASSES: dict[str, AcceleratorClass] = {
    "cpu": AcceleratorClass(device="cpu", requests={"cpu": "1", "memory": "2Gi"}),
    "jetson-thor": AcceleratorClass(
        device="cuda",
        products=("NVIDIA-Thor", "Thor"),
        arch="arm64",
        runtime_class="nvidia",
        requests={"cpu": "2", "memory": "16Gi"},  # unified memory: the GPU's share counts here too
    ),
    "rtx-5090": AcceleratorClass(
        device="cuda", products=("NVIDIA-GeForce-RTX-5090",), requests={"cpu": "4", "memory": "16Gi"}
    ),
    "a40": AcceleratorClass(device="cuda", products=("NVIDIA-A40",), requests=_SERVER_REQUESTS),
    "a100": AcceleratorClass(
        device="cuda",
        products=(
            "NVIDIA-A100-SXM4-40GB",
            "NVIDIA-A100-SXM4-80GB",
            "NVIDIA-A100-PCIE-40GB",
            "NVIDIA-A100-80GB-PCIe",
        ),
        requests=_SERVER_REQUESTS,
    ),
    "h100": AcceleratorClass(
        device="cuda",
        products=("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
        requests=_SERVER_REQUESTS,
    ),
    "h200": AcceleratorClass(device="cuda", products=("NVIDIA-H200", "NVIDIA-H200-NVL"), requests=_SERVER_REQUESTS),
}


def node_affinity(accelerator: str) -> dict[str, Any]:
    """Required node affinity of a class: our own label, or a product that GPU feature discovery names; any for cpu.

    Feature discovery leaves some nodes unlabelled (Jetson), so either label is enough. A node in quarantine gets none.
    """
    found = CLASSES[accelerator]
    fit = [{"key": LABEL_QUARANTINE, "operator": "DoesNotExist"}]
    if found.device == "cpu":
        return {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": fit}]}
            }
        }
    products = [name + suffix for name in found.products for suffix in ("", "-SHARED")]
    architecture = [{"key": ARCH_LABEL, "operator": "In", "values": [found.arch]}] if found.arch else []
    alternatives = [
        {"key": LABEL_ACCELERATOR, "operator": "In", "values": [accelerator]},
        {"key": GPU_PRODUCT_LABEL, "operator": "In", "values": products},
    ]
    terms = [{"matchExpressions": [alternative, *architecture, *fit]} for alternative in alternatives]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def matches(accelerator: str, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that `node_affinity` of the class admits."""
    affinity = node_affinity(accelerator)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return any(
        all(_holds(expression, labels) for expression in term["matchExpressions"])
        for term in affinity["nodeSelectorTerms"]
    )


def _holds(expression: dict[str, Any], labels: Mapping[str, str]) -> bool:
    if expression["operator"] == "DoesNotExist":
        return expression["key"] not in labels
    return labels.get(expression["key"]) in expression["values"]


def tolerations(accelerator: str, *, spot: bool = False) -> list[dict[str, Any]]:
    """Taints that pods of a class tolerate by themselves.

    A node that is lost is left after half a minute, not after Kubernetes' five: workers hold no state, and robots wait.

    Args:
        spot: whether workers may run on capacity that is taken back at short notice.
    """
    lost: list[dict[str, Any]] = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_S}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    ]
    lost += [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in (SPOT_TAINTS if spot else ())]
    if CLASSES[accelerator].device == "cpu":
        return lost
    return [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}, *lost]


def resources(
    accelerator: str,
    requests: dict[str, int | str],
    limits: dict[str, int | str],
    gpus: int = 1,
    *,
    claimed: bool = False,
) -> dict[str, Any]:
    """Container resources of one worker: the class's defaults under what the pool asks for.

    A worker of several GPUs runs a process for each, so the defaults are those of so many workers.

    An extended resource must be requested and limited alike, so a GPU count set on one side holds for both. A default
    request never exceeds a limit that the pool sets.

    Args:
        claimed: the pod's resource claim brings the GPUs (dynamic resource allocation).
    """
    found = CLASSES[accelerator]
    wanted: dict[str, str] = {name: str(amount) for name, amount in requests.items()}
    capped: dict[str, str] = {name: str(amount) for name, amount in limits.items()}
    asked = wanted | capped
    if found.device == "cuda" and not claimed and not any(name.startswith("nvidia.com/") for name in asked):
        asked[GPU_RESOURCE] = str(gpus)
    extended = {name: amount for name, amount in asked.items() if "/" in name}
    defaults = {name: capped.get(name, _times(amount, gpus)) for name, amount in found.requests.items()}
    result = {"requests": defaults | wanted | extended, "limits": capped | extended}
    claims = {"claims": [{"name": CLAIM}]} if claimed else {}
    return {side: amounts for side, amounts in result.items() if amounts} | claims


def _times(amount: str, count: int) -> str:
    """A whole quantity such as 4 or 24Gi, `count` times."""
    digits = amount.rstrip("Gi")
    return f"{int(digits) * count}{amount[len(digits) :]}"
