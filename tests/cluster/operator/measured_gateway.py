"""A gateway that only says what it measures, as a pod of the hand-driven node."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from taktline_local.kubectl import Kubectl

from benchmarks.operator.noisy_gateway import GATEWAY, SYSTEM, NoisyGateway
from tests.cluster.operator.conftest import NODE

Json = dict[str, Any]


@contextlib.contextmanager
def measured_gateway(kubectl: Kubectl, node: Any, policy: str, rate: float) -> Iterator[NoisyGateway]:
    """It answers the operator, which finds it by a pod of its own.

    Args:
        node: the hand-driven node, on which workers serve meanwhile.
        rate: observations a second of the policy.
    """
    gateway = NoisyGateway(policy, "line", rate=rate)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(gateway.start(), loop).result(30)

    def behave(pod: Json) -> Json:
        status: Json = node.serving(pod)
        here = {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
        return status | here if pod["metadata"]["name"] == GATEWAY else status

    node.behave = behave
    try:
        kubectl.apply(gateway.pod({"taktline-test": NODE}))
        yield gateway
    finally:
        kubectl("-n", SYSTEM, "delete", "pod", GATEWAY, "--ignore-not-found", "--timeout=60s")
        asyncio.run_coroutine_threadsafe(gateway.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
