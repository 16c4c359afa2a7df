"""A resumed TLS session lets nobody in whom a whole handshake would not let in."""

from __future__ import annotations

import dataclasses
import datetime
import shutil
import socket
import ssl
import time
from pathlib import Path

import pytest

from tests.gateway.certificates import Authority
from tests.gateway.conftest import until
from tests.gateway.test_tls import Secured

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Of HTTP/2: its greeting, and settings that change nothing."""


@pytest.fixture
def factory(tmp_path):
    return Authority(tmp_path, "factory")


@pytest.fixture
def secured(tmp_path):
    made = Secured(tmp_path)
    yield made
    made.stop()


@dataclasses.dataclass
class Met:
    """One connection that was let in: what came, whether its handshake was a short one, the session to go on with."""

    came: bytes
    reused: bool
    session: ssl.SSLSession | None


def client(authority: Authority, pair: tuple[Path, Path], version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.load_cert_chain(*pair)
    context.minimum_version = context.maximum_version = version
    return context


def visit(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> Met | None:
    """One connection that asks for /healthz and leaves in order, as sessions are kept only then; None if refused."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
            tls = context.wrap_socket(plain, server_hostname="127.0.0.1", session=session)
            tls.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            came = b""
            while data := tls.recv(65536):
                came += data
            met = Met(came, bool(tls.session_reused), tls.session)
            tls.unwrap().close()
            return met if came else None
    except (ssl.SSLError, ConnectionError):
        return None


@pytest.mark.parametrize(
    ("version", "listener"),
    [(ssl.TLSVersion.TLSv1_2, "http"), (ssl.TLSVersion.TLSv1_2, "openpi"), (ssl.TLSVersion.TLSv1_3, "http")],
)
def test_a_robot_resumes_no_session_that_spares_its_certificate(secured, factory, tmp_path, version, listener):
    cert, key = factory.issue("gateway", "127.0.0.1")
    trusted = tmp_path / "trusted.pem"
    shutil.copy(factory.ca, trusted)
    secured.write_routes()
    secured.start("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(trusted))
    port = int(secured.url.rsplit(":", 1)[1]) if listener == "http" else secured.ports[listener]
    context = client(factory, factory.issue("robot"), version)
    first = visit(port, context, None)
    assert first is not None
    again = visit(port, context, first.session)
    assert again is None or not again.reused
    # A client that tries to resume is not locked out: both ends have forgotten the session.
    later = visit(port, context, first.session)
    assert later is not None
    assert not later.reused
    stranger = Authority(tmp_path, "stranger")
    shutil.copy(stranger.ca, trusted)
    until(lambda: "certificate_read" in secured.log.read_text(), "the other issuer being read")
    assert visit(port, context, later.session) is None
    assert visit(port, context, None) is None


def test_sessions_are_resumed_where_no_certificate_is_asked_for(secured, factory):
    cert, key = factory.issue("gateway", "127.0.0.1")
    secured.write_routes()
    secured.start("--tls-cert", str(cert), "--tls-key", str(key))
    context = ssl.create_default_context(cafile=str(factory.ca))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    port = int(secured.url.rsplit(":", 1)[1])
    first = visit(port, context, None)
    assert first is not None
    again = visit(port, context, first.session)
    assert again is not None
    assert again.reused


READY = b"/transport.AsyncInference/Ready"


def called(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None, path: bytes = READY, host: str = "127.0.0.1"
) -> Met | None:
    """An empty call as raw HTTP/2, as gRPC's own client cannot be given a session; None if the handshake fails."""
    names = {b":method": b"POST", b":scheme": b"https", b":path": path,
             b":authority": b"x", b"content-type": b"application/grpc", b"te": b"trailers"}  # fmt: skip
    # Literal fields that no table keeps, without Huffman's code.
    block = b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in names.items())
    call = len(block).to_bytes(3, "big") + b"\1\4\0\0\0\1" + block + b"\0\0\5\0\1\0\0\0\1" + b"\0\0\0\0\0"
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname=host, session=session) as tls,
        ):
            tls.sendall(PREFACE + call)
            came = b""
            while b"grpc-status" not in came:
                data = tls.recv(65536)
                if not data:
                    return None
                came += data
            return Met(came, bool(tls.session_reused), tls.session)
    except (ssl.SSLError, ConnectionError):
        return None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_resumed_session_of_grpc_does_not_outlive_the_certificate(secured, factory, version):
    cert, key = factory.issue("gateway", "127.0.0.1")
    secured.write_routes()
    secured.start("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(factory.ca))
    port = secured.ports["lerobot"]
    lasting = client(factory, factory.issue("robot"), version)
    lasting.set_alpn_protocols(["h2"])
    first = until(lambda: called(port, lasting, None), "the port answering")
    again = called(port, lasting, first.session)
    assert again is not None
    assert again.reused, "what is tested below takes place"
    assert b"expired" not in again.came

    def met(life_s: float):
        ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=life_s)
        brief = client(factory, factory.issue("brief", ends=ends), version)
        brief.set_alpn_protocols(["h2"])
        found = called(port, brief, None)
        return None if found is None else (brief, found.session, ends)

    # On a machine so busy that the certificate expires before it is shown, the next one lives longer.
    brief, session, ends = next(found for life_s in (2, 6, 18, 54) if (found := met(life_s)) is not None)
    while datetime.datetime.now(datetime.UTC) < ends + datetime.timedelta(seconds=1):  # its end is in whole seconds
        time.sleep(0.05)
    assert called(port, brief, None) is None, "a whole handshake finds it expired"
    resumed = called(port, brief, session)
    assert resumed is None or (resumed.reused and b"expired" in resumed.came)
