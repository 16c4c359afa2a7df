"""Watts of a GPU while something runs, as the driver reports them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading

import torch
from engine import say


class PowerMeter:
    """Mean watts of the GPU while inside, as the driver reports them."""

    def __enter__(self) -> PowerMeter:
        self._watts: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def watts(self) -> float | None:
        """None where the driver gave no figure."""
        return statistics.fmean(self._watts) if self._watts else None

    def _sample(self) -> None:
        if shutil.which("nvidia-smi") is None:
            say("no nvidia-smi here: no watts")
            return
        which = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # the machine may have others
        query = ["nvidia-smi", "-i", which, "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        while not self._end.wait(0.2):
            answer = subprocess.run(query, capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                self._watts.append(float(answer.stdout.split()[0]))
