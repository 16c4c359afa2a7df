"""Series that Taktline queries and does not export: NVIDIA's DCGM exporter and kube-state-metrics.

DCGM names are those that its exporter's default counter file switches on; nothing here asks for one that it
comments out. Jetson has no DCGM: there the worker's own memory and busy time are all there is.
"""

from __future__ import annotations

# DCGM exporter; labels gpu, UUID, modelName, Hostname.
DCGM_GPU_UTIL = "DCGM_FI_DEV_GPU_UTIL"
DCGM_ENGINE_ACTIVE = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
DCGM_TENSOR_ACTIVE = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
DCGM_DRAM_ACTIVE = "DCGM_FI_PROF_DRAM_ACTIVE"
DCGM_FB_USED = "DCGM_FI_DEV_FB_USED"  # MiB
DCGM_FB_FREE = "DCGM_FI_DEV_FB_FREE"  # MiB
DCGM_SM_CLOCK = "DCGM_FI_DEV_SM_CLOCK"  # MHz
DCGM_GPU_TEMP = "DCGM_FI_DEV_GPU_TEMP"  # degrees C
DCGM_MEMORY_TEMP = "DCGM_FI_DEV_MEMORY_TEMP"
DCGM_POWER = "DCGM_FI_DEV_POWER_USAGE"  # W
DCGM_XID = "DCGM_FI_DEV_XID_ERRORS"  # the last code, not a count
DCGM_PCIE_REPLAY = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"
DCGM_ROW_REMAP_FAILURE = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
DCGM_UNCORRECTABLE = "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"
DCGM_NVLINK = "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"

# kube-state-metrics.
KUBE_ALLOCATABLE = "kube_node_status_allocatable"
KUBE_REQUESTS = "kube_pod_container_resource_requests"
KUBE_POD_PHASE = "kube_pod_status_phase"
KUBE_RESTARTS = "kube_pod_container_status_restarts_total"
KUBE_WAITING = "kube_pod_container_status_waiting_reason"
GPU_RESOURCE = "nvidia_com_gpu"

NAMES = frozenset(
    value for name, value in list(globals().items()) if name.startswith(("DCGM_", "KUBE_")) and isinstance(value, str)
)
"""Every series of this module."""
