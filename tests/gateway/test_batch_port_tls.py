"""The batch port behind TLS: the same frames, the same endings, only those whom the certificates let in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
from pathlib import Path

import pytest
from taktline_gateway import batch_channel
from taktline_gateway.batch_channel import BatchChannel
from taktline_gateway.tls import TlsFiles as GatewayFiles
from taktline_gateway.tls import WorkerTls
from taktline_protocol import Image, worker_pb2
from taktline_protocol.batch_frames import VERSION, Open, frame
from taktline_worker import batch_port
from taktline_worker.batch_port import listen
from taktline_worker.tls import TlsFiles, server_context

from tests.gateway.certificates import Authority

NAME = "workers.taktline.internal"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory) -> tuple[Authority, Authority]:
    return tuple(Authority(tmp_path_factory.mktemp(name), name) for name in ("factory", "strangers"))


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A machine that is busy with other tests is no fault of the port."""
    monkeypatch.setattr(batch_channel, "CONNECT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(batch_port, "OPEN_TIMEOUT_S", 60.0)


def server_files(folder: Path, authority: Authority, trusted: Authority | None = None) -> TlsFiles:
    """Certificate and issuer as files of `folder`, which may be replaced."""
    cert, key = authority.issue("batch-worker", NAME)
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    shutil.copy(cert, files.cert)
    shutil.copy(key, files.key)
    shutil.copy((trusted or authority).ca, files.client_ca)
    return files


def gateway_tls(authority: Authority, own: Authority | None, name: str = NAME) -> WorkerTls:
    cert, key = own.issue("batch-gateway") if own is not None else (None, None)
    return WorkerTls(GatewayFiles(cert=cert, key=key, ca=authority.ca, name=name))


async def connect(port, tls: WorkerTls) -> BatchChannel:
    return await BatchChannel.connect("127.0.0.1", port.port, port.token, tls.context, tls.files.name)


def run(body) -> None:
    asyncio.run(asyncio.wait_for(body(), 120))


def test_a_batch_and_its_long_answer_come_whole_even_while_the_port_is_closed(authorities, tmp_path):
    factory, _ = authorities
    size = 8 << 20
    frame = bytes(range(256)) * (256 * 256 * 3 // 256)

    async def body():
        entered, leave = asyncio.Event(), asyncio.Event()

        async def infer(request, frames, context):
            assert [bytes(data) for _, _, data in frames[0].values()] == [frame, frame]
            entered.set()
            await leave.wait()
            return worker_pb2.InferResponse(results=[{"imagined": {"parts": [bytes(size)]}}])

        port = await listen("127.0.0.1", infer, context=server_context(server_files(tmp_path, factory)))
        channel = await connect(port, gateway_tls(factory, factory))
        images = {camera: Image("raw", frame, (256, 256, 3)) for camera in ("front", "wrist")}
        request = worker_pb2.InferRequest(policy="p")
        call = asyncio.ensure_future(channel.infer(request, [(worker_pb2.InferItem(), images)], 60.0, ()))
        await entered.wait()
        closing = asyncio.create_task(port.close(60.0))
        await asyncio.sleep(0)
        leave.set()
        assert len((await call).results[0].imagined.parts[0]) == size
        await closing
        assert not port._connections

    run(body)


@pytest.mark.parametrize("fault", ["plain", "no certificate", "of strangers", "worker of strangers", "another name"])
def test_nobody_enters_whom_the_certificates_do_not_let_in(authorities, tmp_path, fault):
    factory, stranger = authorities
    served = stranger if fault == "worker of strangers" else factory
    own = {"no certificate": None, "of strangers": stranger}.get(fault, factory)

    async def body():
        async def infer(request, frames, context):
            raise AssertionError("no batch may come in")

        files = server_files(tmp_path, served, trusted=factory)
        port = await listen("127.0.0.1", infer, context=server_context(files))
        tls = gateway_tls(factory, own, "another.name" if fault == "another name" else NAME)
        plain = BatchChannel.connect("127.0.0.1", port.port, port.token)
        with pytest.raises(OSError):  # noqa: PT011 (each of them says it in OpenSSL's words)
            await (plain if fault == "plain" else connect(port, tls))
        plain.close()
        assert not any(connection.opened for connection in port._connections)
        await port.close(0.0)

    run(body)


def test_certificate_and_trust_are_renewed_without_restart(authorities, tmp_path):
    factory, stranger = authorities

    async def body():
        async def infer(request, frames, context):
            return worker_pb2.InferResponse(revision="served")

        files = server_files(tmp_path, factory)
        port = await listen("127.0.0.1", infer, context=server_context(files))
        before = await connect(port, gateway_tls(factory, factory))
        files.key.write_text("no key at all")
        (await connect(port, gateway_tls(factory, factory))).close()  # the last good pair stays
        server_files(tmp_path, stranger)
        after = await connect(port, gateway_tls(stranger, stranger))
        with pytest.raises(ssl.SSLError):
            await connect(port, gateway_tls(factory, factory))
        with pytest.raises(OSError):  # noqa: PT011 (a gateway of the issuer that is trusted no more)
            await connect(port, gateway_tls(stranger, factory))
        for channel in (before, after):  # connections that are open go on
            answer = await channel.infer(worker_pb2.InferRequest(), [(worker_pb2.InferItem(), {})], 60.0, ())
            assert answer.revision == "served"
            channel.close()
        await port.close(0.0)

    run(body)


def test_a_handshake_that_is_never_finished_is_ended(authorities, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_port, "OPEN_TIMEOUT_S", 0.05)
    factory, _ = authorities

    async def body():
        async def infer(request, frames, context):
            raise AssertionError("no batch may come in")

        port = await listen("127.0.0.1", infer, context=server_context(server_files(tmp_path, factory)))
        with socket.create_connection(("127.0.0.1", port.port)) as silent:
            silent.setblocking(False)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""
        await port.close(0.0)

    run(body)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_session_outlasts_the_trust_in_its_issuer(authorities, tmp_path, version):
    """A session is resumed without a look at the certificate: whoever holds one must not come back by it."""
    factory, stranger = authorities

    async def body():
        async def infer(request, frames, context):
            raise AssertionError("no batch is sent")

        port = await listen("127.0.0.1", infer, context=server_context(server_files(tmp_path, factory)))
        context = gateway_tls(factory, factory).context
        context.maximum_version = version

        def enter(session: ssl.SSLSession | None = None) -> ssl.SSLSocket:
            connection = socket.create_connection(("127.0.0.1", port.port), timeout=60.0)
            try:
                connection = context.wrap_socket(connection, server_hostname=NAME, session=session)
                connection.sendall(b"".join(frame(Open(VERSION, port.token))))
                if not connection.recv(1):
                    raise ConnectionResetError("closed without an answer")
            except OSError:
                connection.close()
                raise
            return connection

        session, first = None, None
        with contextlib.suppress(ssl.SSLError):  # the older version may be refused altogether
            first = await asyncio.to_thread(enter)
            session = first.session
        assert first is not None or version is ssl.TLSVersion.TLSv1_2
        shutil.copy(stranger.ca, tmp_path / "ca.crt")
        os.utime(tmp_path / "ca.crt", (1, 1))  # another time than before, however fast this was
        with pytest.raises(OSError):  # noqa: PT011 (an alert, or the end of the connection)
            (await asyncio.to_thread(enter, session)).close()
        if first is not None:
            first.close()
        await port.close(0.0)

    run(body)
