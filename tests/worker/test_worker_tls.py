"""TLS of the worker's port: who is let in, renewal without restart, and what is refused before anything is loaded."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.lifecycle import Health
from taktline_worker.tls import TlsFiles, server_credentials

from tests.gateway.certificates import Authority
from tests.ports import free_port

NAME = "workers.taktline.internal"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker-certificates")
    return Authority(folder, "factory"), Authority(folder, "stranger")


@pytest.fixture
def port_of():
    """Starts servers of the worker's kind (threads, not asyncio) and stops them at the end."""
    servers = []

    def start(files: TlsFiles) -> int:
        server = grpc.server(ThreadPoolExecutor(2))
        echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {"Echo": echo}),))
        port = server.add_secure_port("127.0.0.1:0", server_credentials(files))
        server.start()
        servers.append(server)
        return port

    yield start
    for server in servers:
        server.stop(None)


def lets_in(port: int, trusted: Authority, pair: tuple[Path, Path] | None) -> bool:
    own = (pair[1].read_bytes(), pair[0].read_bytes()) if pair is not None else (None, None)
    credentials = grpc.ssl_channel_credentials(trusted.ca.read_bytes(), *own)
    options = (("grpc.ssl_target_name_override", NAME),)
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        try:
            return channel.unary_unary("/Test/Echo")(b"x", timeout=5, wait_for_ready=False) == b"x"
        except grpc.RpcError:
            return False


def test_only_gateways_of_the_named_issuer_are_served(authorities, port_of):
    factory, stranger = authorities
    cert, key = factory.issue("worker", NAME)
    port = port_of(TlsFiles(cert, key, factory.ca))
    assert lets_in(port, factory, factory.issue("gateway"))
    assert not lets_in(port, factory, None)
    assert not lets_in(port, factory, stranger.issue("gateway-of-others"))
    assert not lets_in(port, stranger, factory.issue("gateway"))
    open_port = port_of(TlsFiles(cert, key))
    assert lets_in(open_port, factory, None)


def test_a_renewed_certificate_is_served_and_a_broken_one_is_not(authorities, port_of, tmp_path, caplog):
    factory, stranger = authorities
    files = TlsFiles(tmp_path / "crt", tmp_path / "key", tmp_path / "ca")

    def copy(authority: Authority, name: str) -> None:
        cert, key = authority.issue(name, NAME)
        for source, target in ((cert, files.cert), (key, files.key), (authority.ca, files.client_ca)):
            shutil.copy(source, target)

    copy(factory, "worker")
    port = port_of(files)
    gateway, other = factory.issue("gateway"), stranger.issue("gateway-2")
    assert lets_in(port, factory, gateway)
    with caplog.at_level(logging.ERROR):
        files.key.write_text("no key")
        assert lets_in(port, factory, gateway), "the last good certificate stays"
    assert "certificate_refused" in caplog.text
    copy(stranger, "worker-2")
    assert lets_in(port, stranger, other)
    assert not lets_in(port, factory, gateway)


@pytest.mark.parametrize(("cert", "key"), [("absent", "KEY"), ("CERT", "CERT"), ("CA", "KEY")])
def test_files_that_do_not_fit_are_refused(authorities, cert, key):
    factory, _ = authorities
    names = dict(zip(("CERT", "KEY"), factory.issue("worker", NAME), strict=True)) | {"CA": factory.ca}
    with pytest.raises(TaktlineError) as caught:
        TlsFiles(Path(names.get(cert, cert)), Path(names.get(key, key))).contents()
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_the_command_refuses_half_a_pair_before_it_loads_anything(authorities):
    cert, _ = authorities[0].issue("worker", NAME)
    command = [sys.executable, "-c", "import sys; from taktline_worker.cli import main; sys.exit(main())", "serve"]
    done = subprocess.run(
        [*command, "--config", "/absent", "--tls-cert", str(cert)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2


def test_probes_ask_beside_tls_and_get_nothing_else(authorities):
    """A kubelet's gRPC probes know no TLS, so a worker that speaks it answers them on a port of their own."""
    factory, _ = authorities
    cert, key = factory.issue("probed", NAME)
    secure = grpc.server(ThreadPoolExecutor(2))
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    secure.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {"Echo": echo}),))
    secure.add_secure_port("127.0.0.1:0", server_credentials(TlsFiles(cert, key, factory.ca)))
    port = free_port()
    health = Health(secure, f"127.0.0.1:{port}")
    secure.start()

    def asked() -> int:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True).status

    assert asked() == health_pb2.HealthCheckResponse.NOT_SERVING
    health.set(serving=True)
    assert asked() == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/Test/Echo")(b"x", timeout=20)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    secure.stop(None)


def test_a_port_of_probes_that_is_taken_is_refused(authorities):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TaktlineError, match="cannot listen on") as caught:
            Health(grpc.server(ThreadPoolExecutor(1)), address)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
