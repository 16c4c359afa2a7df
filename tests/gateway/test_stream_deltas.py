"""Robot's and gateway's ideas of what is held, together: whatever happens, an observation is what the robot saw."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline.encoding import FrameEncoder
from taktline.held_frames import HeldFrames
from taktline_gateway.stream.resolving import budget_from, resolve
from taktline_gateway.stream.sessions import HeldFrame, Sessions
from taktline_protocol import ErrorCode, Observation, TaktlineError
from taktline_protocol.limits import DEFAULT_LIMITS
from taktline_protocol.messages import Array, Image
from taktline_protocol.stream import Clock, Hello, Observe
from taktline_protocol.stream_codec import decode_from_robot, encode_frame, to_image, to_observe

STATE = Array("float32", (1,), bytes(4))


def observation(seq: int, images: dict[str, Image], instruction: str, **more) -> Observation:
    return Observation(
        robot_id="arm",
        session_id="s",
        seq=seq,
        captured_at=1.0,
        sent_at=1.0,
        budget_ms=1000.0,
        images=images,
        state=STATE,
        instruction=instruction,
        **more,
    )


class Session:
    """A robot and its gateway, with everything that may come between them."""

    def __init__(self) -> None:
        self.sessions = Sessions(30.0, 10_000, lambda: 0.0)
        self.session = self.sessions.open("p", "arm", Hello((1,), "arm", "s"))
        self.encoder = FrameEncoder()
        self.held = HeldFrames()
        self.seq = 0

    def send(self, shown: dict[str, int], instruction: str, *, broken: bool = False) -> bool:
        """One observation; True where it was taken, after which it must be what was shown."""
        self.seq += 1
        images = {camera: Image("jpeg", bytes([value]) * 9) for camera, value in shown.items()}
        frames = self.encoder.encode(images)
        whole, unchanged, say = self.held.split(frames, instruction)
        body = encode_frame(to_observe(observation(self.seq, images, instruction), whole, unchanged, instruction=say))
        self.held.sent(frames, instruction, self.seq)
        frame = decode_from_robot(body, DEFAULT_LIMITS)
        assert isinstance(frame, Observe)
        try:
            found = resolve(self.session, frame)
            if broken:
                raise TaktlineError(ErrorCode.IMAGE_CORRUPT, "m", "n")
        except TaktlineError:
            self.held.forget()  # what the refusal's `held: false` tells the robot
            return False
        assert found == observation(self.seq, images, instruction)
        taken = {camera: HeldFrame(whole.name, to_image(whole)) for camera, whole in frame.images.items()}
        self.sessions.hold(self.session, taken, frame.instruction)
        self.session.seq = frame.seq
        self.held.took(frame.seq)
        return True

    def evict(self) -> None:
        """Another session needed the memory."""
        other = self.sessions.open("p", "other", Hello((1,), "other", "s"))
        self.sessions.hold(other, {"c": HeldFrame(b"12345678", Image("jpeg", bytes(20_000)))}, "x")
        self.sessions.end(other)

    def reconnect(self) -> None:
        """A new connection: the welcome names what is held."""
        self.held.begin({camera: frame.name for camera, frame in self.session.held.items()})


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("send"),
            st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), min_size=1),
            st.sampled_from(["go", "stop"]),
            st.booleans(),
        ),
        st.tuples(st.just("evict")),
        st.tuples(st.just("reconnect")),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_an_observation_is_what_the_robot_saw_or_a_keyframe_is_asked_for(steps):
    both = Session()
    for step in steps:
        if step[0] == "send":
            _, shown, instruction, broken = step
            taken = both.send(shown, instruction, broken=broken)
            # The next one is a keyframe, and a sound keyframe is always taken.
            assert taken or both.send(shown, instruction)
        else:
            getattr(both, step[0])()


@pytest.mark.parametrize(
    ("late_s", "clock", "began", "reserve"),
    [
        (0.5, None, 0.0, 100.0),
        (0.5, Clock(0.0, 0.01), 0.49, 50.0),
        (0.03, Clock(0.0, 0.01), 0.02, 80.0),
        (0.5, Clock(-0.2, 0.0), 0.7, 50.0),
        (0.005, Clock(0.0, 0.01), 0.0, 100.0),
        (-3.0, Clock(0.0, 0.01), 0.0, 100.0),
        (9.0, Clock(0.0, 0.01), 1.0, 50.0),
    ],
)
def test_the_budget_begins_when_the_observation_has_surely_left(late_s, clock, began, reserve):
    """Of a budget of 1 s, of which 100 ms are reserved for the network; `began` s before it came."""
    sent = msgspec.structs.replace(observation(1, {}, "go", network_ms=100.0), sent_at=50.0 - late_s)
    at, left = budget_from(sent, 50.0, clock)
    assert 50.0 - at == pytest.approx(began)
    assert left.network_ms == pytest.approx(reserve)
