"""Joules, watts and clock of a GPU while something runs, from the driver's own counters."""

from __future__ import annotations

import ctypes
import time

import torch
from engine import say

_SM_CLOCK = 1


class Counters:
    """The counters of one GPU (NVML); what the driver does not give is None."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        try:
            self._nvml: ctypes.CDLL | None = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._nvml = None
        which = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()  # the machine may have others
        if self._nvml is not None and (
            self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByUUID(which, ctypes.byref(self._handle))
        ):
            self._nvml = None
        if self._nvml is None:
            say("no counters of the driver here: no joules")

    def joules(self) -> float | None:
        """Since the driver was loaded; renewed about every tenth of a second."""
        value = ctypes.c_ulonglong()
        if self._nvml is None or self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value)):
            return None
        return value.value / 1000.0

    def megahertz(self) -> int | None:
        """Of the multiprocessors, now."""
        value = ctypes.c_uint()
        if self._nvml is None or self._nvml.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK, ctypes.byref(value)):
            return None
        return value.value


class EnergyMeter:
    """What the GPU took while inside; meant for seconds, as the counter moves in steps.

    Attributes:
        joules: None where the driver gave no figure.
        seconds: from entering to leaving.
    """

    joules: float | None = None
    seconds = 0.0

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def __enter__(self) -> EnergyMeter:
        torch.cuda.synchronize()
        self._before, self._began = self._counters.joules(), time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._began
        after = self._counters.joules()
        if after is not None and self._before is not None:
            self.joules = after - self._before

    @property
    def watts(self) -> float | None:
        """The mean."""
        return None if self.joules is None else self.joules / self.seconds
