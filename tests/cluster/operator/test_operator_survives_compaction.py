"""A watch that the API server can no longer continue (410 Gone): the operator lists again, and misses nothing.

The API server is stopped, etcd's history is compacted, and it starts again: the versions that the operator's watches
stand at are gone. A proxy between the two keeps the operator away meanwhile, and reads what it is answered.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
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
T = TypeVar("T")


class ReadingProxy:
    """Takes plain HTTP and asks the API server over TLS; can cut and refuse connections, and counts answers of 410.

    All of it runs in one thread's event loop: OpenSSL takes no two threads at one connection.
    """

    def __init__(self, host: str, port: int, authority: Path) -> None:
        self._target = (host, port)
        self._trust = ssl.create_default_context(cafile=str(authority))
        self.gone = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Ends all connections, and every new one at once."""
        self._run(self._cut())

    def mend(self) -> None:
        """New connections work again."""
        self._refusing = False

    def close(self) -> None:
        """Accepts no more, and ends what is open."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _run(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30)

    async def _cut(self) -> None:
        self._refusing = True
        for one in self._open:
            one.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(to_client)
        try:
            if not self._refusing:
                await self._join(client, to_client)
        except OSError:
            pass  # the API server is stopped: its client is told by the end of the connection
        finally:
            to_client.close()
            self._open.discard(to_client)
            self._tasks.discard(task)

    async def _join(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection(*self._target, ssl=self._trust, server_hostname="localhost")
        self._open.add(to_server)
        ways = [
            asyncio.ensure_future(self._pump(client, to_server, False)),
            asyncio.ensure_future(self._pump(server, to_client, True)),
        ]
        try:
            if not self._refusing:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_server.close()
            self._open.discard(to_server)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool) -> None:
        tail = b""
        while data := await source.read(65536):
            if answers:
                self.gone += (tail + data).count(GONE)
                tail = (tail + data)[-len(GONE) + 1 :]
            sink.write(data)
            await sink.drain()


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
