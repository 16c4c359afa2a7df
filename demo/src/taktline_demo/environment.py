"""The reach task: three coloured blocks at random places, and an instruction that names the one to go to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taktline_demo.arm import BLOCK_HALF, CAMERAS, COLOURS, JOINTS, PHYSICS_STEP_S, workcell_xml
from taktline_demo.kinematics import JOINT_HIGH, JOINT_LOW, joints_for_tip
from taktline_demo.rendering import Cameras, mujoco
from taktline_demo.task import CONTROL_PERIOD_S, DWELL_STEPS, FRAME_PIXELS, HOVER, INSTRUCTIONS, MAX_STEPS, REACH_RADIUS

_RADIUS_RANGE = (0.20, 0.36)
_YAW_RANGE = (-1.05, 1.05)
_MIN_SEPARATION = 0.10


@dataclass(frozen=True)
class Outcome:
    """How an episode stands.

    Attributes:
        reached: colour of the first block at which the tip dwelt, None so far.
        success: `reached` is the block of the instruction.
        done: a block was reached or the time is over.
        steps: control steps taken.
    """

    reached: str | None
    success: bool
    done: bool
    steps: int


class ReachEnvironment:
    """One workcell. Every random choice of an episode comes from its seed, so equal seeds give equal episodes."""

    def __init__(self, pixels: int = FRAME_PIXELS) -> None:
        """`pixels` is the edge of the camera frames; the cameras open at the first `frames` call."""
        self._model = mujoco.MjModel.from_xml_string(workcell_xml())
        self._data = mujoco.MjData(self._model)
        self._pixels = pixels
        self._cameras: Cameras | None = None
        self._arm = slice(0, len(JOINTS))
        self._block_addresses = {name: int(self._model.jnt_qposadr[self._model.joint(name).id]) for name in COLOURS}
        self._tip = self._model.site("tip").id
        self._substeps = round(CONTROL_PERIOD_S / PHYSICS_STEP_S)
        self.goal = COLOURS[0]
        self.instruction = ""
        self._dwell = dict.fromkeys(COLOURS, 0)
        self._steps = 0
        self._reached: str | None = None

    def reset(self, seed: int, goal: str | None = None) -> None:
        """Starts episode `seed`: block places and turns, the arm's start, the goal and the words of the instruction.

        A given `goal` replaces the drawn one and changes nothing else, so that the same layout can be asked for
        another block. Raises ValueError for a goal that is no block.
        """
        if goal is not None and goal not in COLOURS:
            raise ValueError(f"goal {goal!r} is not one of {', '.join(COLOURS)}")
        rng = np.random.default_rng(seed)
        mujoco.mj_resetData(self._model, self._data)
        for name, place in zip(COLOURS, _draw_places(rng), strict=True):
            self._place_block(name, place, rng.uniform(-math.pi / 4, math.pi / 4))
        radius, yaw = rng.uniform(0.18, 0.32), rng.uniform(-0.9, 0.9)
        start = joints_for_tip(np.array([radius * math.cos(yaw), radius * math.sin(yaw), rng.uniform(0.14, 0.22)]))
        start = np.clip(start + rng.normal(0.0, 0.05, len(JOINTS)), JOINT_LOW, JOINT_HIGH)
        self._data.qpos[self._arm] = start
        self._data.ctrl[:] = start
        drawn = COLOURS[int(rng.integers(len(COLOURS)))]
        self.goal = goal or drawn
        self.instruction = INSTRUCTIONS[int(rng.integers(len(INSTRUCTIONS)))].format(self.goal)
        mujoco.mj_forward(self._model, self._data)
        self._dwell = dict.fromkeys(COLOURS, 0)
        self._steps = 0
        self._reached = None

    def _place_block(self, name: str, place: NDArray[np.float64], turn: float) -> None:
        address = self._block_addresses[name]
        self._data.qpos[address : address + 3] = [place[0], place[1], BLOCK_HALF]
        self._data.qpos[address + 3 : address + 7] = [math.cos(turn / 2), 0.0, 0.0, math.sin(turn / 2)]

    def step(self, command: NDArray[np.floating]) -> Outcome:
        """Holds the joint targets `command` (rad, shape (4,), cut to the joint limits) for one control period."""
        self._data.ctrl[:] = np.clip(command, JOINT_LOW, JOINT_HIGH)
        mujoco.mj_step(self._model, self._data, self._substeps)
        self._steps += 1
        for name in COLOURS:
            near = float(np.linalg.norm(self.tip() - self.target(name))) <= REACH_RADIUS
            self._dwell[name] = self._dwell[name] + 1 if near else 0
            if self._dwell[name] >= DWELL_STEPS and self._reached is None:
                self._reached = name
        return self.outcome()

    def outcome(self) -> Outcome:
        """How the episode stands now."""
        done = self._reached is not None or self._steps >= MAX_STEPS
        return Outcome(self._reached, self._reached == self.goal, done, self._steps)

    def state(self) -> NDArray[np.float32]:
        """Measured joint angles, rad, float32, shape (4,): what the robot reports."""
        return np.asarray(self._data.qpos[self._arm], np.float32)

    def tip(self) -> NDArray[np.float64]:
        """Position of the tool tip, m, shape (3,)."""
        return np.array(self._data.site_xpos[self._tip])

    def target(self, colour: str) -> NDArray[np.float64]:
        """The point to reach above the block of that colour, m, shape (3,)."""
        address = self._block_addresses[colour]
        return np.asarray(self._data.qpos[address : address + 3] + np.array([0.0, 0.0, HOVER]))

    def frames(self) -> dict[str, NDArray[np.uint8]]:
        """What the cameras see: camera name -> uint8 RGB, shape (pixels, pixels, 3)."""
        if self._cameras is None:
            self._cameras = Cameras(self._model, self._pixels)
        return self._cameras.frames(self._data, CAMERAS)

    def picture(self, pixels: int) -> NDArray[np.uint8]:
        """The scene camera's view, uint8 RGB, shape (pixels, pixels, 3); for people, not for the policy."""
        cameras = Cameras(self._model, pixels)
        try:
            return cameras.frames(self._data, ("scene",))["scene"]
        finally:
            cameras.close()

    def close(self) -> None:
        """Frees the cameras."""
        if self._cameras is not None:
            self._cameras.close()
            self._cameras = None


def _draw_places(rng: np.random.Generator) -> list[NDArray[np.float64]]:
    """Three block places on the table in the arm's reach, m, at least `_MIN_SEPARATION` apart."""
    places: list[NDArray[np.float64]] = []
    while len(places) < len(COLOURS):
        radius, yaw = rng.uniform(*_RADIUS_RANGE), rng.uniform(*_YAW_RANGE)
        place = np.array([radius * math.cos(yaw), radius * math.sin(yaw)])
        if all(np.linalg.norm(place - other) >= _MIN_SEPARATION for other in places):
            places.append(place)
    return places
