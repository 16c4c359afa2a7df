"""Servers under measurement as child processes: started, waited for, watched (CPU, memory, descriptors), ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taktline" / "servers"
LOG_TAIL = 3000
"""Characters of a log that an error shows."""

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ending(log: Path, whose: str) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return f"--- {log}{whose}\n{text[-LOG_TAIL:].strip() or 'no output'}"


class Server:
    """A child process with its output in a file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DISABLE_IMPORT_WARNING": "1"}
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(list(command), cwd=ROOT, env=environment, stdout=output, stderr=output)

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def tail(self) -> str:
        """How its output ends, under a line that says whose it is and whether it still runs."""
        state = "runs" if self.alive else f"ended with {self.process.returncode}"
        return _ending(self.log, f" (process {self.pid}, {state})")

    def cpu_s(self) -> float:
        """CPU seconds of this process and of what it has started, so far."""
        total = 0.0
        for pid in [self.pid, *_descendants(self.pid)]:
            with contextlib.suppress(FileNotFoundError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                total += (int(fields[11]) + int(fields[12])) / _TICK
        return total

    def resident_mib(self) -> float:
        """Resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE / 2**20

    def descriptors(self) -> int:
        """Open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone."""
        if self.alive:
            self.process.send_signal(number)

    def stop(self) -> None:
        """Kills it and whatever it has started: Ray's daemons lead groups of their own."""
        for pid in [*_descendants(self.pid), self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                for child in map(int, (thread / "children").read_text().split()):
                    found += [*_descendants(child), child]
    return found


class ServerEndedError(RuntimeError):
    """A process that was waited for has ended; the text is the end of its log."""


def until(
    condition: Callable[[], object], what: str, timeout_s: float = 60.0, servers: Callable[[], Sequence[Server]] = tuple
) -> None:
    """Waits for a condition that `servers` (asked again each time) bring about.

    Raises ServerEndedError as soon as one of them has ended, TimeoutError after `timeout_s`: both name `what`, and show
    how the logs end.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        running = list(servers())
        ended = [server for server in running if not server.alive]
        if ended:
            raise ServerEndedError("\n".join([f"{what}: a process has ended", *(server.tail() for server in ended)]))
        if time.monotonic() > end:
            late = f"{what} did not happen within {timeout_s:g} s"
            raise TimeoutError("\n".join([late, *(server.tail() for server in running)]))
        time.sleep(0.02)


class Deployment:
    """Workers, a routing table and a gateway, all real processes on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.routes = folder / "routes.json"
        self.log = folder / "gateway.log"
        self.workers: dict[str, Server] = {}
        self.gateway: Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """The gateway's address."""
        return f"http://127.0.0.1:{self.port}"

    def servers(self) -> list[Server]:
        """Every process of it that has been started."""
        return [server for server in (self.gateway, *self.workers.values()) if server is not None]

    def start_worker(self, *flags: str, address: str | None = None) -> str:
        """A no-op worker; returns its address."""
        address = address or f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "benchmarks.gateway.noop_worker", "--listen", address, *flags]
        self.workers[address] = Server(command, self.folder / f"worker-{address.rpartition(':')[2]}.log")
        return address

    def write_routes(
        self,
        addresses: Sequence[str],
        *,
        policy: str = "noop",
        max_batch: int = 16,
        clients: Mapping[str, object] | None = None,
    ) -> None:
        """Routes the policy to these workers; `clients` is the route's mapping by protocol."""
        targets = [{"address": address} for address in addresses]
        route = {"policy": policy, "targets": targets, "max_batch": max_batch, "max_wait_ms": 0}
        route |= {"clients": clients} if clients else {}
        temporary = self.routes.with_suffix(".new")
        temporary.write_text(json.dumps({"routes": [route]}))
        temporary.replace(self.routes)

    def start_gateway(self, *flags: str, port: int | None = None) -> Server:
        """A gateway; the port is kept when it is started again."""
        self.port = port or self.port or free_port()
        # Not by the installed script, so that a tree without an installation (PYTHONPATH) does as well.
        program = [sys.executable, "-c", "import sys; from taktline_gateway.cli import main; sys.exit(main())"]
        command = [*program, "serve", "--routes", str(self.routes), "--listen", f"127.0.0.1:{self.port}", *flags]
        self.gateway = Server(command, self.log)
        return self.gateway

    def ready(self, workers: int, policy: str = "noop") -> bool:
        """Whether the gateway answers and has so many workers."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/policies/{policy}", timeout=2) as answer:  # noqa: S310
                return int(json.load(answer).get("workers", 0)) >= workers
        except (OSError, ValueError):
            return False

    def until_ready(self, workers: int, policy: str = "noop", timeout_s: float = 60.0) -> None:
        """Waits until the gateway has so many workers of the policy.

        Raises what `until` does, with a note of how every other log in the folder ends: a worker may have been started
        by somebody else.
        """
        count = "its worker" if workers == 1 else f"{workers} workers"
        try:
            until(lambda: self.ready(workers, policy), f"the gateway having {count}", timeout_s, self.servers)
        except (TimeoutError, ServerEndedError) as error:
            for log in sorted(set(self.folder.glob("*.log")) - {server.log for server in self.servers()}):
                error.add_note(_ending(log, ""))
            raise

    def stop(self) -> None:
        """Kills everything."""
        for server in self.servers():
            server.stop()


def answers(url: str) -> bool:
    """Whether anything speaks HTTP there."""
    try:
        urllib.request.urlopen(url, timeout=2)  # noqa: S310
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def environment(name: str, *requirements: str) -> Path:
    """The Python of a cached virtual environment with these packages. Raises RuntimeError where it cannot be made."""
    digest = hashlib.sha256("\n".join((sys.version, *requirements)).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        uv = subprocess.run([str(ROOT / "tools" / "find-uv")], capture_output=True, text=True).stdout.strip()
        for step in (
            [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
            [uv, "pip", "install", "--quiet", "--python", str(python), *requirements],
        ):
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{requirements[0]} cannot be installed: {done.stderr[-500:]}")
        (folder / "complete").touch()
    return python
