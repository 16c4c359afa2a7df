"""Isaac GR00T's ZeroMQ protocol, spoken by a client written from its documentation (the real one is on no index)."""

from __future__ import annotations

import contextlib
import io
from collections import Counter, OrderedDict
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from taktline_gateway.access.keys import new_key
from taktline_gateway.compat.groot import GrootListener
from taktline_gateway.compat.groot_arrays import Generation, decode_groot, encode_groot, npy_array
from taktline_gateway.compat.groot_observations import joined_keys, joined_mapping, mapping_of, rows_of
from taktline_gateway.compat.groot_options import check_no_options, rtc_of
from taktline_protocol import Array, ErrorCode, TaktlineError
from taktline_protocol.deployment import ClientMapping
from taktline_protocol.limits import Limits

from .conftest import client_environment, free_port, until

GENERATIONS = ("npy", "msgpack-numpy")
MAPPING = {"state": ["state/arm", "state/hand"], "actions": {"arm": 6, "hand": 2}}


@pytest.fixture(scope="session")
def documented_client():
    return client_environment("groot", "pyzmq==27.3.0", "msgpack==1.2.4", "msgpack-numpy==0.4.8", "numpy")


@pytest.fixture(scope="module")
def served(shared_fleet):
    shared_fleet.port = free_port()
    shared_fleet.route(
        "pick",
        shared_fleet.worker("pick", cameras="ego_view,wrist", rtc="guided"),
        control_budget_ms=20_000,
        clients={"groot": MAPPING},
    )
    shared_fleet.start("--groot-listen", f"pick=127.0.0.1:{shared_fleet.port}")
    shared_fleet.wait_ready("pick")
    return shared_fleet


@pytest.mark.parametrize("generation", GENERATIONS)
def test_all_endpoints(served, documented_client, generation):
    got = documented_client.run("groot_protocol.py", "talk", str(served.port), generation)
    assert got["ping"] == {"status": "ok", "message": "Server is running"}
    assert got["reset"] == {}
    assert got["config"] == {
        "video": ["ModalityConfig", {"delta_indices": [0], "modality_keys": ["ego_view", "wrist"]}],
        "state": ["ModalityConfig", {"delta_indices": [0], "modality_keys": ["arm", "hand"]}],
        "action": ["ModalityConfig", {"delta_indices": [*range(10)], "modality_keys": ["arm", "hand"]}],
        "language": ["ModalityConfig", {"delta_indices": [0], "modality_keys": ["task"]}],
    }
    answers = got["answers"]
    for name, prefix in (("nested", ""), ("flat", "action.")):
        action = answers[name]["action"]
        assert list(action) == [f"{prefix}arm", f"{prefix}hand"]
        assert action[f"{prefix}arm"] == {"shape": [1, 10, 6], "dtype": "float32", "first": [[*range(6)]]}
        assert action[f"{prefix}hand"] == {"shape": [1, 10, 2], "dtype": "float32", "first": [[9, 9]]}
    batch = answers["batch"]["action"]["arm"]
    assert batch["shape"] == [3, 10, 6]
    assert batch["first"] == [[*range(6)], [*range(6, 12)], [*range(12, 18)]]
    assert len(set(answers["batch"]["info"]["request_id"])) == 3


def test_options_are_obeyed_or_refused(fleet, documented_client):
    """They were ignored: a robot that asked for real-time chunking got chunks that began anew, and was not told."""
    port = free_port()
    address = fleet.worker("pick", cameras="ego_view,wrist", action_dim=8, rtc="guided")
    fleet.route("pick", address, clients={"groot": MAPPING}, control_budget_ms=20_000)
    fleet.start("--groot-listen", f"127.0.0.1:{port}")
    fleet.wait_ready("pick")
    said = documented_client.run("groot_protocol.py", "options", str(port), "npy")
    applied = {"mode": "guided", "delay": 2, "prefix_end": 6, "schedule": "exp", "path": "batched"}
    assert said["first"][0] == [None, None], "there is no last chunk to continue, and it says so"
    rows, tails = said["next"]
    assert rows == [applied, applied]
    assert tails == [4.0, 4.0], "the tail is the last 6 of 10 actions"
    assert not said["plain"]
    assert said["after a reset"] == [None, None]
    codes = ["invalid_body", "invalid_body", "rtc_invalid", "invalid_body", "invalid_body"]
    for code, text in zip(codes, said["refused"], strict=True):
        assert text.startswith(f"Server error: {code}: "), text
    assert "checkpoint" in said["refused"][0]


CHUNK = Array.from_numpy(np.arange(20, dtype=np.float32).reshape(10, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"rtc_frozen_steps": 2},
        {"rtc_overlap_steps": 11},
        {"rtc_overlap_steps": -1},
        {"rtc_overlap_steps": 4.0},
        {"rtc_overlap_steps": True},
        {"rtc_overlap_steps": 4, "rtc_frozen_steps": 5},
        {"rtc_overlap_steps": 4, "action_horizon": 16},
        {1: 2},
        "text",
    ],
)
def test_options_that_cannot_be_obeyed(options):
    with pytest.raises(TaktlineError):
        rtc_of(options, CHUNK)


@pytest.mark.parametrize("options", [np.zeros(2), np.zeros(0), []])
def test_options_that_are_no_map(options):
    """An array says of itself neither that it is empty nor that it is not."""
    for refuse in (lambda: rtc_of(options, CHUNK), lambda: check_no_options(options)):
        with pytest.raises(TaktlineError) as caught:
            refuse()
        assert caught.value.code is ErrorCode.INVALID_BODY
    check_no_options(None)
    check_no_options({})


def test_options_that_ask_for_nothing():
    assert rtc_of(None, CHUNK) is rtc_of({}, CHUNK) is rtc_of({"rtc_overlap_steps": 0}, CHUNK) is None
    assert rtc_of({"rtc_overlap_steps": 4}, None) is None
    found = rtc_of({"rtc_overlap_steps": 4, "rtc_frozen_steps": None}, CHUNK)
    assert (found.delay, found.prefix_end) == (None, 4)
    assert found.tail.to_numpy().tolist() == CHUNK.to_numpy()[6:].tolist()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_errors_and_no_kill(served, documented_client, generation):
    got = documented_client.run("groot_protocol.py", "errors", str(served.port), generation)
    said = got["said"]
    assert said[:2] == ["Server error: Unknown endpoint: kill", "Server error: Unknown endpoint: shutdown"]
    codes = ["image_corrupt", "invalid_body", "camera_missing", "invalid_body", "worker_failed", *["invalid_body"] * 2]
    for code, text in zip(codes, said[2:9], strict=True):
        assert text.startswith(f"Server error: {code}: "), text
    assert all(text.startswith("invalid_body: ") for text in said[9:])
    assert not any("Traceback" in text for text in said)
    assert got["after"]["arm"]["first"] == [[*range(6)]]
    assert served.gateway.poll() is None


@pytest.mark.parametrize("hashed", [False, True])
def test_token(fleet, documented_client, tmp_path, hashed):
    port = free_port()
    token = tmp_path / "token"
    secret, kept = new_key("groot") if hashed else ("s3cret-token", "s3cret-token")
    token.write_text(f"{kept}\n")
    fleet.route("pick")
    fleet.start("--groot-listen", f"127.0.0.1:{port}", "--groot-token-file", str(token))
    said = documented_client.run("groot_protocol.py", "tokens", str(port), "npy", secret)
    unauthorized = "Server error: Unauthorized: Invalid API token"
    assert said == [unauthorized, unauthorized, {"status": "ok", "message": "Server is running"}]
    assert secret not in fleet.log.read_text()
    assert hashed == (secret not in token.read_text())


def test_a_slow_request_of_one_robot_does_not_stop_another(served, documented_client):
    """Fault of EGalahad/vla-scratch#4: with a REP socket one client blocks all."""
    got = documented_client.run("groot_protocol.py", "beside", str(served.port), "npy")
    assert got["quick_s"] < got["slow_s"]
    assert got["quick"]["arm"]["shape"] == [1, 10, 6]


def test_an_abandoned_answer_is_not_taken_for_the_next(fleet, documented_client):
    port = free_port()
    address = fleet.worker("pick", cameras="ego_view,wrist", action_dim=12)
    fleet.route("pick", address, clients={"groot": {"state": ["state/arm", "state/hand"]}}, control_budget_ms=20_000)
    fleet.start("--groot-listen", f"127.0.0.1:{port}")
    fleet.wait_ready("pick")
    got = documented_client.run("groot_protocol.py", "gives_up", str(port), "npy")
    assert got["actions"]["first"][0][10] == len("a different instruction")


def test_what_a_client_that_left_had_queued_leaves_the_queue(fleet):
    port = free_port()
    address = fleet.worker("pick", cameras="ego_view,wrist", says_ms=1500)
    fleet.route("pick", address, clients={"groot": MAPPING}, control_budget_ms=20_000, max_batch=1)
    fleet.start("--groot-listen", f"127.0.0.1:{port}")
    fleet.wait_ready("pick")

    def metric(name: str, label: str = 'policy="pick"') -> float:
        lines = httpx.get(f"{fleet.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{") and label in line)

    frames = {name: np.zeros((1, 1, 8, 8, 3), np.uint8) for name in ("ego_view", "wrist")}
    state = {"arm": np.zeros((1, 1, 6), np.float32), "hand": np.zeros((1, 1, 2), np.float32)}

    def request(text: str) -> bytes:
        observation = {"video": frames, "state": state, "language": {"task": [[text]]}}
        return encode_groot({"endpoint": "get_action", "data": {"observation": observation}}, Generation.NPY)

    with zmq.Context() as context, context.socket(zmq.REQ) as busy:
        busy.connect(f"tcp://127.0.0.1:{port}")
        busy.send(request("slow 1500"))
        until(lambda: metric("taktline_workers_by_state", 'state="busy"') == 1, "the batch")
        with context.socket(zmq.REQ) as leaves:
            leaves.connect(f"tcp://127.0.0.1:{port}")
            leaves.send(request("go"))
            until(lambda: metric("taktline_queue_depth") == 1, "the second one in the queue")
            leaves.close(linger=0)
        until(lambda: metric("taktline_queue_depth") == 0, "the queue without it")
        assert decode_groot(busy.recv(), Limits())[0][0]["arm"].shape == (1, 10, 6)
    assert metric("taktline_requests_total", 'code="client_gone"') == 1


def test_the_end_of_a_connection_is_not_taken_for_the_end_of_the_next_one_with_its_number():
    """A robot that connected as another one left never got its answer, and the other one stayed."""
    listener = object.__new__(GrootListener)
    listener._clients, listener._identities, listener._overdue = OrderedDict(), {}, Counter()
    cancelled = []
    for name in (b"old", b"new"):
        answering = SimpleNamespace(cancel=lambda name=name: cancelled.append(name))
        listener._clients[name] = SimpleNamespace(answering=answering)
        listener._came_by(7, name)  # the second one before word of the first one's end
    assert (list(listener._clients), cancelled) == ([b"new"], [b"old"])
    listener._left(7)
    assert (list(listener._clients), cancelled) == ([b"new"], [b"old"]), "that was the first one's end"
    listener._came_by(7, b"new")
    listener._left(7)
    assert (list(listener._clients), cancelled) == ([], [b"old", b"new"])
    assert not listener._identities


def test_cold_start_holds_the_request(fleet, documented_client):
    port, address = free_port(), f"127.0.0.1:{free_port()}"
    fleet.route("pick", address, clients={"groot": MAPPING}, control_budget_ms=20_000)
    fleet.start("--groot-listen", f"127.0.0.1:{port}")
    client = documented_client.start("groot_protocol.py", "talk", str(port), "npy")
    until(lambda: "client_connected" in fleet.log.read_text(), "the client connecting")
    fleet.worker("pick", address, cameras="ego_view,wrist")
    assert documented_client.result(client)["ping"]["status"] == "ok"


# ----- the codec


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def test_msgpack_numpy_layout_is_byte_exact():
    golden = "85c4026e64c3c40474797065a33c6634c4046b696e64c400c40573686170659101c40464617461c4040000003f"
    assert encode_groot(np.array([0.5], np.float32), Generation.MSGPACK_NUMPY).hex() == golden
    array, generation = decode_groot(bytes.fromhex(golden), Limits())
    assert (array.tolist(), array.dtype, generation) == ([0.5], np.float32, Generation.MSGPACK_NUMPY)


ARRAYS = hnp.arrays(
    dtype=st.sampled_from(["|u1", "<i8", "<f2", "<f4", ">f8", "|b1"]),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


@given(ARRAYS, st.sampled_from(list(Generation)), st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_round_trip(array, generation, fortran):
    sent = np.array(array, order="F") if fortran else array
    back, seen = decode_groot(encode_groot({"a": sent}, generation), Limits())
    assert seen is generation
    assert back["a"].dtype == array.dtype
    assert np.array_equal(back["a"], array, equal_nan=array.dtype.kind == "f")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        npy(np.zeros(3))[:-1],
        npy(np.zeros(3)) + b"\0",
        npy(np.zeros(3)).replace(b"<f8", b"|O8"),
        npy(np.zeros(3)).replace(b"'<f8'", b"__import"),
        npy(np.zeros(3)).replace(b"(3,)", b"(-3)"),
        npy(np.zeros(3)).replace(b"(3,)", b"(4,)"),
        npy(np.zeros(3)).replace(b"\x93NUMPY\x01", b"\x93NUMPY\x03"),
        npy(np.array(["a"])),
        npy(np.zeros(2, dtype=[("a", "f4"), ("b", "f4")])),
        b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + b"{" * 100,
        None,
        "text",
    ],
)
def test_npy_files_that_are_no_plain_array(data):
    with pytest.raises(TaktlineError):
        npy_array(data)


@pytest.mark.parametrize(
    "entries",
    [
        {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": b"\x80\x04N."},
        {b"nd": True, b"type": "|O", b"kind": b"", b"shape": [1], b"data": bytes(8)},
        {"nd": True, "type": "|O8", "kind": "O", "shape": [1], "data": bytes(8)},
        {b"nd": 1, b"type": "<f4", b"kind": b"", b"shape": [1], b"data": bytes(4)},
        {b"nd": True, b"type": [["a", "<f4"]], b"kind": b"V", b"shape": [1], b"data": bytes(4)},
        {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2], b"data": bytes(4)},
        {b"nd": True},
        {b"nd": False, b"type": "<f4", b"data": bytes(8)},
        {"__ndarray_class__": True},
        {"__ndarray_class__": True, "as_npy": b"", "more": 1},
    ],
)
def test_marked_maps_that_are_no_array(entries):
    with pytest.raises(TaktlineError):
        decode_groot(msgspec.msgpack.encode({"a": entries}), Limits())


@given(st.binary(max_size=160))
@settings(deadline=None, max_examples=300)
def test_fuzz_npy(tail):
    for data in (tail, b"\x93NUMPY\x01\x00" + tail, npy(np.zeros(3))[:60] + tail):
        with contextlib.suppress(TaktlineError):
            npy_array(data)


VALUES = (
    st.none()
    | st.integers(-9, 9)
    | st.text(max_size=3)
    | st.sampled_from([np.zeros((1, 1, 2)), np.zeros(()), np.zeros((0, 2)), np.zeros((2, 1))])
)
KEYS = st.sampled_from(["video", "state", "language", "annotation", "video.a", "state.a", "task", "a", "annotation.b"])


@given(
    st.recursive(
        VALUES,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=8,
    )
)
@settings(deadline=None, max_examples=300)
def test_fuzz_observations(observation):
    with contextlib.suppress(TaktlineError):
        for row in rows_of(joined_keys(observation)):
            mapping_of(row, ClientMapping())


def test_a_mapping_may_be_written_as_flat_clients_write_keys():
    dotted = ClientMapping(
        images={"video.front": "scene"}, state=("state.arm", "state/hand"), instruction="annotation.human.task",
        actions={"action.arm": 6, "hand": 2},
    )  # fmt: skip
    assert joined_mapping(dotted) == ClientMapping(
        images={"video/front": "scene"}, state=("state/arm", "state/hand"), instruction="annotation/human.task",
        actions={"arm": 6, "hand": 2},
    )  # fmt: skip
    assert joined_mapping(joined_mapping(dotted)) == joined_mapping(dotted)
