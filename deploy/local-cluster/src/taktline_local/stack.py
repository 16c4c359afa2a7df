"""A PolicyDeployment without a cluster: the operator's plan, run by the process node's Pod runner, one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from taktline_protocol import tracing
from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_local.container import RunnerSettings, timestamp
from taktline_local.fields import ContainerConfigError
from taktline_local.network import LoopbackNetwork
from taktline_local.node import default_search_path
from taktline_local.pod import PodRunner

Object = dict[str, Any]
Say = Callable[[str], None]

ROUTES_CONFIG_MAP = "taktline-routes"
ROUTES_FILE = "routes.json"
GATEWAY = "gateway"
EVENTS = "events.log"
STOP_GRACE_S = 10.0
READY_TIMEOUT_S = 300.0


class PlannedObjects:
    """An ObjectSource over the objects of a plan."""

    def __init__(self, items: list[Object]) -> None:
        """`items` are the plan's objects."""
        self._items = {(item["kind"], item["metadata"]["name"]): item for item in items}

    async def config_map(self, namespace: str, name: str) -> Object | None:
        """The planned ConfigMap; the one about traces says what this shell's own variables say."""
        if name == tracing.CONFIG_MAP:
            return {"data": {name: os.environ[name] for name in tracing.VARIABLES if name in os.environ}}
        return self._items.get(("ConfigMap", name))

    async def secret(self, namespace: str, name: str) -> Object | None:
        """Plans hold no Secrets."""
        return None

    async def claim_path(self, namespace: str, name: str) -> str:
        """Claims need a cluster."""
        raise ContainerConfigError(f"claim {name} needs a cluster; name a folder in spec.model.source.path")

    async def token(self, pod: Object, audience: str | None, expiration_s: int) -> str:
        """Tokens need a cluster."""
        raise ContainerConfigError("service account tokens need a cluster")


@dataclass(frozen=True)
class StackOptions:
    """What to run.

    Attributes:
        file: PolicyDeployment YAML.
        folder: where logs and working files go.
        port: the gateway's, on loopback; 0 picks a free one.
        workers: workers of each pool; None keeps the file's.
    """

    file: Path
    folder: Path
    port: int
    workers: int | None = None


def run_planner(file: Path, observed: Path | None = None) -> list[Object]:
    """The operator's plan for `file`, as objects. Raises TaktlineError with the planner's own words."""
    command = ["taktline-operator", "plan", "-f", str(file)]
    if observed is not None:
        command += ["--observed", str(observed)]
    environment = {**os.environ, "PATH": default_search_path()}
    try:
        # In a session of its own: a Ctrl-C in the terminal is this program's to hear, and no fault of the file.
        reply = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, start_new_session=True
        )
    except FileNotFoundError as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "the command taktline-operator is not installed here",
            "run `make setup` in the repository",
        ) from error
    if reply.returncode != 0:
        words = reply.stderr.strip().splitlines()
        reason = words[-1] if words else f"exit code {reply.returncode}"
        reason = reason.removeprefix("taktline-operator: ").removeprefix(f"{ErrorCode.CONFIG_INVALID.value}: ")
        message, next_step = split_next_step(reason)
        raise TaktlineError(ErrorCode.CONFIG_INVALID, message, next_step or f"correct {file}")
    items: list[Object] = json.loads(reply.stdout)["items"]
    return items


def split_next_step(text: str) -> tuple[str, str]:
    """A printed TaktlineError, `message (next step)`, as its two parts; the second is empty where there is none."""
    depth = 0
    for position in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[position], 0)
        if depth <= 0:
            break
    else:
        return text, ""
    if not text.endswith(")") or position == 0:
        return text, ""
    return text[:position].rstrip(), text[position + 1 : -1]


def planned_pods(items: list[Object], workers: int | None) -> list[Object]:
    """The Pods that the plan's Deployments would have, `workers` of each where given.

    Raises:
        TaktlineError: CONFIG_INVALID; a worker is a group of pods, which needs an API server's controllers.
    """
    pods = []
    for deployment in items:
        if deployment["kind"] in ("StatefulSet", "LeaderWorkerSet", "RayService"):
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"a worker of {deployment['metadata']['name']} is several pods ({deployment['kind']}), and one machine"
                " runs workers of one pod",
                "leave pools[].gpusPerNode and engine.runtime out here: all ranks then run in one pod",
            )
        if deployment["kind"] != "Deployment":
            continue
        template = deployment["spec"]["template"]
        for number in range(deployment["spec"].get("replicas", 1) if workers is None else workers):
            metadata = {
                **template["metadata"],
                "name": f"{deployment['metadata']['name']}-{number}",
                "namespace": deployment["metadata"].get("namespace", "default"),
                "uid": str(uuid.uuid4()),
            }
            pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    return pods


def gateway_pod(routes: Path, port: int) -> Object:
    """The gateway's Pod; it listens on plain loopback, where robots and people expect it."""
    probe = {"httpGet": {"path": "/readyz", "port": port, "host": "127.0.0.1"}, "periodSeconds": 1}
    command = ["taktline-gateway", "serve", "--routes", str(routes), "--listen", f"127.0.0.1:{port}"]
    reference = {"name": tracing.CONFIG_MAP, "optional": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": GATEWAY, "namespace": "default", "uid": str(uuid.uuid4())},
        "spec": {
            "restartPolicy": "Always",
            "containers": [
                {
                    "name": GATEWAY,
                    "command": command,
                    "env": [
                        {"name": name, "valueFrom": {"configMapKeyRef": reference | {"key": name}}}
                        for name in tracing.VARIABLES
                    ],
                    "readinessProbe": probe,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                }
            ],
        },
    }


def choose_port(port: int) -> int:
    """`port` itself where it is free, a free one for 0. Raises TaktlineError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"port {port} of 127.0.0.1 cannot be used: {error.strerror}",
                "choose another with --port, or 0 for any free one",
            ) from error
        return int(probe.getsockname()[1])


class Stack:
    """Workers and one gateway on this machine; an asynchronous context manager.

    Attributes:
        policies: names of the policies in the file.
        url: the gateway's address.
    """

    def __init__(self, options: StackOptions, say: Say) -> None:
        """`say` takes one line for each thing a person should know. Raises TaktlineError for a bad file or port."""
        self.options = options
        self._say = say
        items = run_planner(options.file)
        self.policies = [item["metadata"]["name"] for item in items if item["kind"] == "PolicyDeployment"]
        self._items = items
        self._objects = [item for item in items if item["kind"] not in ("PolicyDeployment", "Pod")]
        self._pod_objects = planned_pods(items, options.workers)
        if not self._pod_objects:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID, f"{options.file} asks for no worker", "set minReplicas, or give --workers"
            )
        self.port = choose_port(options.port)
        self.url = f"http://127.0.0.1:{self.port}"
        self.routes = options.folder / ROUTES_FILE
        self._network = LoopbackNetwork()
        self._source = PlannedObjects(items)
        self._settings = RunnerSettings(search_path=default_search_path())
        self._runners: dict[str, PodRunner] = {}
        self._changed = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._began = 0.0

    async def __aenter__(self) -> Stack:
        """Start workers, then the gateway; returns when a request would be answered. Raises TaktlineError."""
        try:
            self._began = asyncio.get_running_loop().time()
            for pod in self._pod_objects:
                self._start(pod)
            self._swap_routes(self._items)
            self._start(gateway_pod(self.routes, self.port))
            for name in self._runners:
                await self._wait_ready(name)
            await self._write_routes()
            await self._wait_served()
            self._keeping = asyncio.create_task(self._keep_routes())
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything."""
        await self.stop()

    async def stop(self) -> None:
        """The gateway first, so that it drains while its workers still answer; then the workers."""
        if self._keeping is not None:
            self._keeping.cancel()
        gateway = self._runners.pop(GATEWAY, None)
        if gateway is not None:
            await gateway.stop(STOP_GRACE_S)
        await asyncio.gather(*(runner.stop(STOP_GRACE_S) for runner in self._runners.values()))
        self._runners.clear()
        self._network.close()

    def log_of(self, name: str) -> Path:
        """Log file of the container in this Pod."""
        return self._runners[name].main[0].log

    def _start(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        events = self.options.folder / EVENTS

        def event(reason: str, message: str, *, warning: bool = False) -> None:
            with events.open("a") as handle:
                handle.write(f"{timestamp()} {name} {reason}: {message}\n")

        folder = self.options.folder / name
        folder.mkdir(parents=True)
        self._runners[name] = PodRunner(
            pod,
            ip=self._network.take(),
            host_ip=self._network.node_address,
            folder=folder,
            source=self._source,
            settings=self._settings,
            event=event,
            changed=self._changed.set,
        )
        self._runners[name].start()

    async def _wait_ready(self, name: str) -> None:
        runner = self._runners[name]
        container = runner.main[0]
        clock = asyncio.get_running_loop().time
        while not container.ready:
            ended = container.state.get("terminated") or container.last_state.get("terminated")
            if ended:
                raise TaktlineError(
                    ErrorCode.WORKER_FAILED,
                    f"{name} ended with exit code {ended['exitCode']}: {last_words(ended.get('message', ''))}",
                    f"read the logs in {container.log.parent}",
                )
            waiting = container.state.get("waiting", {}).get("message")
            if waiting and clock() - self._began > 1.0:
                raise TaktlineError(ErrorCode.CONFIG_INVALID, f"{name}: {waiting}", f"correct {self.options.file}")
            if clock() - self._began > READY_TIMEOUT_S:
                raise TaktlineError(
                    ErrorCode.WORKER_FAILED,
                    f"{name} was not ready after {READY_TIMEOUT_S:.0f} s",
                    f"read {container.log}",
                )
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._changed.wait()
        address = self.url if name == GATEWAY else runner.ip
        self._say(f"{name} is ready after {clock() - self._began:.1f} s on {address}")

    async def _wait_served(self) -> None:
        """Until the gateway has taken up the routes and spoken with a worker of every policy."""
        clock = asyncio.get_running_loop().time
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as session:
            while True:
                served = (await session.get("/v1/policies")).json().get("policies", [])
                if {item["policy"] for item in served if item["ready"]} >= set(self.policies):
                    return
                if clock() - self._began > READY_TIMEOUT_S:
                    raise TaktlineError(
                        ErrorCode.WORKER_UNAVAILABLE,
                        "the gateway does not reach the workers, which are ready",
                        f"read {self._runners[GATEWAY].main[0].log}",
                    )
                await asyncio.sleep(0.1)

    async def _write_routes(self) -> None:
        """Ask the planner for the routes to the workers that are ready now, and swap them in at one instant."""
        pods = [
            {**pod, "status": self._runners[pod["metadata"]["name"]].status()}
            for pod in self._pod_objects
            if pod["metadata"]["name"] in self._runners
        ]
        observed = self.options.folder / "observed.json"
        observed.write_text(json.dumps({"kind": "List", "items": [*self._objects, *pods]}))
        self._swap_routes(await asyncio.to_thread(run_planner, self.options.file, observed))

    def _swap_routes(self, planned: list[Object]) -> None:
        table = next(
            item for item in planned if item["kind"] == "ConfigMap" and item["metadata"]["name"] == ROUTES_CONFIG_MAP
        )
        staged = self.routes.with_suffix(".staged")
        staged.write_text(table["data"][ROUTES_FILE])
        staged.rename(self.routes)

    async def _keep_routes(self) -> None:
        """Follow workers and the gateway as they die and come back, until cancelled."""
        known = self._runs_by_pod()
        logs = {name: runner.main[0].log for name, runner in self._runners.items()}
        while True:
            self._changed.clear()
            await self._changed.wait()
            now = self._runs_by_pod()
            for name in sorted(known.keys() | now.keys()):
                if known.get(name) == now.get(name):
                    continue
                if name not in now:
                    self._say(f"{name} is not ready any more, it is started again; read {logs[name]}")
                    continue
                # Who dies and comes back while routes are being written was never seen away.
                died = f" died (read {logs[name]}) and" if name in known else ""
                self._say(f"{name}{died} is ready again")
                logs[name] = self._runners[name].main[0].log
            changed = {name for name in known.keys() | now.keys() if known.get(name) != now.get(name)}
            known = now
            if changed - {GATEWAY}:
                await self._write_routes()

    def _runs_by_pod(self) -> dict[str, int]:
        """The Pods that are ready, each with the number of its run."""
        return {name: runner.main[0].run_number for name, runner in self._runners.items() if runner.main[0].ready}


def last_words(message: str) -> str:
    """The human line among a worker's last log lines: the last that is no JSON object."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    human = [line for line in lines if not line.startswith("{")]
    return (human or lines or ["no message"])[-1]
