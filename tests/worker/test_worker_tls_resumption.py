"""The worker's gRPC port lets no gateway in by a resumed TLS session: nobody looks at its certificate again."""

from __future__ import annotations

import dataclasses
import datetime
import shutil
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from taktline_worker.lifecycle import Health
from taktline_worker.server import ServeOptions, Worker
from taktline_worker.tls import TlsFiles, WholeHandshakes, interceptors

from tests.gateway.certificates import Authority
from tests.gateway.test_tls_resumption import Met, called, client

HOST = "localhost"
HEALTH = b"/grpc.health.v1.Health/Check"
INFO = b"/taktline.worker.v1.Worker/Info"


@dataclasses.dataclass
class Served:
    """A real worker behind certificates that may be replaced."""

    port: int
    factory: Authority
    files: TlsFiles

    def asked(self, context: ssl.SSLContext, session: ssl.SSLSession | None = None, path: bytes = HEALTH) -> Met | None:
        return called(self.port, context, session, path, HOST)

    def gateway(self, version: ssl.TLSVersion, pair: tuple[Path, Path]) -> ssl.SSLContext:
        context = client(self.factory, pair, version)
        context.set_alpn_protocols(["h2"])
        return context


@pytest.fixture
def served(folders: Any, config_of: Any, tmp_path: Path) -> Iterator[Served]:
    factory = Authority(tmp_path, "factory")
    cert, key = factory.issue("worker", HOST)
    trusted = tmp_path / "trusted.pem"
    shutil.copy(factory.ca, trusted)
    files = TlsFiles(cert, key, trusted)
    config = config_of(folders.lerobot(tmp_path / "policy", "pi05"), solver_steps=1, buckets=(1,))
    worker = Worker(config, ServeOptions("127.0.0.1:0", linger_s=0.0, tls=files))
    worker.start()
    yield Served(worker.port, factory, files)
    worker.drain()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_resumed_session_is_refused_and_a_whole_handshake_is_not(served: Served, version: ssl.TLSVersion) -> None:
    gateway = served.gateway(version, served.factory.issue("gateway"))
    first = served.asked(gateway)
    assert first is not None
    assert b"resumed" not in first.came
    for path in (HEALTH, INFO):
        again = served.asked(gateway, first.session, path)
        assert again is not None
        assert again.reused, "what is tested takes place"
        assert b"resumed TLS session" in again.came, path
    later = served.asked(gateway)
    assert later is not None
    assert b"resumed" not in later.came


def test_neither_an_expired_certificate_nor_a_removed_issuer_comes_back_by_a_session(
    served: Served, tmp_path: Path
) -> None:
    version = ssl.TLSVersion.TLSv1_2

    def met(life_s: float) -> tuple[ssl.SSLContext, ssl.SSLSession | None, datetime.datetime] | None:
        ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=life_s)
        brief = served.gateway(version, served.factory.issue("brief", ends=ends))
        found = served.asked(brief)
        return None if found is None else (brief, found.session, ends)

    lasting = served.gateway(version, served.factory.issue("lasting"))
    kept = served.asked(lasting)
    assert kept is not None
    # On a machine so busy that the certificate expires before it is shown, the next one lives longer.
    brief, session, ends = next(found for life_s in (2, 6, 18, 54) if (found := met(life_s)) is not None)
    while datetime.datetime.now(datetime.UTC) < ends + datetime.timedelta(seconds=1):  # its end is in whole seconds
        time.sleep(0.05)
    assert served.asked(brief) is None, "a whole handshake finds it expired"
    by_session = served.asked(brief, session)
    assert by_session is None or b"resumed TLS session" in by_session.came

    assert served.files.client_ca is not None
    shutil.copy(Authority(tmp_path, "stranger").ca, served.files.client_ca)
    assert served.asked(lasting) is None, "its issuer is trusted no more"
    by_session = served.asked(lasting, kept.session)
    assert by_session is None or b"resumed TLS session" in by_session.came


def test_the_gateways_own_channel_resumes_no_session(served: Served) -> None:
    """So that no gateway is turned away for having been there before."""
    cert, key = served.factory.issue("gateway-channel")
    credentials = grpc.ssl_channel_credentials(served.factory.ca.read_bytes(), key.read_bytes(), cert.read_bytes())
    for _ in range(3):
        with grpc.secure_channel(f"{HOST}:{served.port}", credentials) as channel:
            assert channel.unary_unary(HEALTH.decode())(b"", timeout=60, wait_for_ready=True)


def test_where_no_certificate_is_asked_for_sessions_may_be_resumed(tmp_path: Path) -> None:
    assert interceptors(None) == ()
    assert interceptors(TlsFiles(tmp_path, tmp_path)) == ()
    assert len(interceptors(TlsFiles(tmp_path, tmp_path, tmp_path))) == 1


def test_watching_a_workers_health_takes_no_thread_from_its_calls() -> None:
    """A gateway watches for as long as it is connected: two threads serve four that watch and one that asks."""
    server = grpc.server(ThreadPoolExecutor(2), interceptors=(WholeHandshakes(),))
    health_of = Health(server)
    health_of.set(serving=True)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    serving = health_pb2.HealthCheckResponse.SERVING
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(4)]
            assert [next(watch).status for watch in watches] == [serving] * 4
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=30).status == serving
    finally:
        server.stop(0)
