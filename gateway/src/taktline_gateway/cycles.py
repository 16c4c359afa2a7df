"""L_env and L_control of each robot, as far as a gateway can see them: the axes of the control-time roofline."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
from taktline_protocol.messages import Observation

ROBOTS_KEPT = 20_000
PAUSE_FACTOR = 1.5
"""A robot that was silent for longer than this many chunks has paused: that is no control cycle."""


class Cycle(msgspec.Struct, frozen=True, gc=False):
    """One control cycle: from one observation of a robot to its next. Times in ms.

    Attributes:
        environment_ms: L_env, the time that the robot's own motion took.
        control_ms: L_control, the time that the cycle took.
        inference_ms: L_inference of the chunk that ended it.
    """

    environment_ms: float
    control_ms: float
    inference_ms: float

    @property
    def x(self) -> float:
        """L_env / L_inference."""
        return self.environment_ms / max(self.inference_ms, 1e-3)

    @property
    def y(self) -> float:
        """L_env / L_control."""
        return self.environment_ms / max(self.control_ms, 1e-3)


class ControlCycles:
    """Follows robots from answer to answer; forgets those that were silent for longest.

    L_control is the time between the captures of two observations that were both answered, by the robot's own clock.
    What the robot stood still in it is what the first of them was late: its buffer was dry for as long as its margin
    was negative. The rest is L_env. A robot that waits for each chunk on purpose states a budget that runs out when
    it asks, so its wait counts as standing still.
    """

    def __init__(self) -> None:
        self._robots: OrderedDict[tuple[str, str], tuple[str, float, float, float]] = OrderedDict()

    def answered(
        self, policy: str, observation: Observation, margin_ms: float, inference_ms: float, chunk_s: float
    ) -> Cycle | None:
        """Notes an answer of `chunk_s`; the cycle that its observation ended, None where there is none to tell of."""
        key = (policy, observation.robot_id)
        before = self._robots.get(key)
        late_ms = max(0.0, -margin_ms)
        self._robots[key] = (observation.session_id, observation.captured_at, late_ms, chunk_s)
        self._robots.move_to_end(key)
        while len(self._robots) > ROBOTS_KEPT:
            self._robots.popitem(last=False)
        if before is None or before[0] != observation.session_id:
            return None
        control_ms = 1e3 * (observation.captured_at - before[1])
        stood_ms = before[2]
        if not 0 < control_ms <= PAUSE_FACTOR * 1e3 * before[3] + stood_ms:
            return None
        return Cycle(max(0.0, control_ms - stood_ms), control_ms, inference_ms)

    def lost(self, policy: str, robot_id: str) -> None:
        """An observation of the robot got no chunk: how long it stood still is not known."""
        self._robots.pop((policy, robot_id), None)
