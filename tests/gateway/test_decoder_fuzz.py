"""Every decoder that a network peer can reach, against noise, damaged messages and well-formed nonsense.

Each one is run with what reads its result next, as the gateway does. It may return or raise TaktlineError, nothing
else, and it may not hold more memory than in proportion to what came in.
"""

from __future__ import annotations

import pickle
import sys
import tracemalloc
import types
from collections.abc import Callable
from typing import Any

import jwt
import msgspec
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from taktline_gateway.access import tokens
from taktline_gateway.access.http import secret_in
from taktline_gateway.access.keys import split_key
from taktline_gateway.compat.groot_arrays import Generation as Groot
from taktline_gateway.compat.groot_arrays import decode_groot, encode_groot
from taktline_gateway.compat.groot_observations import joined_keys, mapping_of, rows_of
from taktline_gateway.compat.kserve_tensors import decode_request
from taktline_gateway.compat.lerobot_messages import observation_piece, setup_data
from taktline_gateway.compat.lerobot_pickle import read_record, value_of
from taktline_gateway.compat.observations import read_observation
from taktline_gateway.compat.vla_eval import message_of
from taktline_gateway.compat.wire_arrays import decode, encode_openpi, encode_vla_eval
from taktline_gateway.stream.store import SessionStore
from taktline_protocol import Array, ErrorCode, Image, Observation, PolicyInfo, TaktlineError, worker_pb2
from taktline_protocol.batch_frames import (
    PREFIX,
    VERSION,
    Answer,
    Call,
    Cancel,
    Failure,
    FrameProtocol,
    ImageHead,
    Open,
    Opened,
    WireError,
    frame,
    images_of,
)
from taktline_protocol.checks import check_observation, check_policy_fit
from taktline_protocol.codecs import (
    MediaType,
    decode_admission_question,
    decode_chunk,
    decode_error,
    decode_observation,
    decode_policies,
    decode_policy,
    encode,
)
from taktline_protocol.deployment import ClientMapping
from taktline_protocol.images import check_image, sniff_encoding
from taktline_protocol.limits import DEFAULT_LIMITS
from taktline_protocol.messages import PolicyList, RtcReport
from taktline_protocol.rpc import (
    from_error,
    from_imagined,
    from_plan,
    from_rtc,
    from_tensor,
    item_images,
    policy_info,
    to_item,
)
from taktline_protocol.stream import Hello, Observe
from taktline_protocol.stream_codec import (
    decode_from_gateway,
    decode_from_robot,
    encode_frame,
    to_answer,
    to_image,
    to_observation,
    to_observe,
    to_refusal,
)
from taktline_protocol.trace_context import parse_members, parse_traceparent

from tests.example_messages import CHUNK

INFO = PolicyInfo(
    policy="p", family="f", revision="r", ready=True, cameras=("front", "wrist"), state_dim=3, action_dim=2, horizon=4
)
MAPPING = ClientMapping()
PIXELS = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(4, 5, 3)
PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x02\x00\x00\x00\x90wS\xde"
    b"\x00\x00\x00\x0cIDATx\x9cc\xf8\xcf\xc0\x00\x00\x03\x01\x01\x00\xc9\xfe\x92\xef\x00\x00\x00\x00IEND\xaeB`\x82"
)
JPEG = bytes.fromhex("ffd8ffc0000b080001000101011100ffda0008010100003f0000ffd9")
CLIENT = {"front": PIXELS, "wrist": PIXELS, "state": np.zeros(3, np.float32), "prompt": "go"}
OBSERVATION = Observation(
    robot_id="arm",
    session_id="s",
    seq=1,
    captured_at=1.0,
    sent_at=1.1,
    budget_ms=100.0,
    images={"front": Image("png", PNG), "wrist": Image("raw", PIXELS.tobytes(), PIXELS.shape)},
    state=Array.from_numpy(np.zeros(3, np.float32)),
    instruction="go",
)


def observation_of(read: Any, mapping: ClientMapping = MAPPING) -> None:
    """What the gateway does with a client's observation once it is read."""
    seen = read_observation(read, mapping, INFO, "openpi")
    observation = msgspec.structs.replace(
        OBSERVATION, images=seen.images, state=seen.state, instruction=seen.instruction
    )
    check_observation(observation, DEFAULT_LIMITS)
    check_policy_fit(observation, INFO)
    to_item("id", observation, 1.0)


def rest(media: MediaType) -> Callable[[bytes], None]:
    def read(body: bytes) -> None:
        observation = decode_observation(body, media)
        check_policy_fit(observation, INFO)
        to_item("id", observation, 1.0)

    return read


def vla_eval(frame: bytes) -> None:
    message = message_of(decode(frame, DEFAULT_LIMITS))
    if message.type == "observation":
        observation_of(message.payload)


def groot(frame: bytes) -> None:
    request, _ = decode_groot(frame, DEFAULT_LIMITS)
    data = request.get("data") if isinstance(request, dict) else None
    if isinstance(data, dict):
        for row in rows_of(joined_keys(data.get("observation"))):
            observation_of(row, mapping_of(row, MAPPING))


def every(*reads: Callable[[], Any]) -> None:
    """Runs all of them; refused is what each of them refuses."""
    refusals = []
    for read in reads:
        try:
            read()
        except TaktlineError as error:
            refusals.append(error)
    if len(refusals) == len(reads):
        raise refusals[0]


def kserve(body: bytes) -> None:
    def read(head: int | None) -> None:
        _, tensors = decode_request(body, head, DEFAULT_LIMITS)
        observation_of(tensors)

    every(lambda: read(None), lambda: read(min(40, len(body))), lambda: read(len(body) - 3))


def lerobot(data: bytes) -> None:
    def read(name: str) -> None:
        for value in read_record(data, name).fields.values():
            value_of(value)

    every(lambda: read("TimedObservation"), lambda: read("RemotePolicyConfig"))


def lerobot_pieces(data: bytes) -> None:
    every(lambda: observation_piece(data), lambda: setup_data(data))


def image(data: bytes) -> None:
    encoding = sniff_encoding(data) or "png"
    check_image("front", Image(encoding, data), DEFAULT_LIMITS)


def stream(body: bytes) -> None:
    frame = decode_from_robot(body, DEFAULT_LIMITS)
    if isinstance(frame, Observe):
        images = {camera: to_image(sent) for camera, sent in frame.images.items()}
        observation = to_observation(frame, "arm", "s", images or dict(OBSERVATION.images), frame.instruction or "go")
        check_observation(observation, DEFAULT_LIMITS)
        check_policy_fit(observation, INFO)
        to_item("id", observation, 1.0)


def parsed(message: Any, body: bytes) -> Any:
    """What gRPC does before our code: bytes that are no such message are a failed call."""
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise refused(error) from error
    return message


def refused(error: Exception) -> TaktlineError:
    """What is refused by an exception of its own, as the reader's caller handles it."""
    return TaktlineError(ErrorCode.INVALID_BODY, str(error)[:200], "n")


def worker_answer(body: bytes) -> None:
    for result in parsed(worker_pb2.InferResponse(), body).results:
        every(
            lambda result=result: from_tensor("actions", result.actions),
            lambda result=result: from_plan(result.plan),
            lambda result=result: from_rtc(result.rtc),
            lambda result=result: from_imagined(result.imagined),
        )
        from_error(result.error)


def worker_info(body: bytes) -> None:
    policy_info(parsed(worker_pb2.InfoResponse(), body))


def worker_request(body: bytes) -> None:
    item_images(parsed(worker_pb2.InferItem(), body))


def key_set(body: bytes) -> None:
    try:
        tokens.public_keys(body)
    except ValueError as error:
        raise refused(error) from error


def credential(body: bytes) -> None:
    secret = secret_in(body.decode("latin-1"))
    if secret:
        split_key(secret)


class BatchReader(FrameProtocol):
    """Reads what either end of a batch connection does, as the two do."""

    def frame_received(self, head: Any, body: Any) -> None:
        try:
            if isinstance(head, Call):
                images_of(head, body)
                worker_pb2.InferRequest.FromString(bytes(body[: head.request]))
            elif isinstance(head, Answer):
                worker_pb2.InferResponse.FromString(bytes(body))
        except DecodeError as error:
            raise WireError("unreadable") from error


class Gone:
    """A transport that may be closed."""

    closed = False

    def abort(self) -> None:
        self.closed = True


def batch_frames(data: bytes) -> None:
    reader, transport = BatchReader(), Gone()
    reader.connection_made(transport)
    while data and not transport.closed:
        room = reader.get_buffer(-1)
        size = min(len(room), len(data))
        room[:size], data = data[:size], data[size:]
        reader.buffer_updated(size)


def admission_question(body: bytes) -> None:
    for media in MediaType:
        try:
            decode_admission_question(body, media)
        except TaktlineError:
            continue


def traces(body: bytes) -> None:
    parse_traceparent(body.decode("latin-1"))
    parse_members(body.decode("latin-1"))


def finished(work: Any) -> Any:
    """The result of a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def stored_session(body: bytes) -> None:
    class Store:
        async def get(self, key: str) -> bytes:
            return body

    store = SessionStore("redis://127.0.0.1:1", 1.0)
    store._redis, store.up = Store(), True
    finished(store.load(b"t" * 16))


def token(body: bytes) -> None:
    finished(tokens.TokenVerifier(()).verify(body.decode("latin-1")))


def joined(head: Any, *body: bytes) -> bytes:
    return b"".join(frame(head, body))


_SMALL = worker_pb2.InferRequest(policy="p", items=[worker_pb2.InferItem(request_id="id")]).SerializeToString()
_CALL = Call(1, 1.0, len(_SMALL), [[ImageHead("front", "raw", (4, 5, 3), PIXELS.nbytes)]], {"traceparent": "00-1"})
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_VALUES = worker_pb2.Tensor(dtype="float32", shape=[1, 2], data=bytes(8))
_ANSWER = worker_pb2.InferResponse(
    results=[
        worker_pb2.InferResult(request_id="id", actions=_VALUES),
        worker_pb2.InferResult(
            plan=worker_pb2.Plan(predicted_states=_VALUES, energies=_VALUES, stopped="rounds"),
            rtc=worker_pb2.RtcApplied(mode="guided", schedule="exp", path="batched"),
            imagined=worker_pb2.ImaginedVideo(format="frames", fps=5.0, parts=[JPEG]),
        ),
    ]
)
_CHUNK = msgspec.structs.replace(
    CHUNK, rtc=RtcReport(mode="guided", delay=1, prefix_end=2, schedule="exp", path="batched")
)
_SHED = TaktlineError(ErrorCode.OVERLOADED, "m", "n", retry_after_ms=5.0)


def lerobot_record(name: str, **fields: Any) -> bytes:
    """What LeRobot's client would pickle: an instance of its class, here of a stand-in with that name."""
    module = types.ModuleType("lerobot.async_inference.helpers")
    kind = type(name, (), {"__module__": module.__name__})
    setattr(module, name, kind)
    record = kind()
    record.__dict__.update(fields)
    with pytest.MonkeyPatch.context() as patch:
        for path in ("lerobot", "lerobot.async_inference", module.__name__):
            patch.setitem(sys.modules, path, module)
        return pickle.dumps(record)


def infer_request(**wrist: Any) -> bytes:
    inputs = [
        {"name": "front", "datatype": "UINT8", "shape": [1, 1, 3], "data": [1, 2, 3]},
        {"name": "wrist", "datatype": "UINT8", "shape": [1, 1, 3], **wrist},
        {"name": "state", "datatype": "FP32", "shape": [3], "data": [0.0, 1.0, 2.0]},
        {"name": "instruction", "datatype": "BYTES", "shape": [1], "data": ["go"]},
    ]
    return msgspec.json.encode({"inputs": inputs})


_MESSAGE = {"type": "observation", "payload": CLIENT, "seq": 1, "timestamp": 0.0}
_BATCH = {
    "video": dict.fromkeys(("front", "wrist"), PIXELS[None, None]),
    "state": {"state": np.zeros((1, 1, 3), np.float32)},
    "language": {"instruction": [["go"]]},
}
_GROOT = {"endpoint": "get_action", "data": {"observation": _BATCH}, "api_token": "t"}

DECODERS: dict[str, tuple[Callable[[bytes], Any], list[bytes]]] = {
    "rest json": (rest(MediaType.JSON), [encode(OBSERVATION, MediaType.JSON)]),
    "rest msgpack": (rest(MediaType.MSGPACK), [encode(OBSERVATION, MediaType.MSGPACK)]),
    "openpi": (lambda frame: observation_of(decode(frame, DEFAULT_LIMITS)), [encode_openpi(CLIENT)]),
    "vla-eval": (vla_eval, [encode_vla_eval(_MESSAGE)]),
    "groot": (groot, [encode_groot(_GROOT, generation) for generation in Groot]),
    "kserve": (kserve, [infer_request(data=[1, 2, 3]), infer_request(parameters={"binary_data_size": 3}) + b"abc"]),
    "lerobot": (
        lerobot,
        [
            lerobot_record(
                "TimedObservation", timestamp=1.0, timestep=3, must_go=True, observation={"front": PIXELS, "task": "go"}
            ),
            lerobot_record("RemotePolicyConfig", policy_type="pi0", actions_per_chunk=4, device="cpu"),
        ],
    ),
    "lerobot pieces": (lerobot_pieces, [b"\x08\x03\x12\x03abc"]),
    "image": (image, [PNG, JPEG]),
    "stream from robot": (
        stream,
        [
            encode_frame(Hello(versions=(1,), robot_id="arm", session_id="s", token=b"t" * 16)),
            encode_frame(to_observe(OBSERVATION, {}, {"front": b"n" * 16}, instruction=True)),
        ],
    ),
    "stream from gateway": (
        decode_from_gateway,
        [encode_frame(to_answer(_CHUNK, 1.0, 1.5)), encode_frame(to_refusal(3, _SHED, 1.0, 2.0, held=True))],
    ),
    "chunk": (lambda body: decode_chunk(body, MediaType.MSGPACK), [encode(_CHUNK, MediaType.MSGPACK)]),
    "error": (lambda body: decode_error(body, MediaType.JSON), [b'{"code":"internal","message":"m","next_step":"n"}']),
    "policies": (
        lambda body: decode_policies(body, MediaType.MSGPACK),
        [encode(PolicyList(policies=[INFO]), MediaType.MSGPACK)],
    ),
    "policy": (lambda body: decode_policy(body, MediaType.JSON), [encode(INFO, MediaType.JSON)]),
    "worker answer": (worker_answer, [_ANSWER.SerializeToString()]),
    "worker info": (worker_info, [worker_pb2.InfoResponse(policy="p", horizon=3).SerializeToString()]),
    "worker request": (worker_request, [to_item("id", OBSERVATION, 1.0).SerializeToString()]),
    "batch port": (
        batch_frames,
        [
            joined(Open(VERSION, b"t" * 16)) + joined(_CALL, _SMALL, PIXELS.tobytes()) + joined(Cancel(1)),
            joined(Opened(VERSION))
            + joined(Answer(1), _ANSWER.SerializeToString())
            + joined(Failure(2, "ABORTED", "w")),
        ],
    ),
    "head of the batch port": (
        lambda body: batch_frames(PREFIX.pack(len(body), 0) + body),
        [joined(_CALL)[PREFIX.size :], joined(Failure(1, "UNKNOWN", "w"))[PREFIX.size :]],
    ),
    "admission question": (admission_question, [b'{"robot_id": "arm", "rate_hz": 2.0, "budget_ms": 500.0}']),
    "trace context": (traces, [_TRACE.encode(), f"0={_TRACE},1={_TRACE}".encode()]),
    "stored session": (
        stored_session,
        [msgspec.msgpack.encode(["p", "arm", "arm", "s", 3, "go", {"front": [b"n" * 16, "png", PNG, 0, 0]}])],
    ),
    "key set": (
        key_set,
        [b'{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}'],
    ),
    "token": (token, []),  # an issuer that is known would need its keys: see TOKEN
    "credential": (credential, [b"Bearer tkl_arm_" + b"A" * 43, b"Basic YTpi"]),
}
TOKEN = jwt.encode({"iss": "https://nobody", "exp": 2**40}, "k" * 32, headers={"kid": "k"}).encode()
MARKS = [
    "__ndarray__",
    "data",
    "dtype",
    "shape",
    "nd",
    "type",
    "kind",
    "images",
    "front",
    "endpoint",
    "format",
    "__image__",
    "__ndarray_class__",
    "as_npy",
    "payload",
    "seq",
    "timestamp",
    "inputs",
    "keys",
    "kty",
]
NONSENSE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=12)
    | st.binary(max_size=24)
    | st.sampled_from(["__ndarray__", "data", "dtype", "shape", "<f4", "|u1", "|O", "front", "state", "raw", "png"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=6) | st.sampled_from(MARKS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)
FUZZ = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def survives(read: Callable[[bytes], Any], data: bytes) -> None:
    refused = ""
    try:
        read(data)
    except TaktlineError as error:
        refused = str(error)
    assert len(refused) < 4000, "an error repeats only so much of what came in"


@pytest.mark.parametrize("name", DECODERS)
@FUZZ
@given(data=st.binary(max_size=200))
@example(data=b"")
@example(data=b"\xdf\xff\xff\xff\xff")
@example(data=b"\xc9\xff\xff\xff\xff\x00")
@example(data=b"\x80\x05c__builtin__\neval\n.")
@example(data=b'{"a":' * 50)
@example(data=b"\xff\xd8\xff\xc0\xff\xff")
@example(data=b"9" * 5000 + b"=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
def test_noise(name, data):
    survives(DECODERS[name][0], data)


@pytest.mark.parametrize("name", DECODERS)
@FUZZ
@given(data=st.data())
def test_damage(name, data):
    """A few bytes changed, taken out, put in, or the end cut off: fields, lengths and types go wrong one by one."""
    read, good = DECODERS[name]
    message = bytearray(data.draw(st.sampled_from(good or [TOKEN])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(message) - 1)))
        match data.draw(st.sampled_from(["set", "cut", "insert", "delete", "repeat"])):
            case "set" if message:
                message[at] = data.draw(st.integers(0, 255))
            case "cut":
                del message[at:]
            case "insert":
                message[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case "delete":
                del message[at : at + data.draw(st.integers(1, 8))]
            case "repeat":
                message[at:at] = message[at : at + data.draw(st.integers(1, 64))]
    survives(read, bytes(message))


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in ("image", "credential")])
@FUZZ
@given(value=NONSENSE)
def test_nonsense_that_is_well_formed(name, value):
    read = DECODERS[name][0]
    survives(read, msgspec.msgpack.encode(value))
    try:
        text = msgspec.json.encode(value)
    except (UnicodeEncodeError, ValueError):
        return
    survives(read, text)


@pytest.mark.parametrize("name", DECODERS)
def test_good_messages_are_read(name):
    read, good = DECODERS[name]
    for message in good:
        try:
            read(message)
        except TaktlineError as error:
            raise AssertionError(f"{name} refuses its own good message") from error


BOMBS = {
    "a million nils": b"\xdd\x00\x0f\x42\x40" + b"\xc0" * 1_000_000,
    "a million levels": b"\x91" * 1_000_000 + b"\xc0",
    "declares 4 GiB": b"\xc6\xff\xff\xff\xff" + bytes(1000),
    "a million braces": b"[" * 1_000_000,
    "a million numbers": b"[" + b"0," * 1_000_000 + b"0]",
    "a long key": msgspec.msgpack.encode({"k" * 1_000_000: 1}),
    "pickled memo": b"\x80\x04" + b"]\x94" * 300_000 + b".",
    "pickled depth": b"\x80\x02" + b"(" * 500_000 + b"l" * 500_000 + b".",
    "png of 2^31": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x7f\xff\xff\xff\x7f\xff\xff\xff\x08\x02\x00\x00\x00"
    + bytes(40),
}


@pytest.mark.parametrize("name", DECODERS)
def test_no_message_unfolds(name):
    """Whatever a megabyte declares, reading it holds a few times its size at most."""
    read = DECODERS[name][0]
    for bomb in BOMBS.values():
        tracemalloc.start()
        try:
            survives(read, bomb)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 40 * len(bomb) + (1 << 20), (name, peak, len(bomb))
