"""A watch that the API server can no longer continue (410 Gone): the operator lists again, and misses nothing.

The API server is stopped, etcd's history is compacted, and it starts again: the versions that the operator's watches
stand at are gone. A proxy between the two keeps the operator away meanwhile, and reads what it is answered.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from taktline_local.cluster import Cluster
from taktline_local.control_plane import ControlPlane
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.programs import build_programs
from taktline_protocol.errors import TaktlineError

from tests.cluster.operator.conftest import MANIFESTS, OperatorProcess, Policies

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 240.0
GONE = b'"code":410'


class ReadingProxy:
    """Takes plain HTTP and asks the API server over TLS; can cut and refuse connections, and counts answers of 410."""

    def __init__(self, host: str, port: int, authority: Path) -> None:
        self._target = (host, port)
        self._trust = ssl.create_default_context(cafile=str(authority))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.gone = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._refusing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends all connections, and every new one at once."""
        with self._lock:
            self._refusing = True
            found, self._open = self._open, set()
        for one in found:
            self._end(one)

    def mend(self) -> None:
        """New connections work again."""
        self._refusing = False

    def close(self) -> None:
        """Accepts no more, and ends what is open."""
        self._listener.close()
        self.cut()

    def _end(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = self._trust.wrap_socket(socket.create_connection(self._target), server_hostname="localhost")
        except OSError:
            self._end(client)
            return
        with self._lock:
            refused = self._refusing
            if not refused:
                self._open |= {client, server}
        if refused:
            self._end(client)
            self._end(server)
            return
        threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
        self._pump(server, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        tail = b""
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(65536):
                if answers:
                    self.gone += (tail + data).count(GONE)
                    tail = (tail + data)[-len(GONE) + 1 :]
                sink.sendall(data)
        self._end(source)
        self._end(sink)


@pytest.fixture
def plane(cluster: Cluster, tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane of the test's own: no other test's API server is stopped."""
    if cluster.control_plane is None:
        pytest.skip("the API server of a cluster that was brought is not stopped")
    with ControlPlane(build_programs(), log_folder=tmp_path) as found:
        yield found


def install(kubectl: Kubectl) -> None:
    for name in ("namespace", "policydeployments", "rbac"):
        kubectl("apply", "--server-side", "-f", str(MANIFESTS / f"{name}.yaml"))
    wait_until(lambda: "policydeployments" in kubectl("api-resources", check=False), "the new kind is published")
    kubectl("create", "namespace", "line")


def settled(policies: Policies, name: str) -> bool:
    live = policies.get(name) or {}
    return bool(live.get("status", {}).get("observedGeneration") == live.get("metadata", {}).get("generation"))


def patiently(look: Callable[[], bool]) -> bool:
    """What a look says; False where kubectl could not answer it."""
    try:
        return look()
    except (TaktlineError, ValueError):
        return False


def test_a_watch_that_is_gone_begins_anew_with_all_that_happened_meanwhile(plane: ControlPlane, tmp_path: Path) -> None:
    kubectl = plane.kubectl
    install(kubectl)
    policies = Policies(kubectl, "line")
    address = urlsplit(plane.url)
    proxy = ReadingProxy(str(address.hostname), int(address.port or 443), plane.certificate_authority)
    token = kubectl("-n", "taktline-system", "create", "token", "taktline-operator").strip()
    found = yaml.safe_load(kubectl.kubeconfig.read_text())
    found["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{proxy.port}"}
    found["users"] = [{"name": user["name"], "user": {"token": token}} for user in found["users"]]
    through = tmp_path / "through-proxy"
    through.write_text(yaml.safe_dump(found))
    operator = OperatorProcess(through, tmp_path / "operator.log")
    operator.start()
    try:
        for name in ("stays", "edited", "removed"):
            kubectl.apply(policies.body(name))
        for name in ("stays", "edited", "removed"):
            wait_until(lambda name=name: settled(policies, name), f"{name} is reconciled", timeout_s=LIMIT_S)
        wait_until(lambda: set(policies.routes()) == {"stays", "edited", "removed"}, "routed", timeout_s=LIMIT_S)
        assert proxy.gone == 0

        proxy.cut()
        kubectl.apply(policies.body("edited", slo={"controlBudgetMs": 120}), policies.body("new"))
        kubectl("-n", "line", "delete", "pd", "removed", "--timeout=120s")
        kubectl("-n", "line", "delete", "service", "stays-workers")
        plane.restart_apiserver(compacted=True)
        proxy.mend()

        def caught_up() -> bool:
            service = kubectl.get("service", "stays-workers", "line")
            reconciled = all(settled(policies, name) for name in ("stays", "edited", "new"))
            return bool(service and reconciled and set(policies.routes()) == {"stays", "edited", "new"})

        # An API server that has just started may still refuse what it serves a moment later.
        wait_until(lambda: patiently(caught_up), "the operator has caught up", timeout_s=LIMIT_S)
        wait_until(lambda: proxy.gone > 0, "the API server has said that a version is gone", timeout_s=LIMIT_S)

        # Its watches live: the next change is seen, by the process that was there all the time.
        kubectl.apply(policies.body("edited", slo={"controlBudgetMs": 140}))

        def budget() -> Any:
            table = (kubectl.get("configmap", "taktline-routes", "taktline-system") or {})["data"]["routes.json"]
            return {route["policy"]: route["control_budget_ms"] for route in json.loads(table)["routes"]}["edited"]

        wait_until(lambda: patiently(lambda: budget() == 140), "the next edit is seen", timeout_s=LIMIT_S)
        assert sum(line["message"] == "operator started" for line in operator.lines()) == 1
    finally:
        operator.stop(kill=True)
        proxy.close()
