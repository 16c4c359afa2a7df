"""What the gateway holds of a session, as far as the robot knows: decides what is sent whole and what by reference."""

from __future__ import annotations

from collections.abc import Mapping

from taktline_protocol.stream import Frame
from taktline_protocol.stream_codec import to_frame

from taktline.encoding import NamedFrame


class HeldFrames:
    """The last frame of each camera that went out whole, and the last instruction."""

    def __init__(self) -> None:
        self._names: dict[str, bytes] = {}
        self._instruction: str | None = None

    def split(
        self, frames: Mapping[str, NamedFrame], instruction: str
    ) -> tuple[dict[str, Frame], dict[str, bytes], bool]:
        """Cameras to send whole, cameras to refer to, and whether to say the instruction."""
        whole: dict[str, Frame] = {}
        unchanged: dict[str, bytes] = {}
        for camera, frame in frames.items():
            if self._names.get(camera) == frame.name:
                unchanged[camera] = frame.name
            else:
                whole[camera] = to_frame(frame.image, frame.name)
        return whole, unchanged, instruction != self._instruction

    def sent(self, frames: Mapping[str, NamedFrame], instruction: str) -> None:
        """The gateway gets these; messages arrive in order, so what comes later may refer to them."""
        for camera, frame in frames.items():
            self._names[camera] = frame.name
        self._instruction = instruction

    def begin(self, held: Mapping[str, bytes]) -> None:
        """A new connection: the gateway says what it holds. The instruction is said again, it is short."""
        self._names = dict(held)
        self._instruction = None

    def forget(self) -> None:
        """The gateway did not take something: the next observation is a keyframe."""
        self.begin({})
