"""The operator as a process of its own, and what it says of itself."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from taktline_protocol import metrics


class Operator:
    """The operator's process and what it says of itself."""

    def __init__(self, kubeconfig: Path, folder: Path, gateway_namespace: str, *arguments: str) -> None:
        """Start it; it logs to `folder`, and `arguments` are further ones of `taktline-operator run`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._log = (folder / "operator.log").open("a")
        self._command = [Path(sys.executable).parent / "taktline-operator", "run", f"--kubeconfig={kubeconfig}"]
        self._command += [f"--health-listen={self._address}", f"--gateway-namespace={gateway_namespace}", *arguments]
        self.process = subprocess.Popen(self._command, stderr=self._log)

    def restart(self) -> None:
        """Kills it without warning and starts it anew."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = subprocess.Popen(self._command, stderr=self._log)

    def stop(self) -> None:
        """Ends it."""
        self.process.terminate()
        self.process.wait(30)

    async def read(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """All its series: name, labels, value; empty until it answers."""
        try:
            async with httpx.AsyncClient(timeout=10) as http:
                text = (await http.get(f"http://{self._address}/metrics")).text
        except httpx.TransportError:
            return {}
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return found


class Reading:
    """Numbers of one look at the operator's metrics."""

    def __init__(self, series: dict[str, dict[tuple[tuple[str, str], ...], float]]) -> None:
        self._series = series

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels."""
        wanted = set(labels.items())
        return sum(value for key, value in self._series.get(name, {}).items() if wanted <= set(key))

    @property
    def writes(self) -> float:
        """Requests that change something, but for the lease."""
        return sum(
            value
            for key, value in self._series.get(metrics.OPERATOR_REQUESTS, {}).items()
            if dict(key)["verb"] != "GET" and dict(key)["kind"] != "Lease"
        )

    def quantile_ms(self, share: float, since: Reading | None = None) -> float:
        """Upper edge of the bucket that holds this quantile of the reconciliations, in ms."""
        name = f"{metrics.OPERATOR_RECONCILE}_bucket"
        before = since._series.get(name, {}) if since else {}
        buckets = sorted(
            (float(dict(key)["le"].replace("+Inf", "inf")), value - before.get(key, 0.0))
            for key, value in self._series.get(name, {}).items()
        )
        count = buckets[-1][1] if buckets else 0.0
        return next((1e3 * edge for edge, value in buckets if count and value >= share * count), float("nan"))


async def until(condition: Callable[[], Awaitable[Any]], what: str, limit_s: float, every_s: float = 0.2) -> float:
    """Waits for an awaitable condition, asked every `every_s`; returns the seconds it took."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if await condition():
            return time.monotonic() - began
        await asyncio.sleep(every_s)
    raise SystemExit(f"{what} did not happen within {limit_s:g} s")
