"""TLS and mTLS on every listener and towards workers, with certificates that are renewed while everything runs."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import msgspec
import numpy as np
import pytest
from taktline import Access, Robot
from taktline_gateway.tls import ServerTls, TlsFiles
from taktline_protocol import TaktlineError
from websockets.asyncio.client import connect

from tests.gateway.certificates import Authority
from tests.gateway.conftest import Stack, free_port, until

PROGRAM = str(Path(sys.executable).parent / "taktline-gateway")
FRAME = np.zeros((8, 8, 3), np.uint8)
SEEN = ({"front": FRAME, "wrist": FRAME}, [0.0] * 6, "go", 5_000.0)


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    return Authority(folder, "factory"), Authority(folder, "stranger")


def trusting(authority: Authority, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    if pair is not None:
        context.load_cert_chain(*pair)
    return context


def answers(port: int, context: ssl.SSLContext) -> bool:
    """Whether anything comes back; with TLS 1.3 a client hears of a refusal when it first reads."""
    try:
        with socket.create_connection(("127.0.0.1", port)) as plain:
            tls = context.wrap_socket(plain, server_hostname="127.0.0.1")
            tls.sendall(b"GET / HTTP/1.1\r\n\r\n")
            return bool(tls.recv(1))
    except (ssl.SSLError, ConnectionError):
        return False


async def first_message(url: str, context: ssl.SSLContext, hello: bytes | None = None) -> bytes | str:
    """What a WebSocket says first, or to `hello`; the library's blocking client now and then hangs with TLS."""
    async with connect(url, ssl=context, compression=None) as client:
        if hello is not None:
            await client.send(hello)
        return await client.recv()


class Secured(Stack):
    """A stack whose gateway speaks TLS, with every client port that can."""

    def start(self, *flags: str) -> None:
        self.ports = {name: free_port() for name in ("openpi", "vla-eval", "lerobot")}
        port = free_port()
        self.url = f"https://127.0.0.1:{port}"
        listens = [part for name, at in self.ports.items() for part in (f"--{name}-listen", f"127.0.0.1:{at}")]
        command = [PROGRAM, "serve", "--routes", str(self.routes), "--listen", f"127.0.0.1:{port}"]
        self.gateway = subprocess.Popen([*command, *listens, *flags], stderr=self.log.open("w"))

        def listening():
            assert self.gateway.poll() is None, self.log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listening, "the gateway listening")

    def ask(self, context: ssl.SSLContext | bool) -> httpx.Response:
        with httpx.Client(verify=context) as client:
            return client.get(f"{self.url}/healthz")

    def lets_in(self, context: ssl.SSLContext | bool) -> bool:
        try:
            return self.ask(context).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def secured(tmp_path):
    made = Secured(tmp_path)
    yield made
    made.stop()


def test_every_listener_speaks_tls(secured, authorities):
    factory, stranger = authorities
    cert, key = factory.issue("gateway", "127.0.0.1", "localhost")
    secured.write_routes(secured.start_worker())
    secured.start("--tls-cert", str(cert), "--tls-key", str(key))
    assert secured.lets_in(trusting(factory))
    assert not secured.lets_in(trusting(stranger))
    with pytest.raises(httpx.TransportError):
        httpx.get(secured.url.replace("https", "http") + "/healthz")
    access = Access(ca_file=str(factory.ca))
    with Robot(secured.url, "scripted", "arm", access=access) as robot:
        until(lambda: robot.info().ready, "the worker being up")
        assert robot.act(*SEEN).actions.shape == (10, 6)
    context = trusting(factory)
    metadata = asyncio.run(first_message(f"wss://127.0.0.1:{secured.ports['openpi']}/", context))
    assert msgspec.msgpack.decode(metadata)["policy"] == "scripted"
    hello = msgspec.msgpack.encode({"type": "hello", "payload": {}, "seq": 1, "timestamp": 0.0})
    assert asyncio.run(first_message(f"wss://127.0.0.1:{secured.ports['vla-eval']}/", context, hello))
    trust = grpc.ssl_channel_credentials(factory.ca.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{secured.ports['lerobot']}", trust) as channel:
        channel.unary_unary("/transport.AsyncInference/Ready")(b"", timeout=20)


def test_clients_need_a_certificate_where_their_issuer_is_named(secured, authorities):
    factory, stranger = authorities
    cert, key = factory.issue("gateway", "127.0.0.1")
    secured.write_routes()
    secured.start("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(factory.ca))
    assert not secured.lets_in(trusting(factory))
    assert not secured.lets_in(trusting(factory, stranger.issue("robot-of-others")))
    assert secured.lets_in(trusting(factory, factory.issue("robot")))
    for port in secured.ports.values():
        assert not answers(port, trusting(factory))


def test_certificates_are_renewed_without_restart(secured, authorities, tmp_path):
    factory, stranger = authorities
    cert, key = factory.issue("renewed", "127.0.0.1")
    files = [tmp_path / name for name in ("served.crt", "served.key", "trusted.pem")]

    def serve_with(*sources: Path) -> None:
        for source, target in zip(sources, files, strict=True):
            shutil.copy(source, target.with_suffix(".new"))
            target.with_suffix(".new").replace(target)

    serve_with(cert, key, factory.ca)
    secured.write_routes()
    secured.start("--tls-cert", str(files[0]), "--tls-key", str(files[1]), "--tls-client-ca", str(files[2]))
    robot, other = factory.issue("robot"), stranger.issue("robot-2")
    assert secured.lets_in(trusting(factory, robot))
    files[1].write_text("no key at all")
    until(lambda: "certificate_refused" in secured.log.read_text(), "the broken key being seen")
    assert secured.lets_in(trusting(factory, robot)), "the last good certificate stays"
    serve_with(*stranger.issue("renewed-by-another", "127.0.0.1"), stranger.ca)
    until(lambda: secured.lets_in(trusting(stranger, other)), "the new certificate being served")
    assert not secured.lets_in(trusting(factory, robot)), "the old issuer is not served and not trusted any more"
    assert not secured.lets_in(trusting(stranger, robot)), "nor are its robots"


def start_tls_worker(stack: Stack, authority: Authority, name: str, **options) -> str:
    cert, key = authority.issue(name, "workers.taktline.internal")
    return stack.start_worker(tls_cert=cert, tls_key=key, tls_client_ca=authority.ca, **options)


def worker_flags(authority: Authority, cert: Path, key: Path) -> list[str]:
    return [
        "--worker-tls-ca", str(authority.ca), "--worker-tls-cert", str(cert), "--worker-tls-key", str(key),
        "--worker-tls-name", "workers.taktline.internal",
    ]  # fmt: skip


def test_gateway_and_worker_show_each_other_certificates(bare_stack, authorities):
    factory, _ = authorities
    stack = bare_stack
    stack.write_routes(start_tls_worker(stack, factory, "worker"))
    stack.start_gateway(*worker_flags(factory, *factory.issue("gateway-client")))
    stack.wait_workers(1)
    stack.wait_batch_ports(1)
    assert stack.act()[0] == 200
    assert stack.batches()[0]["way"] == "batch"


@pytest.mark.parametrize("fault", ["plain gateway", "gateway of strangers", "worker of strangers", "plain worker"])
def test_no_batch_passes_between_those_who_do_not_trust_each_other(bare_stack, authorities, fault):
    factory, stranger = authorities
    stack = bare_stack
    worker = (
        stack.start_worker()
        if fault == "plain worker"
        else start_tls_worker(stack, stranger if fault == "worker of strangers" else factory, "worker")
    )
    stack.write_routes(worker)
    flags = worker_flags(factory, *factory.issue("gateway-client"))
    if fault == "gateway of strangers":
        flags = worker_flags(factory, *stranger.issue("gateway-client"))
    stack.start_gateway(*([] if fault == "plain gateway" else flags))
    host, port = worker.split(":")
    until(lambda: socket.socket().connect_ex((host, int(port))) == 0, "the worker listening")
    status, error = stack.act(budget_ms=1_500.0)
    assert (status, error.code) == (503, "worker_unavailable")
    assert not stack.batches()


def test_channels_to_workers_take_up_renewed_certificates(bare_stack, authorities, tmp_path):
    factory, stranger = authorities
    stack = bare_stack
    cert, key = factory.issue("gateway-client")
    served, trusted = tmp_path / "client.crt", tmp_path / "ca.pem"
    shutil.copy(cert, served)
    shutil.copy(key, tmp_path / "client.key")
    shutil.copy(factory.ca, trusted)
    stack.write_routes(start_tls_worker(stack, factory, "worker"))
    stack.start_gateway(
        "--worker-tls-ca", str(trusted), "--worker-tls-cert", str(served), "--worker-tls-key",
        str(tmp_path / "client.key"), "--worker-tls-name", "workers.taktline.internal",
    )  # fmt: skip
    stack.wait_workers(1)
    # The whole fleet moves to another authority: new worker, new certificates for the gateway.
    moved = start_tls_worker(stack, stranger, "moved")
    new_cert, new_key = stranger.issue("gateway-client-2")
    shutil.copy(new_key, tmp_path / "client.key")
    shutil.copy(stranger.ca, trusted)
    shutil.copy(new_cert, served)
    stack.write_routes(moved)
    until(lambda: stack.act()[0] == 200, "the new worker being reached with the new certificate")
    stack.wait_batch_ports(1)
    assert stack.act()[0] == 200
    assert stack.batches()[-1]["way"] == "batch"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tls-cert", "CERT"], "go together"),
        (["--tls-client-ca", "CA"], "go together"),
        (["--worker-tls-cert", "CERT", "--worker-tls-key", "KEY"], "go together"),
        (["--tls-cert", "CERT", "--tls-key", "CA"], "cannot be used"),
        (["--tls-cert", "/absent", "--tls-key", "KEY"], "cannot be used"),
        (["--worker-tls-ca", "KEY"], "cannot be used"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(authorities, tmp_path, flags, says):
    factory, _ = authorities
    cert, key = factory.issue("gateway", "127.0.0.1")
    names = {"CERT": str(cert), "KEY": str(key), "CA": str(factory.ca)}
    (tmp_path / "routes.json").write_text('{"routes": []}')
    command = [PROGRAM, "serve", "--routes", str(tmp_path / "routes.json"), "--listen", "127.0.0.1:0"]
    done = subprocess.run([*command, *(names.get(flag, flag) for flag in flags)], capture_output=True, text=True)
    assert done.returncode == 2
    assert says in done.stderr
    assert "PRIVATE KEY" not in done.stderr


def test_old_protocol_versions_are_not_spoken(authorities):
    factory, _ = authorities
    cert, key = factory.issue("gateway", "127.0.0.1")
    context = ServerTls(TlsFiles(cert=cert, key=key)).context
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    with pytest.raises(TaktlineError):
        ServerTls(TlsFiles(cert=key, key=cert))
