"""Drives a LeRobot robot with a policy behind a Taktline gateway.

    python lerobot_robot.py --url http://127.0.0.1:8080 --policy my-policy --task "pick up the cube" --seconds 5

`drive` works with any LeRobot `Robot`: it reads `observation_features`, `action_features`, `get_observation` and
`send_action`, nothing else. So that this file runs anywhere, `PretendArm` has the same four; with hardware, make yours
instead, for example:

    from lerobot.robots.so101_follower import SO101Follower, SO101FollowerConfig
    arm = SO101Follower(SO101FollowerConfig(port="/dev/ttyACM0", cameras={...}))
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Protocol

import numpy as np
import taktline


class LeRobotArm(Protocol):
    """The part of LeRobot's Robot that is used here."""

    observation_features: dict[str, Any]
    """Name -> float for a joint, or (height, width, 3) for a camera."""
    action_features: dict[str, Any]

    def connect(self) -> None:
        """Opens ports and cameras."""

    def get_observation(self) -> dict[str, Any]:
        """Joint positions as floats, camera frames as uint8 (height, width, 3)."""

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        """Commands joint positions."""

    def disconnect(self) -> None:
        """Closes ports and cameras."""


class PretendArm:
    """An arm without hardware that follows its commands at once."""

    def __init__(self, joints: int, commands: int, cameras: tuple[str, ...]) -> None:
        self.observation_features = {f"joint_{i}.pos": float for i in range(joints)} | dict.fromkeys(
            cameras, (96, 96, 3)
        )
        self.action_features = {f"joint_{i}.pos": float for i in range(commands)}
        self._positions = dict.fromkeys(self.action_features, 0.0)

    def connect(self) -> None:
        """Nothing to open."""

    def get_observation(self) -> dict[str, Any]:
        """What the features say."""
        made: dict[str, Any] = {}
        for name, feature in self.observation_features.items():
            made[name] = np.zeros(feature, np.uint8) if isinstance(feature, tuple) else self._positions.get(name, 0.0)
        return made

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        """Follows at once."""
        self._positions.update(action)
        return action

    def disconnect(self) -> None:
        """Nothing to close."""


def drive(arm: LeRobotArm, robot: taktline.Robot, task: str, seconds: float) -> dict[str, Any]:
    """Runs the control loop; the state vector has the joints in the order of `observation_features`."""
    info = robot.info()
    joints = [name for name, feature in arm.observation_features.items() if not isinstance(feature, tuple)]
    commands = list(arm.action_features)
    if len(commands) != info.action_dim:
        raise SystemExit(f"policy {robot.policy} commands {info.action_dim} joints, this arm has {', '.join(commands)}")
    player = taktline.Player(
        robot.ask,
        info.dt_s,
        replan_rows=max(1, info.horizon // 2),
        rtc=bool(info.rtc),
        # Chunks of policies without real-time chunking are blended where they overlap.
        ensemble=None if info.rtc else 0.01,
    )
    moved = 0
    next_tick = time.monotonic()
    end = next_tick + seconds
    while next_tick < end:
        if player.wants_observation():
            captured_at = time.monotonic()
            seen = arm.get_observation()
            frames = {name: seen[name] for name in (*info.cameras, *info.optional_cameras) if name in seen}
            player.observe(frames, [seen[name] for name in joints], task, captured_at=captured_at)
        action = player.next_action()
        if action is not None:
            arm.send_action(dict(zip(commands, action.tolist(), strict=True)))
            moved += 1
        next_tick = max(next_tick + info.dt_s, time.monotonic())  # what a stall missed is not made up for
        time.sleep(max(0.0, next_tick - time.monotonic()))
    return {"moved": moved, **player.metrics(), "client": robot.metrics.as_dict()}


def main() -> None:
    """Drives the pretend arm and prints what happened as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--policy", default="demo-reach")
    parser.add_argument("--robot-id", default="lerobot-1")
    parser.add_argument("--task", default="pick up the cube")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--wait", type=float, default=60.0, help="seconds for gateway and worker to come up")
    options = parser.parse_args()
    with taktline.Robot(options.url, options.policy, options.robot_id, jpeg_quality=95) as robot:
        info = robot.info(wait_s=options.wait)  # the robot may be started first
        arm = PretendArm(info.state_dim, info.action_dim, info.cameras)
        arm.connect()
        try:
            print(json.dumps(drive(arm, robot, options.task, options.seconds)))
        finally:
            arm.disconnect()


if __name__ == "__main__":
    try:
        main()
    except taktline.TaktlineError as error:
        raise SystemExit(f"{error}") from None
