"""A watch that goes silent without an error: the operator notices, reconnects, and misses nothing for good."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from taktline_local.kubectl import wait_until

pytestmark = pytest.mark.slow

WORST_CASE_S = 200  # a dead-stream timeout, a request timeout and a resync, one after the other


class BlackHole:
    """A TCP proxy whose open connections can be swallowed: they stay open and nothing passes any more."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._epoch = 0  # connections of an older epoch are swallowed
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self) -> None:
        """From now on nothing passes through the connections that are open now; new ones work."""
        self._epoch += 1

    def close(self) -> None:
        """Accept no more."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self.accepted += 1
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink, self._epoch), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, epoch: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if epoch == self._epoch:
                    sink.sendall(data)
            if epoch == self._epoch:
                sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def black_hole(operator_kubeconfig: Path, tmp_path: Path) -> Iterator[tuple[BlackHole, Path]]:
    """The proxy in front of the API server, and a kubeconfig that goes through it."""
    found = yaml.safe_load(operator_kubeconfig.read_text())
    address = urlsplit(found["clusters"][0]["cluster"]["server"])
    proxy = BlackHole(str(address.hostname), int(address.port or 443))
    found["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    path = tmp_path / "through-proxy"
    path.write_text(yaml.safe_dump(found))
    yield proxy, path
    proxy.close()


def test_changes_during_a_silent_watch_are_not_lost(
    policies: Any, node: Any, black_hole: tuple[BlackHole, Path], start_operator: Callable[..., Any]
) -> None:
    proxy, kubeconfig = black_hole
    start_operator("silent", f"--kubeconfig={kubeconfig}", "--resync-seconds=5")
    policies.kubectl.apply(policies.body("pick-silent"))
    policies.wait("pick-silent", "Available", "True")
    connections = proxy.accepted

    proxy.swallow()
    policies.kubectl.apply(policies.body("pick-silent", slo={"controlBudgetMs": 120}))
    pod = next(child for child in policies.children("pick-silent") if child["kind"] == "Pod")
    policies.kubectl("-n", policies.namespace, "delete", "pod", pod["metadata"]["name"])
    lost = node.address(pod) + ":50051"

    def caught_up() -> bool:
        live, routed = policies.get("pick-silent"), policies.routes()["pick-silent"]
        seen = live["status"]["observedGeneration"] == live["metadata"]["generation"]
        return bool(seen and routed and lost not in routed)

    wait_until(caught_up, "the operator has caught up", timeout_s=WORST_CASE_S)
    assert proxy.accepted > connections
