"""One container of a Pod as one local process: started, probed, restarted with back-off, stopped with grace."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from taktline_local.child import Child, tail
from taktline_local.fields import ContainerConfigError, ObjectSource, container_variables, expand
from taktline_local.paths import LocalPaths, bind_address, peer_names
from taktline_local.probes import ProbeTarget, check, run_command
from taktline_local.tasks import end_task

Object = dict[str, Any]

TERMINATION_MESSAGE_BYTES = 4096
STEADY_RUN_S = 600.0
INHERITED = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MUJOCO_GL", "OPENBLAS_CORETYPE")


@dataclass(frozen=True)
class RunnerSettings:
    """How containers are run here.

    Attributes:
        search_path: PATH of every container; the project's own commands come from it.
        restart_base_s, restart_cap_s: back-off of a crashing container, doubling from the first to the second value.
        api_server: (host, port) told to containers, None where there is no API.
    """

    search_path: str
    restart_base_s: float = 1.0
    restart_cap_s: float = 60.0
    api_server: tuple[str, int] | None = None


class EventSink(Protocol):
    """Takes the Pod's events."""

    def __call__(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Report one event."""


@dataclass
class PodContext:
    """What the containers of one Pod share; `address_of` knows Pods by name (`paths.peer_names`)."""

    pod: Object
    pod_ip: str
    host_ip: str
    folder: Path
    source: ObjectSource
    settings: RunnerSettings
    event: EventSink
    changed: Callable[[], None]
    paths: LocalPaths = field(default_factory=lambda: LocalPaths({}))
    address_of: Callable[[str], str] = str


def timestamp() -> str:
    """Now, as the API writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ContainerRunner:
    """Supervises one container from its first start until it may not be started again.

    Attributes:
        state, last_state: in the API's form (`{"running": {...}}`).
        ready, started: results of the readiness and startup probes.
    """

    def __init__(self, context: PodContext, spec: Object, *, init: bool, restarts: int = 0) -> None:
        """`restarts` continues the count of an earlier node process."""
        self.spec = spec
        self.name: str = spec["name"]
        self.state: Object = {"waiting": {"reason": "PodInitializing" if not init else "ContainerCreating"}}
        self.last_state: Object = {}
        self.restarts = restarts
        self.ready = False
        self.started = False
        self._context = context
        self._init = init
        self._child: Child | None = None
        self._runs = 0
        self._stopping = asyncio.Event()
        self._environment: dict[str, str] = {}
        self._grace_s = float(context.pod["spec"].get("terminationGracePeriodSeconds", 30))

    @property
    def exit_code(self) -> int | None:
        """Exit code where the container has ended for now, else None."""
        code = self.state.get("terminated", {}).get("exitCode")
        return None if code is None else int(code)

    @property
    def log(self) -> Path:
        """Log file of the current or latest run."""
        return self.log_of(self._runs)

    def log_of(self, run: int) -> Path:
        """Log file of the run with this number, counted from 0."""
        return self._context.folder / "logs" / self.name / f"{run}.log"

    @property
    def run_number(self) -> int:
        """Number of the current or latest run."""
        return self._runs

    async def supervise(self) -> None:
        """Run the container until it is done or `stop` is called."""
        delay = 0.0
        while not self._stopping.is_set():
            began = asyncio.get_running_loop().time()
            if not await self._start():
                await self._pause(self._context.settings.restart_base_s)
                continue
            if self._child is not None:
                await self._attend(self._child)
            if self._stopping.is_set() or not self._restarts_after(self.exit_code or 0):
                return
            if asyncio.get_running_loop().time() - began > STEADY_RUN_S:
                delay = 0.0
            await self._back_off(delay)
            settings = self._context.settings
            delay = min(max(2 * delay, settings.restart_base_s), settings.restart_cap_s)
            self._runs += 1
            self.restarts += 1

    async def stop(self, grace_s: float) -> None:
        """preStop hook, SIGTERM, at most `grace_s` seconds in all, SIGKILL. `supervise` returns afterwards."""
        self._stopping.set()
        child = self._child
        if child is None or child.exit_code() is not None:
            return
        deadline = asyncio.get_running_loop().time() + grace_s
        hook = self.spec.get("lifecycle", {}).get("preStop")
        if hook:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._run_hook(hook)
        await child.stop(max(0.0, deadline - asyncio.get_running_loop().time()))

    def _restarts_after(self, code: int) -> bool:
        policy = self._context.pod["spec"].get("restartPolicy", "Always")
        if self._init:
            return code != 0 and policy != "Never"
        return policy == "Always" or (policy == "OnFailure" and code != 0)

    def _set_state(self, state: Object) -> None:
        self.state = state
        self._context.changed()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _back_off(self, delay: float) -> None:
        if delay == 0.0:
            return
        self.last_state = self.state
        message = f"back-off {delay:g}s restarting failed container={self.name}"
        self._set_state({"waiting": {"reason": "CrashLoopBackOff", "message": message}})
        self._context.event("BackOff", message, warning=True)
        await self._pause(delay)

    async def _start(self) -> bool:
        """Start the process; False where its configuration is not there yet."""
        try:
            command = await self._resolve()
        except ContainerConfigError as error:
            self._set_state({"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}})
            self._context.event("Failed", f"Error: {error}", warning=True)
            return False
        if "terminated" in self.state:
            self.last_state = self.state
        self.ready = False
        self.started = False
        self._termination_file().parent.mkdir(parents=True, exist_ok=True)
        self._termination_file().write_bytes(b"")
        executable = shutil.which(command[0], path=self._environment["PATH"])
        if executable is None:
            self._child = None
            message = f"executable {command[0]!r} not found on {self._environment['PATH']}"
            self._terminated(128, "StartError", message, timestamp())
            self._context.event("Failed", f"Error: {message}", warning=True)
            return True
        self._child = Child([executable, *command[1:]], log=self.log, env=self._environment, cwd=self._folder())
        self._set_state({"running": {"startedAt": timestamp()}})
        self._context.event("Started", f"Started process {self._child.pid} for container {self.name}; log {self.log}")
        return True

    async def _resolve(self) -> list[str]:
        """Command line with every reference resolved; also sets the environment. Raises ContainerConfigError."""
        context = self._context
        declared = await container_variables(context.pod, self.spec, context.source, context.pod_ip, context.host_ip)
        declared = {name: self._localise(value) for name, value in declared.items()}
        scratch = context.folder / "tmp"
        scratch.mkdir(exist_ok=True)
        self._environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self._environment |= {
            "PATH": context.settings.search_path,
            "HOME": str(self._folder()),
            "TMPDIR": str(scratch),
            "HOSTNAME": context.pod["metadata"]["name"],
        }
        if context.settings.api_server is not None:
            host, port = context.settings.api_server
            self._environment |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
        kubeconfig = context.folder / "kubeconfig"
        if kubeconfig.exists():
            # In-cluster clients look for the token at a fixed path, which nobody can mount here.
            self._environment["KUBECONFIG"] = str(kubeconfig)
        self._environment |= declared
        return self._command_line([*self.spec["command"], *self.spec.get("args", [])])

    def _command_line(self, words: list[str]) -> list[str]:
        return [self._localise(expand(word, self._environment)) for word in words]

    def _localise(self, value: str) -> str:
        value = bind_address(self._context.paths.rewrite(value), self._context.pod_ip)
        value = peer_names(value, self._context.pod, self._context.address_of)
        container_path = self.spec.get("terminationMessagePath", "/dev/termination-log")
        return value.replace(container_path, str(self._termination_file()))

    def _folder(self) -> Path:
        declared = self.spec.get("workingDir")
        if declared and self._context.paths.local(declared).is_dir():
            return self._context.paths.local(declared)
        own = self._context.folder / "work" / self.name
        own.mkdir(parents=True, exist_ok=True)
        return own

    def _termination_file(self) -> Path:
        return self._context.folder / "termination" / self.name

    async def _attend(self, child: Child) -> None:
        """Probe the process until it ends, then record how."""
        started_at = self.state["running"]["startedAt"]
        probing = asyncio.create_task(self._probe(child))
        probing.add_done_callback(self._report_broken_probe)
        try:
            code = await child.wait()
        finally:
            child.send(signal.SIGKILL)  # only when cancelled is anything left to kill
            await end_task(probing)
        self._terminated(code, "Completed" if code == 0 else "Error", self._termination_message(code), started_at)

    def _termination_message(self, code: int) -> str:
        written = self._termination_file().read_bytes()[:TERMINATION_MESSAGE_BYTES].decode("utf-8", "replace")
        if not written and code != 0 and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            return tail(self.log)
        return written

    def _terminated(self, code: int, reason: str, message: str, started_at: str) -> None:
        self.ready = False
        self.started = False
        terminated = {"exitCode": code, "reason": reason, "startedAt": started_at, "finishedAt": timestamp()}
        if message:
            terminated["message"] = message
        self._set_state({"terminated": terminated})

    async def _probe(self, child: Child) -> None:
        """Startup probe first, then readiness and liveness side by side."""
        startup = self.spec.get("startupProbe")
        if startup and not await self._passes_startup(startup, child):
            return
        self.started = True
        self.ready = "readinessProbe" not in self.spec
        self._context.changed()
        loops = []
        if readiness := self.spec.get("readinessProbe"):
            loops.append(self._probe_readiness(readiness))
        if liveness := self.spec.get("livenessProbe"):
            loops.append(self._probe_liveness(liveness, child))
        await asyncio.gather(*loops)

    def _report_broken_probe(self, probing: asyncio.Task[None]) -> None:
        if not probing.cancelled() and (error := probing.exception()) is not None:
            self._context.event("ProbeError", f"{self.name}: {type(error).__name__}: {error}", warning=True)

    async def _check(self, probe: Object, kind: str) -> bool:
        command = self._command_line(probe["exec"]["command"]) if "exec" in probe else None
        result = await check(probe, self._target(), command)
        if not result.passed and not self._stopping.is_set():
            self._context.event("Unhealthy", f"{kind} probe failed: {result.message}", warning=True)
        return result.passed

    def _target(self) -> ProbeTarget:
        ports = {port["name"]: int(port["containerPort"]) for port in self.spec.get("ports", []) if "name" in port}
        return ProbeTarget(self._context.pod_ip, ports, self._environment, self._folder())

    async def _passes_startup(self, probe: Object, child: Child) -> bool:
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        failures = 0
        while not await self._check(probe, "Startup"):
            failures += 1
            if failures >= probe.get("failureThreshold", 3):
                await self._kill_unhealthy(child, "startup")
                return False
            await asyncio.sleep(probe.get("periodSeconds", 10))
        return True

    async def _probe_readiness(self, probe: Object) -> None:
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        passed = failed = 0
        while True:
            if await self._check(probe, "Readiness"):
                passed, failed = passed + 1, 0
            else:
                passed, failed = 0, failed + 1
            ready = self.ready
            if passed >= probe.get("successThreshold", 1):
                ready = True
            elif failed >= probe.get("failureThreshold", 3):
                ready = False
            if ready != self.ready:
                self.ready = ready
                self._context.changed()
            # Until the first success ask every second at least: a demo should not wait out a long period.
            await asyncio.sleep(probe.get("periodSeconds", 10) if ready else min(1, probe.get("periodSeconds", 10)))

    async def _probe_liveness(self, probe: Object, child: Child) -> None:
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        failures = 0
        while True:
            failures = 0 if await self._check(probe, "Liveness") else failures + 1
            if failures >= probe.get("failureThreshold", 3):
                await self._kill_unhealthy(child, "liveness", probe.get("terminationGracePeriodSeconds"))
                return
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _kill_unhealthy(self, child: Child, kind: str, grace_s: float | None = None) -> None:
        self._context.event("Killing", f"Container {self.name} failed its {kind} probe and will be stopped")
        await child.stop(self._grace_s if grace_s is None else float(grace_s))

    async def _run_hook(self, hook: Object) -> None:
        if "sleep" in hook:
            await asyncio.sleep(float(hook["sleep"]["seconds"]))
            return
        probe = {**hook, "timeoutSeconds": self._grace_s}
        if "exec" in hook:
            result = await run_command(self._command_line(hook["exec"]["command"]), self._target())
        else:
            result = await check(probe, self._target())
        if not result.passed:
            self._context.event("FailedPreStopHook", f"preStop hook failed: {result.message}", warning=True)
