"""LeRobot's asynchronous inference: its own client, and the reader of its pickles, which never calls anything."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import pickletools
import sys
import types

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway.compat.lerobot_messages import _classes as messages
from taktline_gateway.compat.lerobot_pickle import HELPERS, read_record, value_of, write_actions
from taktline_protocol import TaktlineError

from .conftest import client_environment, free_port

ADDRESS = "127.0.0.1:{}"


@pytest.fixture(scope="module")
def served(shared_fleet):
    shared_fleet.port = free_port()
    worker = shared_fleet.worker("reach", state_dim=2, action_dim=6)
    shared_fleet.route("reach", worker, control_budget_ms=5000)
    shared_fleet.start("--lerobot-listen", ADDRESS.format(shared_fleet.port))
    shared_fleet.wait_ready("reach")
    return shared_fleet


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lerobots_own_client_drives_two_robots_on_one_port(served):
    """On LeRobot's own server a second robot destroys the first one's session."""
    # The newest version for Python 3.11; torch as the workspace has it, so that it is not fetched twice.
    client = client_environment("lerobot", "lerobot[async]==0.4.4", overrides=("torch==2.11.*", "torchvision==0.26.*"))
    models = ("hub-user/reach", "reach,absent")
    robots = [client.start("lerobot_robot.py", ADDRESS.format(served.port), names) for names in models]
    (first,), (second, refused_one) = (client.result(robot, timeout_s=400) for robot in robots)
    assert refused_one == {"started": False}
    for robot in (first, second):
        # State in the motors' order, the mean of each camera, the instruction's length: the observation arrived whole.
        assert [list(action.values())[:5] for action in robot["done"]] == [[1.5, 2.5, 30.0, 40.0, 2.0]] * 25
        assert all(len(chunk) == 8 for chunk in robot["chunks"])
        for chunk in robot["chunks"]:
            assert chunk == [*range(chunk[0], chunk[0] + 8)]
        assert len(robot["chunks"]) > 2


# ----- messages as LeRobot's versions pickle them


@dataclasses.dataclass
class TimedObservation:
    timestamp: float
    timestep: int
    observation: dict
    must_go: bool = False


@dataclasses.dataclass
class RemotePolicyConfig:
    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: dict
    actions_per_chunk: int
    device: str = "cpu"
    rename_map: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class TimedAction:
    timestamp: float
    timestep: int
    action: object


@pytest.fixture(autouse=True)
def module(request, monkeypatch):
    """The classes above under the module name that a version of LeRobot gives them."""
    name = getattr(request, "param", HELPERS[0])
    made = types.ModuleType(name)
    for kind in (TimedObservation, RemotePolicyConfig, TimedAction):
        monkeypatch.setattr(kind, "__module__", name)
        setattr(made, kind.__name__, kind)
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = types.ModuleType(".".join(parts[:end]))
        parent.__path__ = []
        monkeypatch.setitem(sys.modules, parent.__name__, parent)
    monkeypatch.setitem(sys.modules, name, made)
    return name


every_version = pytest.mark.parametrize("module", HELPERS, indirect=True)


def observation(**changes):
    values = {
        "a.pos": 1.5,
        "b.pos": np.float32(2.5),
        "c.pos": 3,
        "front": np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "empty": np.zeros((0, 3), np.float32),
        "task": "gö",
    }
    return TimedObservation(12.5, 7, values | changes, True)


@every_version
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_what_python_pickles(protocol, module):
    record = read_record(pickle.dumps(observation(), protocol), "TimedObservation")
    assert record.module == module
    assert (record.fields["timestamp"], record.fields["timestep"], record.fields["must_go"]) == (12.5, 7, True)
    sent = observation().observation
    for key, value in record.fields["observation"].items():
        got = value_of(value)
        assert np.array_equal(got, sent[key]), key
        if isinstance(sent[key], np.ndarray):
            assert got.dtype == sent[key].dtype


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_policy_instructions(protocol):
    features = {"observation.state": {"dtype": "float32", "shape": (2,), "names": ["a.pos", "b.pos"]}}
    data = pickle.dumps(RemotePolicyConfig("pi05", "user/model", features, 50, "cuda", {"a": "b"}), protocol)
    fields = read_record(data, "RemotePolicyConfig").fields
    assert fields["lerobot_features"] == features
    assert (fields["pretrained_name_or_path"], fields["actions_per_chunk"]) == ("user/model", 50)


@pytest.fixture
def torch(monkeypatch):
    """Stands in for the one function of torch that a chunk names."""
    made = types.ModuleType("torch")
    made.tensor = lambda numbers: np.array(numbers, np.float32)
    monkeypatch.setitem(sys.modules, "torch", made)


@every_version
def test_python_reads_what_is_written(module, torch):
    actions = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    back = pickle.loads(write_actions(module, actions, 2**40, 1.7e9, 0.05))
    assert [type(action) for action in back] == [TimedAction] * 5
    assert [action.timestep for action in back] == [2**40 + row for row in range(5)]
    assert [action.timestamp for action in back] == [1.7e9 + row * 0.05 for row in range(5)]
    assert all(np.array_equal(action.action, row) for action, row in zip(back, actions, strict=True))


class Command:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def attacks(marker):
    touch = f"touch {marker}"
    yield pickle.dumps(Command(touch))
    yield pickle.dumps(observation(evil=Command(touch)))
    yield pickle.dumps(observation(evil=Command(touch)), 2)
    yield f"cposix\nsystem\n(S'{touch}'\ntR.".encode()
    yield "\x80\x02cos\nsystem\nX\x04\0\0\0".encode() + touch.encode()[:4] + b"\x85R."
    yield b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R."
    yield b"\x80\x02cnumpy\nload\nX\x01\0\0\0x\x85R."
    yield b"\x80\x02ctorch.storage\n_load_from_bytes\nC\x01x\x85R."
    yield b"\x80\x02c_codecs\ndecode\nX\x01\0\0\0x\x85R."
    yield f"i{HELPERS[0]}\nTimedObservation\n.".encode()  # INST
    yield pickle.dumps(observation(evil=np.array([Command(touch)], dtype=object)))


def test_nothing_that_a_peer_names_is_called(tmp_path):
    """CVE-2026-25874: LeRobot's own server runs whatever a peer sends."""
    marker = tmp_path / "called"
    for attack in attacks(marker):
        with pytest.raises(TaktlineError) as refused:
            read_record(attack, "TimedObservation")
        assert refused.value.code.value == "invalid_body"
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"N.",
        b"\x80\x01N.",
        b"\x80\x04N.trailing",
        b"\x80\x04" + b"N" * 60_000 + b".",
        b"\x80\x04(((...",
        b"\x80\x04h\x05.",
        b"\x80\x04\x8c\xff.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x80\x04]]a}s.",
        b"\x80\x04}]]s.",
        b"\x80\x04NNR.",
        b"\x80\x04\x93.",
        b"\x80\x04\x85.",
        b"\x80\x04\x97.",
        pickle.dumps({"timestamp": 1.0}),
        pickle.dumps([1, 2]),
    ],
    ids=range(18),
)
def test_other_pickles_are_refused(data):
    with pytest.raises(TaktlineError):
        read_record(data, "TimedObservation")


def test_arrays_with_other_dtypes_or_sizes_are_refused():
    good = pickle.dumps(observation(), 4)
    for old, new in ((b"\x8c\x02u1", b"\x8c\x02O8"), (b"\x8c\x02u1", b"\x8c\x02u8"), (b"\x8c\x02f4", b"\x8c\x02V4")):
        assert old in good
        with pytest.raises(TaktlineError):
            value_of(read_record(good.replace(old, new), "TimedObservation").fields["observation"]["front"])


@given(st.binary(max_size=120))
@settings(deadline=None, max_examples=500)
def test_fuzz_any_bytes(data):
    for program in (data, b"\x80\x04" + data):
        with contextlib.suppress(TaktlineError):
            read_record(program, "TimedObservation")


@given(st.data(), st.integers(2, 5))
@settings(deadline=None, max_examples=300)
def test_fuzz_damaged_messages(data, protocol):
    damaged = bytearray(pickle.dumps(observation(), protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TaktlineError):
        for value in read_record(bytes(damaged), "TimedObservation").fields.values():
            value_of(value)


CODES = st.sampled_from([op.code.encode("latin1") for op in pickletools.opcodes])


@given(st.lists(CODES | st.binary(max_size=3), max_size=30))
@settings(deadline=None, max_examples=500)
def test_fuzz_instructions(parts):
    with contextlib.suppress(TaktlineError):
        read_record(b"\x80\x04" + b"".join(parts) + b".", "TimedObservation")


# ----- the service, by a bare gRPC client


class Wire:
    def __init__(self, port):
        # A connection of its own, as each robot has; channels of one process share theirs otherwise.
        self.channel = grpc.insecure_channel(ADDRESS.format(port), [("grpc.use_local_subchannel_pool", 1)])

    def call(self, method, request=b""):
        return self.channel.unary_unary(f"/transport.AsyncInference/{method}")(request, timeout=20)

    def push(self, data, piece=1000):
        pieces = [data[start : start + piece] for start in range(0, len(data), piece)] or [b""]
        states = [3] if len(pieces) == 1 else [1, *[2] * (len(pieces) - 2), 3]
        stream = [
            messages["Observation"](transfer_state=state, data=part).SerializeToString()
            for state, part in zip(states, pieces, strict=True)
        ]
        return self.channel.stream_unary("/transport.AsyncInference/SendObservations")(iter(stream), timeout=20)

    def begin(self, model="reach", count=4):
        features = {
            "observation.state": {"dtype": "float32", "shape": (2,), "names": ["a.pos", "b.pos"]},
            "observation.images.front": {
                "dtype": "image",
                "shape": (2, 4, 3),
                "names": ["height", "width", "channels"],
            },
            "observation.images.wrist_image": {"dtype": "image", "shape": (2, 4, 3), "names": []},
        }
        setup = RemotePolicyConfig("pi05", model, features, count, "cuda", {"observation.images.front": "image"})
        self.call("Ready")
        return self.call(
            "SendPolicyInstructions", messages["PolicySetup"](data=pickle.dumps(setup)).SerializeToString()
        )


def frame(timestep=0, **changes):
    values = {
        "a.pos": 1.5,
        "b.pos": 2.5,
        "front": np.full((2, 4, 3), 30, np.uint8),
        "wrist_image": np.full((2, 4, 3), 40, np.uint8),
        "task": "go",
    }
    return pickle.dumps(TimedObservation(1.0, timestep, values | changes))


def refused(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_push_in_pieces_pull_the_newest_then_nothing(served, torch):
    wire = Wire(served.port)
    wire.begin()
    wire.push(frame(3))
    wire.push(frame(9, task="the newest"), piece=50)
    chunk = pickle.loads(messages["Actions"].FromString(wire.call("GetActions")).data)
    assert [action.timestep for action in chunk] == [9, 10, 11, 12]
    assert [action.timestamp for action in chunk] == [1.0 + row * 0.02 for row in range(4)]
    assert chunk[0].action.tolist() == [1.5, 2.5, 30.0, 40.0, float(len("the newest")), 0.0]
    assert wire.call("GetActions") == b""


def test_bad_messages_get_a_status_that_the_client_does_not_repeat(served, tmp_path):
    wire = Wire(served.port)
    assert refused(lambda: wire.push(frame()))[0] is grpc.StatusCode.INVALID_ARGUMENT
    code, text = refused(lambda: wire.begin("hub-user/other"))
    assert (code, text.split(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "unknown_policy")
    wire.begin()
    marker = tmp_path / "called"
    for attack in attacks(marker):
        assert refused(lambda data=attack: wire.push(data))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert not marker.exists()
    for bad, code in (
        ({"front": np.zeros((2, 4), np.uint8)}, "camera_missing"),
        ({"front": np.zeros((2, 4, 4), np.uint8)}, "image_corrupt"),
        ({"a.pos": float("nan")}, "state_invalid"),
        ({"a.pos": "text"}, "state_invalid"),
        ({"task": ""}, "instruction_invalid"),
        ({"task": "fail"}, "worker_failed"),
    ):
        wire.push(frame(**bad))
        status, text = refused(lambda: wire.call("GetActions"))
        assert text.startswith(f"{code}: ")
        assert status not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        wire.push(frame())
        assert wire.call("GetActions")


def test_an_observation_over_the_limit_is_refused(fleet):
    port = free_port()
    fleet.route("reach", fleet.worker("reach", state_dim=2))
    fleet.start("--lerobot-listen", f"reach=127.0.0.1:{port}", "--max-body-mib", "0.1")
    fleet.wait_ready("reach")
    wire = Wire(port)
    wire.begin("any/name")
    status, text = refused(lambda: wire.push(bytes(200_000)))
    assert (status, text.split(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "body_too_large")
