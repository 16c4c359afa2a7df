"""One replica: a process that serves the policy on a Unix socket, watched, restarted, and told to leave."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_protocol.rpc import CHANNEL_OPTIONS

logger = logging.getLogger(__name__)

EXIT_REFUSED = 2
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0
"""A replica that served for so long starts again after the first pause."""
POLL_S = 0.05
LOG_S = 1.0
"""What a replica wrote before it ended is read within so long."""
PREFIX = "taktline-worker: "


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one replica.

    Attributes:
        index: its number in the pod.
        command: program and arguments.
        environment: whole environment, with the device that this replica owns.
        socket: path of the Unix socket that it listens on.
        grace_s: how long it may take to leave.
    """

    index: int
    command: tuple[str, ...]
    environment: dict[str, str]
    socket: Path
    grace_s: float


class Replica:
    """Keeps one process running. All callbacks come from the replica's own thread.

    Args:
        on_up: called with the replica's Info each time it is ready.
        on_down: called when it has ended without being told to.
    """

    def __init__(
        self,
        launch: Launch,
        on_up: Callable[[Replica, worker_pb2.InfoResponse], None],
        on_down: Callable[[Replica, int], None],
    ) -> None:
        self.index = launch.index
        self.metrics_address = ""
        """Where the present process answers GET /metrics."""
        self.refusal = ""
        """The plain line of a replica that refused its policy or configuration before it ever served."""
        self._launch = launch
        self._on_up, self._on_down = on_up, on_down
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._channel = grpc.insecure_channel(f"unix:{launch.socket}", options=CHANNEL_OPTIONS)
        self.infer = self._channel.unary_unary(f"/{_service()}/Infer")
        """Raw bytes of an InferRequest to raw bytes of an InferResponse."""
        self._thread = threading.Thread(target=self._keep, name=f"replica-{launch.index}", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id; None while none runs."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process and its watcher."""
        self._thread.start()

    def end(self) -> None:
        """Ends the process at once; its watcher starts another one."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """Tells the process to finish what it runs and leave; waits for it, then ends it."""
        self._stop.set()
        self._terminate()
        self._thread.join(self._launch.grace_s)
        self.end()
        self._thread.join()
        self._channel.close()

    def _keep(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            began = time.monotonic()
            process = self._spawn()
            if process is None:
                return
            reader = threading.Thread(target=self._relay, args=(process.stderr,), daemon=True)
            reader.start()
            served = self._wait_ready(process)
            info = self._info() if served else None
            if info is not None:
                self._on_up(self, info)
            code = process.wait()
            reader.join(LOG_S)  # what it started may outlive it and hold its standard error open
            with self._lock:
                self._process = None
            if self._stop.is_set():
                return
            if not served and code == EXIT_REFUSED and not self.refusal:
                self.refusal = f"{PREFIX}config_invalid: replica {self.index} refused to start (see its log)"
            self._on_down(self, code)
            pause = FIRST_PAUSE_S if time.monotonic() - began >= STEADY_S else pause
            logger.error(
                "a replica ended",
                extra={"replica": self.index, "exit_code": code, "served": served, "restart_in_s": pause},
            )
            self._stop.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _spawn(self) -> subprocess.Popen[str] | None:
        with contextlib.suppress(FileNotFoundError):
            self._launch.socket.unlink()
        with self._lock:
            if self._stop.is_set():
                return None
            # A session of its own: a Ctrl-C for this process is no order to the replicas, which are told one by one.
            # Its standard input stays open for as long as this process lives, however that ends.
            self._process = subprocess.Popen(
                self._launch.command,
                env=self._launch.environment,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="backslashreplace",
                start_new_session=True,
            )
        logger.info("replica starts", extra={"replica": self.index, "pid": self._process.pid})
        return self._process

    def _relay(self, stream: IO[str] | None) -> None:
        """Passes the replica's log on with its number; keeps the plain line of a refusal.

        It reads to the end whatever becomes of the lines: a replica whose log nobody reads stops at a full pipe.
        """
        for line in stream or ():
            if line.startswith(PREFIX):
                self.refusal = self.refusal or line.rstrip("\n")
                continue
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    if record.get("message") == "metrics":
                        self.metrics_address = str(record.get("address", ""))
                        continue
                    line = json.dumps(record | {"replica": self.index}) + "\n"
            with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe: there is nowhere to tell
                sys.stderr.write(line)
                sys.stderr.flush()

    def _wait_ready(self, process: subprocess.Popen[str]) -> bool:
        """Whether the process came to serve before it ended."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        while process.poll() is None and not self._stop.is_set():
            with contextlib.suppress(grpc.RpcError):
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return True
            time.sleep(POLL_S)
        return False

    def _info(self) -> worker_pb2.InfoResponse | None:
        """What the process serves; None where it has ended meanwhile."""
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]  # generated code
        try:
            response: worker_pb2.InfoResponse = stub.Info(worker_pb2.InfoRequest(), timeout=10.0)
        except grpc.RpcError as error:
            logger.error(
                "a replica does not say what it serves", extra={"replica": self.index, "reason": str(error.code())}
            )
            self._terminate()
            return None
        return response

    def _terminate(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.terminate()


def leave_with_parent() -> None:
    """Ends this process like a SIGTERM does once the one that started it is gone: its standard input then closes."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 64):
                pass
        os.kill(os.getpid(), 15)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _service() -> str:
    return str(worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name)
