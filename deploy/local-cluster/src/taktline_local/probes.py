"""One check of a container's health, as its probe describes it: gRPC, HTTP, TCP or a command."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from taktline_local.child import Child, tail

Object = dict[str, Any]


@dataclass(frozen=True)
class ProbeTarget:
    """Where a container's checks go.

    Attributes:
        address: the Pod's IP.
        ports: named container ports.
        environment, folder: for commands.
    """

    address: str
    ports: Mapping[str, int]
    environment: Mapping[str, str]
    folder: Path

    def port(self, value: int | str) -> int:
        """A port number from a number or a container port's name."""
        return self.ports[value] if isinstance(value, str) and value in self.ports else int(value)


@dataclass(frozen=True)
class ProbeResult:
    """Whether the check passed, and what it saw."""

    passed: bool
    message: str


async def check(probe: Object, target: ProbeTarget, command: Sequence[str] | None = None) -> ProbeResult:
    """Run one check within its `timeoutSeconds`; `command` is the exec action's, already rewritten to local paths."""
    timeout = float(probe.get("timeoutSeconds", 1))
    try:
        async with asyncio.timeout(timeout):
            if "grpc" in probe:
                return await _grpc(probe["grpc"], target)
            if "httpGet" in probe:
                return await _http(probe["httpGet"], target)
            if "tcpSocket" in probe:
                return await _tcp(probe["tcpSocket"], target)
            return await run_command(command or [], target)
    except TimeoutError:
        return ProbeResult(False, f"no answer within {timeout:g} s")
    except ValueError as error:
        return ProbeResult(False, f"probe is not usable: {error}")


async def _grpc(action: Object, target: ProbeTarget) -> ProbeResult:
    address = f"{target.address}:{target.port(action['port'])}"
    # A channel of its own for each check, so that a restarted server is not met with an old connection's back-off.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=action.get("service") or "")
            reply = await health_pb2_grpc.HealthStub(channel).Check(request)
        except grpc.aio.AioRpcError as error:
            return ProbeResult(False, f"gRPC health of {address}: {error.code().name} {error.details()}")
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return ProbeResult(status == "SERVING", f"gRPC health of {address}: {status}")


async def _http(action: Object, target: ProbeTarget) -> ProbeResult:
    scheme = action.get("scheme", "HTTP").lower()
    host = action.get("host") or target.address
    url = f"{scheme}://{host}:{target.port(action['port'])}{action.get('path') or '/'}"
    headers = {header["name"]: header["value"] for header in action.get("httpHeaders", [])}
    try:
        # Certificates are not verified: the kubelet does not either.
        async with httpx.AsyncClient(verify=False, trust_env=False) as session:  # noqa: S501
            reply = await session.get(url, headers=headers)
    except httpx.HTTPError as error:
        return ProbeResult(False, f"GET {url}: {error or type(error).__name__}")
    return ProbeResult(200 <= reply.status_code < 400, f"GET {url}: {reply.status_code} {reply.text[:200]}")


async def _tcp(action: Object, target: ProbeTarget) -> ProbeResult:
    host, port = action.get("host") or target.address, target.port(action["port"])
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        return ProbeResult(False, f"TCP {host}:{port}: {error.strerror or error}")
    writer.close()
    return ProbeResult(True, f"TCP {host}:{port}: open")


async def run_command(command: Sequence[str], target: ProbeTarget) -> ProbeResult:
    """Run a probe's or a hook's command; passes on exit code 0. Cancelling it kills the command."""
    with tempfile.TemporaryDirectory() as folder:
        child = Child(command, log=Path(folder) / "output", env=target.environment, cwd=target.folder)
        try:
            code = await child.wait()
        finally:
            child.stop_blocking(0)
        return ProbeResult(code == 0, f"exit code {code}: {tail(child.log, max_lines=3)}")
