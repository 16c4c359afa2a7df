"""A real gateway with an access file: every front wants a key, tenants do not meet, and no secret reaches a log."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import msgspec
import numpy as np
import pytest
import zmq
from taktline_gateway.access.access_file import AccessFile, Anonymous, Key, Rates, Tenant
from taktline_gateway.access.keys import new_key
from taktline_gateway.compat.wire_arrays import encode_openpi
from taktline_protocol.codecs import MediaType, encode
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.gateway.conftest import Stack, free_port, parse, until
from tests.gateway.stream_robot import StreamRobot

PROGRAM = str(Path(sys.executable).parent / "taktline-gateway")
OBSERVATION = {
    "front": np.zeros((8, 8, 3), np.uint8),
    "wrist": np.zeros((8, 8, 3), np.uint8),
    "state": np.zeros(6),
    "prompt": "go",
}


class Guarded(Stack):
    """A stack whose gateway has an access file and every client port."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.access = folder / "access.json"
        self.audit = folder / "audit.jsonl"
        made = {name: new_key(name) for name in ("arm-a", "arm-b", "watcher", "slow", "spare")}
        self.keys = {name: key for name, (key, _) in made.items()}
        self.file = AccessFile(
            tenants=(Tenant(name="a"), Tenant(name="b", policies=("other-*",)), Tenant(name="ops")),
            keys=(
                Key(id="arm-a", tenant="a", hash=made["arm-a"][1]),
                Key(id="arm-b", tenant="b", hash=made["arm-b"][1]),
                Key(id="spare", tenant="ops", hash=made["spare"][1]),
                Key(id="watcher", tenant="ops", hash=made["watcher"][1], rights=("observe",)),
                Key(id="slow", tenant="a", hash=made["slow"][1], rates=Rates(requests_per_s=0.1, burst=2)),
            ),
            anonymous=(Anonymous(protocol="vla-eval", tenant="a", networks=("127.0.0.0/8",)),),
        )
        self.ports = {name: free_port() for name in ("openpi", "vla-eval", "groot", "lerobot")}

    def write_access(self, file: AccessFile) -> None:
        temporary = self.access.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(file))
        temporary.replace(self.access)

    def start(self) -> None:
        self.write_access(self.file)
        self.write_routes(self.start_worker())
        listens = [part for name, port in self.ports.items() for part in (f"--{name}-listen", f"127.0.0.1:{port}")]
        self.start_gateway("--access-file", str(self.access), "--audit-log", str(self.audit), *listens)
        self.use("arm-a")
        self.wait_workers(1)

    def use(self, name: str | None) -> None:
        self.http.headers.pop("authorization", None)
        if name is not None:
            self.http.headers["authorization"] = f"Bearer {self.keys[name]}"

    def openpi(self, key: str | None, path: str = "/"):
        headers = {} if key is None else {"Authorization": f"Api-Key {key}"}
        url = f"ws://127.0.0.1:{self.ports['openpi']}{path}"
        return connect(url, additional_headers=headers, compression=None)

    def groot(self, message: dict) -> dict:
        context = zmq.Context()
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(f"tcp://127.0.0.1:{self.ports['groot']}")
        try:
            socket.send(msgspec.msgpack.encode(message))
            return msgspec.msgpack.decode(socket.recv())
        finally:
            socket.close()
            context.term()

    def audited(self) -> list[dict]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    made = Guarded(tmp_path_factory.mktemp("guarded"))
    made.start()
    yield made
    made.stop()
    assert_no_secret(made)


def assert_no_secret(stack: Guarded) -> None:
    """Looks for every key's secret, whole and in halves, in all that the gateway has written."""
    written = stack.log.read_text() + stack.audit.read_text()
    assert "access_decision" in written
    for key in stack.keys.values():
        secret = key.rsplit("_", 1)[-1] if key.count("_") == 2 else key[-43:]
        for part in (secret, secret[:20], secret[-20:], base64.b64encode(key.encode()).decode()[:24]):
            assert part not in written


# ----- HTTP


def test_without_a_key_only_the_probes_answer(guarded):
    guarded.use(None)
    for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
        assert guarded.http.get(guarded.url + path).status_code == 200
    for path in (
        "/v1/policies",
        "/v1/policies/scripted",
        "/metrics",
        "/openapi.json",
        "/",
        "/v2",
        "/v2/models/scripted",
    ):
        answer = guarded.http.get(guarded.url + path)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["code"] == "unauthenticated"
    status, error = guarded.act()
    assert (status, error.code) == (401, "unauthenticated")
    assert "api_key" in error.next_step


def test_a_key_opens_its_own_policies(guarded):
    guarded.use("arm-a")
    assert guarded.act()[0] == 200
    assert [info["policy"] for info in guarded.http.get(f"{guarded.url}/v1/policies").json()["policies"]] == [
        "scripted"
    ]
    assert "scripted" in guarded.http.get(f"{guarded.url}/openapi.json").text


def test_another_tenant_sees_nothing_of_it(guarded):
    guarded.use("arm-b")
    status, error = guarded.act()
    assert (status, error.code) == (403, "forbidden")
    there = guarded.http.get(f"{guarded.url}/v1/policies/scripted")
    absent = guarded.http.get(f"{guarded.url}/v1/policies/nowhere")
    assert there.status_code == absent.status_code == 403
    assert there.json()["message"].replace("scripted", "") == absent.json()["message"].replace("nowhere", "")
    assert guarded.http.get(f"{guarded.url}/v1/policies").json() == {"policies": []}
    assert "scripted" not in guarded.http.get(f"{guarded.url}/openapi.json").text
    unknown = guarded.http.get(f"{guarded.url}/v1/policies/other-1").json()
    assert unknown["code"] == "unknown_policy"
    assert "scripted" not in unknown["message"]


def test_the_right_to_observe_is_one_of_its_own(guarded):
    guarded.use("arm-a")
    assert guarded.http.get(f"{guarded.url}/metrics").status_code == 403
    guarded.use("watcher")
    assert "taktline_requests_total" in guarded.http.get(f"{guarded.url}/metrics").text
    assert guarded.act()[0] == 403
    in_browser = {"authorization": "Basic " + base64.b64encode(f"me:{guarded.keys['watcher']}".encode()).decode()}
    assert httpx.get(f"{guarded.url}/metrics", headers=in_browser).status_code == 200
    foreign = {**in_browser, "origin": "https://evil.example"}
    assert httpx.get(f"{guarded.url}/metrics", headers=foreign).status_code == 403
    page = httpx.get(f"{guarded.url}/", headers={"accept": "text/html,*/*"})
    assert page.headers["www-authenticate"].startswith("Basic")


def test_robots_of_two_tenants_may_share_a_name(guarded):
    with ThreadPoolExecutor() as pool:
        bodies = {}
        for key in ("arm-a", "spare"):
            sent = guarded.observation(robot="same", instruction="slow 300", session_id=f"session of {key}")
            headers = {"content-type": "application/msgpack", "authorization": f"Bearer {guarded.keys[key]}"}
            url = f"{guarded.url}/v1/policies/scripted/act"
            bodies[key] = pool.submit(
                httpx.post, url, content=encode(sent, MediaType.MSGPACK), headers=headers, timeout=30
            )
        assert [parse(answer.result())[0] for answer in bodies.values()] == [200, 200]


def test_a_rate_is_held_and_says_when(guarded):
    guarded.use("slow")
    codes = [guarded.act(robot="slow") for _ in range(4)]
    assert [status for status, _ in codes] == [200, 200, 429, 429]
    assert codes[2][1].code == "rate_limited"
    assert 0 < codes[2][1].retry_after_ms <= 10_000
    guarded.use("arm-a")
    assert guarded.act()[0] == 200


def test_a_rate_that_is_exceeded_is_audited_over_every_front_with_a_key(guarded):
    guarded.use("slow")
    until(lambda: guarded.act(robot="slow")[0] == 429, "the rate being used up")
    key = guarded.keys["slow"]
    kserve = {
        "inputs": [
            {"name": name, "datatype": "UINT8", "shape": [8, 8, 3], "data": [0] * 192} for name in ("front", "wrist")
        ]
        + [
            {"name": "state", "datatype": "FP32", "shape": [6], "data": [0.0] * 6},
            {"name": "instruction", "datatype": "BYTES", "shape": [1], "data": ["go"]},
        ]
    }

    def limited() -> set[str]:
        """One more request over each front, for as long as the rate lets one through."""
        with guarded.openpi(key) as client:
            client.recv()
            client.send(encode_openpi(OBSERVATION))
            client.recv()
        guarded.http.post(f"{guarded.url}/v2/models/scripted/infer", json=kserve)
        robot = StreamRobot(guarded.url, "slow-stream", headers={"authorization": f"Bearer {key}"})
        robot.observe()
        robot.answer()
        robot.close()
        return {line["protocol"] for line in guarded.audited() if line.get("outcome") == "rate_limited"}

    until(lambda: limited() >= {"rest", "openpi", "kserve", "stream"}, "the audit log having the rate's refusals")
    guarded.use("arm-a")


# ----- the clients' own protocols


def test_openpi_wants_its_api_key(guarded):
    for key in (None, "wrong", guarded.keys["arm-a"][:-1] + "-"):
        with pytest.raises(InvalidStatus) as caught:
            guarded.openpi(key).close()
        assert caught.value.response.status_code == 401
    with guarded.openpi(guarded.keys["arm-a"]) as client:
        client.recv()
        client.send(encode_openpi(OBSERVATION))
        assert isinstance(client.recv(), bytes)
    with pytest.raises(InvalidStatus) as caught:
        guarded.openpi(guarded.keys["arm-b"], "/v1/policies/scripted/openpi").close()
    assert caught.value.response.status_code == 403


def test_openpi_shows_another_tenant_no_names(guarded):
    with pytest.raises(InvalidStatus) as caught:
        guarded.openpi(guarded.keys["arm-b"], "/v1/policies/other-9/openpi").close()
    assert caught.value.response.status_code == 404
    assert b"scripted" not in caught.value.response.body


def test_a_revoked_key_ends_an_open_connection_at_its_next_observation(guarded):
    with guarded.openpi(guarded.keys["spare"]) as client:
        client.recv()
        client.send(encode_openpi(OBSERVATION))
        assert isinstance(client.recv(), bytes)
        keys = tuple(key for key in guarded.file.keys if key.id != "spare")
        guarded.write_access(msgspec.structs.replace(guarded.file, keys=keys))
        until(lambda: "access_applied" in guarded.audit.read_text(), "the file being read again")
        client.send(encode_openpi(OBSERVATION))
        answer = client.recv()
        assert answer.startswith("unauthenticated")
    guarded.write_access(guarded.file)
    guarded.use("spare")
    until(lambda: guarded.act()[0] == 200, "the key being back")


def test_groot_wants_its_token(guarded):
    for token in (None, "wrong", 7):
        message = {"endpoint": "ping"} | ({} if token is None else {"api_token": token})
        said = guarded.groot(message)["error"]
        assert said.startswith("Unauthorized")
        assert "api_token=KEY" in said, "what a GR00T client can do, and not a header that it cannot send"
    assert guarded.groot({"endpoint": "ping", "api_token": guarded.keys["arm-a"]})["status"] == "ok"
    assert "error" in guarded.groot({"endpoint": "get_modality_config", "api_token": "x"})


def test_lerobot_has_no_key_and_is_refused_unless_the_file_says_otherwise(guarded):
    with grpc.insecure_channel(f"127.0.0.1:{guarded.ports['lerobot']}") as channel:
        ask = channel.unary_unary("/transport.AsyncInference/GetActions")
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"", timeout=20)
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)
        if caught.value.code() is grpc.StatusCode.UNAUTHENTICATED:
            assert "can send no key" in caught.value.details()


def test_a_protocol_named_in_the_file_goes_without_a_key(guarded):
    with connect(f"ws://127.0.0.1:{guarded.ports['vla-eval']}/", compression=None) as client:
        client.send(msgspec.msgpack.encode({"type": "hello", "payload": {}, "seq": 1, "timestamp": 0.0}))
        assert msgspec.msgpack.decode(client.recv())["payload"]["model_server"] == "taktline/scripted"


def test_kserve_goes_through_the_same_gate(guarded):
    body = {
        "inputs": [
            {"name": name, "datatype": "UINT8", "shape": [8, 8, 3], "data": [0] * 192} for name in ("front", "wrist")
        ]
        + [
            {"name": "state", "datatype": "FP32", "shape": [6], "data": [0.0] * 6},
            {"name": "instruction", "datatype": "BYTES", "shape": [1], "data": ["go"]},
        ]
    }
    codes = {}
    for name in (None, "arm-b", "arm-a"):
        guarded.use(name)
        codes[name] = guarded.http.post(f"{guarded.url}/v2/models/scripted/infer", json=body).status_code
    assert codes == {None: 401, "arm-b": 403, "arm-a": 200}


# ----- what is written


def test_the_audit_log_says_who_asked_what(guarded):
    guarded.use("arm-b")
    guarded.act(robot="arm-77")
    lines = guarded.audited()
    refused = [line for line in lines if line.get("outcome") == "forbidden"]
    assert {"tenant": "b", "caller": "arm-b", "right": "act", "policy": "scripted", "address": "127.0.0.1"}.items() <= (
        refused[0].items()
    )
    assert any(line.get("outcome") == "unauthenticated" and "caller" not in line for line in lines)
    assert {line.get("protocol") for line in lines} >= {"rest", "openpi", "groot", "kserve", "vla-eval"}


# ----- the command line


def run(tmp_path, *flags):
    routes = tmp_path / "routes.json"
    routes.write_text('{"routes": []}')
    command = [PROGRAM, "serve", "--routes", str(routes), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("option", ["--listen", "--openpi-listen", "--groot-listen", "--lerobot-listen"])
def test_an_address_that_cannot_be_listened_on_is_said_in_one_line(tmp_path, option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--listen", "127.0.0.1:0"] if option != "--listen" else []
        done = run(tmp_path, *flags, option, address)
    assert done.returncode == 2
    assert f"on {address}: Address already in use" in done.stderr
    assert option in done.stderr
    assert "Traceback" not in done.stderr


def test_a_network_address_without_an_access_file_is_refused_by_default(tmp_path):
    for flags in (["--listen", "0.0.0.0:1"], ["--listen", "127.0.0.1:1", "--openpi-listen", "[::]:1"]):
        done = run(tmp_path, *flags)
        assert done.returncode == 2
        assert "--allow-anonymous" in done.stderr
    done = run(tmp_path, "--listen", "127.0.0.1:1", "--access-file", str(tmp_path / "absent"))
    assert done.returncode == 2
    assert "config_invalid: the access file" in done.stderr


def test_new_key_prints_the_key_once_and_keeps_only_its_hash(tmp_path):
    path = tmp_path / "access.json"
    command = [PROGRAM, "new-key", "--id", "cell-1", "--tenant", "a", "--access-file", str(path)]
    done = subprocess.run([*command, "--policy", "pick-*", "--expires-days", "30"], capture_output=True, text=True)
    key = done.stdout.strip()
    assert key.startswith("tkl_cell-1_")
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text())["keys"][0]["policies"] == ["pick-*"]
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2
    assert "already has a key" in again.stderr
