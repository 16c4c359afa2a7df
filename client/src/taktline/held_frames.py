"""What the gateway holds of a session, as far as the robot knows: decides what is sent whole and what by reference."""

from __future__ import annotations

from collections.abc import Mapping

from taktline_protocol.stream import Frame
from taktline_protocol.stream_codec import to_frame

from taktline.encoding import NamedFrame


class HeldFrames:
    """The last frame of each camera that went out whole, and the last instruction.

    A frame that the gateway did not hold after all it misses by its name. An instruction has none, so that it is said
    again until the gateway took an observation that said it.
    """

    def __init__(self) -> None:
        self._names: dict[str, bytes] = {}
        self._said: tuple[int, str] | None = None
        """The last instruction, and the number of the first observation since when it is the same."""
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

    def sent(self, frames: Mapping[str, NamedFrame], instruction: str, seq: int) -> None:
        """The gateway gets these; messages arrive in order, so what comes later may refer to the frames."""
        for camera, frame in frames.items():
            self._names[camera] = frame.name
        if self._said is None or self._said[1] != instruction:
            self._said, self._instruction = (seq, instruction), None

    def took(self, seq: int) -> None:
        """The gateway took this observation."""
        if self._said is not None and seq >= self._said[0]:
            self._instruction = self._said[1]

    def begin(self, held: Mapping[str, bytes]) -> None:
        """A new connection: the gateway says what it holds. The instruction is said again, it is short."""
        self._names = dict(held)
        self._said = self._instruction = None

    def forget(self) -> None:
        """The gateway did not take something: the next observation is a keyframe."""
        self.begin({})
