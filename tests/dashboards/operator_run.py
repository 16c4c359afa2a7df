"""The operator of the incident run: its real controller and telemetry on a simulated cluster, scraped over HTTP.

The cluster is the double that the operator's own tests use; what Prometheus reads is the operator's real endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from types import SimpleNamespace

from taktline_operator import health
from taktline_operator.telemetry import Telemetry
from taktline_protocol import metrics

from tests.operator import conftest as doubles
from tests.operator.simulated_cluster import Cluster, differing_trial, good_trial

from .prometheus_run import free_port

_VERBS = {
    "get": "GET",
    "kinds": "GET",
    "group_versions": "GET",
    "list": "GET",
    "apply": "PATCH",
    "annotate": "PATCH",
    "create": "POST",
    "delete": "DELETE",
}

# The cluster runs fast; Prometheus, which scrapes each second and is asked in steps of two, must see a candidate.
SCRAPES_OF_A_CANDIDATE = 3

ROLLOUT = {"strategy": "Progressive", "stepSeconds": 60, "shadow": {"percent": 50, "minObservations": 100}}


class _Counted:
    """The API double, with each call counted as `kube.KubeApi` counts its requests."""

    def __init__(self, api: object, telemetry: Telemetry) -> None:
        self._api = api
        self._telemetry = telemetry

    def __getattr__(self, name: str):
        call = getattr(self._api, name)

        async def counted(*arguments, **named):
            began = time.monotonic()
            result = await call(*arguments, **named)
            kind = "other"
            if name not in ("kinds", "group_versions"):
                kind = arguments[0] if isinstance(arguments[0], str) else arguments[0]["kind"]
            self._telemetry.requested(_VERBS[name], kind, 200, time.monotonic() - began)
            return result

        return counted


class OperatorRun:
    """A thread with an operator for one policy; `roll_out_badly` and `revert` are what a person does."""

    def __init__(self, policy: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._policy = policy
        self._stop = threading.Event()
        self._commands: list[str] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    def roll_out_badly(self) -> None:
        """A person applies a revision whose actions differ from those of the one that serves."""
        self._commands.append("bad")

    def revert(self) -> None:
        """A person takes the change back."""
        self._commands.append("revert")

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    async def _run(self) -> None:
        telemetry = Telemetry()
        make = SimpleNamespace(body=doubles.body, Api=doubles.ApiDouble, settings=doubles.SETTINGS)
        pools = [{"name": "cpu", "accelerator": "cpu", "minReplicas": 2}]
        cluster = Cluster(make, doubles.body(self._policy, "factory", pools=pools, rollout=ROLLOUT))
        cluster.door = _Counted(cluster.api, telemetry)
        cluster.boot()
        telemetry.watch(
            lambda: {
                metrics.OPERATOR_LEADS: 1.0,
                metrics.OPERATOR_QUEUE: float(cluster.controller.queue.depth),
                metrics.OPERATOR_SILENCE: 0.0,
                metrics.OPERATOR_WATCH_DEAD: 0.0,
            },
            lambda: list(cluster.controller.statuses.values()),
        )
        scraped = asyncio.Semaphore(0)

        def exposition() -> bytes:
            scraped.release()
            return telemetry.exposition()

        runner = await health.serve(self.address, lambda: "", lambda: "", exposition)
        self._started.set()
        original = cluster.live["spec"]["model"]
        while not self._stop.is_set():
            if self._commands:
                bad = self._commands.pop(0) == "bad"
                cluster.trial = differing_trial if bad else good_trial
                cluster.edit(model=original | {"revision": "b"} if bad else original)
            began = time.monotonic()
            await cluster.run(10.0)  # ten seconds of the cluster's time
            telemetry.reconciled("done", time.monotonic() - began)
            await asyncio.sleep(0.2)
            if b'track="candidate"' in telemetry.exposition():
                while not scraped.locked():  # those before this one
                    await scraped.acquire()
                for _ in range(SCRAPES_OF_A_CANDIDATE):
                    # None comes any more once Prometheus has been stopped.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(scraped.acquire(), 5.0)
        await runner.cleanup()
