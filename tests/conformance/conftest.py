"""A gateway before mirror workers, all real processes, and the real client packages in environments of their own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.waiting import until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taktline" / "clients"
NO_NETWORK = ("dns error", "error sending request", "failed to fetch", "timed out", "connection refused", "unreachable")


class Fleet:
    """One gateway with its client ports and any number of mirror workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.routes = folder / "routes.json"
        self.log = folder / "gateway.log"
        self.table: dict[str, dict] = {}
        self.processes: list[subprocess.Popen] = []
        self.gateway: subprocess.Popen | None = None
        self.url = ""

    def worker(self, policy: str, address: str | None = None, **options) -> str:
        address = address or f"127.0.0.1:{free_port()}"
        flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, str(HERE / "mirror_worker.py"), "--listen", address, "--policy", policy, *flags]
        self.processes.append(subprocess.Popen(command))
        return address

    def route(self, policy: str, *addresses: str, **options) -> None:
        self.table[policy] = {
            "policy": policy,
            "targets": [{"address": address} for address in addresses],
            "max_wait_ms": 0,
            **options,
        }
        temporary = self.routes.with_suffix(".new")
        temporary.write_text(json.dumps({"routes": list(self.table.values())}))
        temporary.replace(self.routes)

    def start(self, *flags: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        program = str(Path(sys.executable).parent / "taktline-gateway")
        self.gateway = subprocess.Popen(
            [program, "serve", "--routes", str(self.routes), "--listen", f"127.0.0.1:{port}", *flags],
            stderr=self.log.open("w"),
        )
        self.processes.append(self.gateway)

        def healthy() -> bool:
            assert self.gateway.poll() is None, self.log.read_text()
            try:
                return httpx.get(f"{self.url}/healthz").status_code == 200
            except httpx.HTTPError:
                return False

        until(healthy, "the gateway answering /healthz")

    def wait_ready(self, policy: str) -> None:
        until(lambda: httpx.get(f"{self.url}/v1/policies/{policy}").json().get("ready"), f"{policy} being ready")

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory):
    """A fleet for tests that leave no trace."""
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    yield made
    made.stop()


class ClientEnvironment:
    """A virtual environment with one published client package; scripts of tests/conformance/clients run in it."""

    def __init__(self, python: Path) -> None:
        self.python = python

    def start(self, script: str, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [str(self.python), str(HERE / "clients" / script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str, timeout_s: float = 120):
        """Runs a script to its end; its last line of output is JSON."""
        return self.result(self.start(script, *arguments), timeout_s)

    def result(self, process: subprocess.Popen, timeout_s: float = 120):
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        assert process.returncode == 0, f"the client failed:\n{err[-4000:]}"
        return json.loads(out.splitlines()[-1])


def client_environment(name: str, *requirements: str, overrides: tuple[str, ...] = ()) -> ClientEnvironment:
    """Installs `requirements` once, outside the repository. Where the package index cannot be reached it skips, or
    fails where CI asks for all (CI=true, as `.ci/run` sets): there a real client that was not tried must not pass.

    `overrides` replace what the requirements themselves ask for.
    """
    uv = subprocess.run([str(ROOT / "tools" / "find-uv")], capture_output=True, text=True).stdout.strip()
    if not uv:
        pytest.fail("uv is missing: run `make setup`")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256("\n".join((version, *requirements, *overrides)).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{digest}"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        replaced = CACHE / f"{name}-{digest}.overrides"
        replaced.write_text("\n".join(overrides))
        steps = (
            [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
            [uv, "pip", "install", "--quiet", "--python", str(python), "--override", str(replaced), *requirements],
        )
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode != 0:
                shutil.rmtree(folder, ignore_errors=True)
                if any(sign in done.stderr.lower() for sign in NO_NETWORK) and os.environ.get("CI") != "true":
                    pytest.skip(f"the package index cannot be reached, so {requirements[0]} cannot be installed")
                pytest.fail(f"installing {' '.join(requirements)} failed:\n{done.stderr[-2000:]}")
        complete.touch()
    return ClientEnvironment(python)


@pytest.fixture(scope="session")
def openpi_client() -> ClientEnvironment:
    """The published openpi client; it imports typing_extensions without declaring it."""
    return client_environment("openpi", "openpi-client==0.1.2", "typing_extensions")


@pytest.fixture(scope="session")
def vla_eval_client() -> ClientEnvironment:
    """The published evaluation harness."""
    return client_environment("vla-eval", "vla-eval==0.8.0")
