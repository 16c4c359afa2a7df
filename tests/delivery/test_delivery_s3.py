"""Objects of a real S3-compatible server (SeaweedFS), which checks every signature."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from taktline_protocol.delivery import RECORD_FILE, DeliveryConfig, S3Source
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_worker.delivery.fetch import fetch

from tests.delivery.conftest import HASTE, content
from tests.ports import free_port

ACCESS, SECRET = "AKIATAKTLINE", "a-secret-of-the-test"
FILES = {"config.json": b"{}", "a b+ü/(1).json": b"[]", "model.safetensors": content(3_000_000)}
SUMS = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in FILES.items()).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """Endpoint of a server with the bucket `robots`, which holds the files below `reach/v1`."""
    folder: Path = tmp_path_factory.mktemp("weed")
    identity = {"name": "t", "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    grpc = {name: free_port() for name in ports}
    command = [str(Path(sys.executable).with_name("weed")), f"-logdir={folder}", "server", f"-dir={folder / 'data'}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.config={folder / 's3.json'}"]
    command += ["-volume.max=8", "-master.volumeSizeLimitMB=64", "-s3.port.iceberg=0", "-s3.iam=false"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-{name}.port.grpc={port}" for name, port in grpc.items()]
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 120
        stored: set[str] = set()
        files = {f"reach/v1/{name}": data for name, data in FILES.items()} | {"reach/v1/SHA256SUMS": SUMS}
        while stored != set(files):
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < end, (folder / "log").read_text()[-2000:]
            # Through the server's own back door, which asks for no signature.
            for name, data in files.items():
                with suppress(httpx.TransportError):
                    url = f"http://127.0.0.1:{ports['filer']}/buckets/robots/{quote(name)}"
                    if name not in stored and httpx.put(url, content=data, timeout=20).is_success:
                        stored.add(name)
            time.sleep(0.2)
        while True:
            assert time.monotonic() < end
            with suppress(httpx.TransportError):
                httpx.get(endpoint, timeout=20)
                break
            time.sleep(0.2)
        yield endpoint
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def credentials(monkeypatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def config(endpoint: str, **more) -> DeliveryConfig:
    pin = hashlib.sha256(SUMS).hexdigest()
    source = S3Source(bucket="robots", prefix="reach/v1", endpoint=endpoint, sha256=pin)
    return DeliveryConfig(source=source, **more)


def read(cache, record) -> dict[str, bytes]:
    folder = cache.model(record.key)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != RECORD_FILE]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_signed_requests_bring_every_object_whatever_its_name(server, cache):
    assert read(cache, fetch(config(server), cache, patience=HASTE, spare_bytes=0)) == FILES


def test_a_wrong_key_and_none_at_all_are_said_to_be_refused(server, cache, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(TaktlineError) as caught:
        fetch(config(server), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_DENIED
    assert "Secret" in caught.value.next_step
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(TaktlineError) as caught:
        fetch(config(server), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_DENIED


def test_an_absent_prefix_is_said_to_be_absent(server, cache):
    source = S3Source(bucket="robots", prefix="reach/v2", endpoint=server)
    with pytest.raises(TaktlineError) as caught:
        fetch(DeliveryConfig(source=source), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_ABSENT


@pytest.fixture
def cutting(server) -> Iterator[tuple[str, list[int]]]:
    """A way to the server that breaks the first connection over which a megabyte has come; and all bytes sent."""
    target = int(server.rpartition(":")[2])
    listener = socket.create_server(("127.0.0.1", 0))
    sent: list[int] = []
    cut = threading.Event()

    def forward(source: socket.socket, sink: socket.socket, count: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
                passed += len(data)
                if count:
                    sent.append(len(data))
                    if passed > 1_000_000 and not cut.is_set():
                        cut.set()
                        break
        for side in (source, sink):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", target))
                for way in ((near, far, False), (far, near, True)):
                    threading.Thread(target=forward, args=way, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent
    listener.close()


def test_an_object_that_is_cut_goes_on_by_range(cutting, cache):
    endpoint, sent = cutting
    record = fetch(config(endpoint), cache, patience=HASTE, spare_bytes=0)
    assert read(cache, record) == FILES
    assert sum(sent) < 3_500_000, "what had come was not sent again"
