"""The shape of a ROS 2 node: topics bring images and joints whenever they come, a timer commands at the control rate.

    python ros2_loop.py --url http://127.0.0.1:8080 --policy demo-reach --seconds 5

`ChunkController` knows no ROS: its callbacks take what messages hold, and `publish` is any function. With rclpy, wire
it like this (cv_bridge or `np.frombuffer` makes the arrays):

    node.create_subscription(Image, "/camera/image_raw", lambda m: controller.on_image("scene", to_rgb(m)), 1)
    node.create_subscription(JointState, "/joint_states", lambda m: controller.on_joints(m.position), 1)
    node.create_timer(controller.period_s, controller.on_timer)
    publish = lambda action: publisher.publish(Float64MultiArray(data=action.tolist()))

Nothing in a callback waits for the network, so a single-threaded executor will do. So that this file runs without ROS,
`main` brings the messages itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import taktline
from numpy.typing import NDArray


class ChunkController:
    """Keeps the newest message of each topic, and turns them into commands at each tick."""

    def __init__(self, robot: taktline.Robot, task: str, publish: Callable[[NDArray[np.float32]], None]) -> None:
        info = robot.info(wait_s=60)
        self.period_s = info.dt_s
        self._cameras = info.cameras
        self._task = task
        self._publish = publish
        self._frames: dict[str, NDArray[np.uint8]] = {}
        self._came_at: dict[str, float] = {}
        self._joints: list[float] | None = None
        self._joints_at = 0.0
        self.player = taktline.Player(
            robot.ask, info.dt_s, replan_rows=max(1, info.horizon // 4), rtc=bool(info.rtc), in_flight=2
        )

    def on_image(self, camera: str, frame: NDArray[np.uint8]) -> None:
        """A camera's newest frame, uint8 RGB (height, width, 3)."""
        self._frames[camera] = frame
        self._came_at[camera] = time.monotonic()

    def on_joints(self, positions: Sequence[float]) -> None:
        """The newest joint positions."""
        self._joints = list(positions)
        self._joints_at = time.monotonic()

    def on_timer(self) -> None:
        """One control period. Raises TaktlineError where the node is set up wrongly."""
        complete = self._joints is not None and all(camera in self._frames for camera in self._cameras)
        if complete and self.player.wants_observation():
            frames = {camera: self._frames[camera] for camera in self._cameras}
            # As old as its oldest message: where a topic goes silent, the robot comes to a stand (Player.observe).
            oldest = min(self._joints_at, *(self._came_at[camera] for camera in self._cameras))
            self.player.observe(frames, self._joints or [], self._task, captured_at=oldest)
        action = self.player.next_action()
        if action is not None:
            self._publish(action)


def main() -> None:
    """Spins the controller without ROS and prints what happened as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--policy", default="demo-reach")
    parser.add_argument("--robot-id", default="ros-1")
    parser.add_argument("--task", default="reach the red block")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--wait", type=float, default=60.0, help="seconds for gateway and worker to come up")
    options = parser.parse_args()
    commands: list[Any] = []
    with taktline.Robot(options.url, options.policy, options.robot_id) as robot:
        info = robot.info(wait_s=options.wait)  # the robot may be started first
        controller = ChunkController(robot, options.task, commands.append)
        began = next_tick = time.monotonic()
        while time.monotonic() - began < options.seconds:
            # A 10 Hz camera: some frames are sent more than once, the second time as a reference.
            shade = int(10 * (time.monotonic() - began)) % 256
            for camera in info.cameras:
                controller.on_image(camera, np.full((64, 64, 3), shade, np.uint8))
            controller.on_joints([0.0] * info.state_dim)
            controller.on_timer()
            next_tick = max(next_tick + controller.period_s, time.monotonic())  # nor does a timer of ROS make up
            time.sleep(max(0.0, next_tick - time.monotonic()))
        print(json.dumps({"moved": len(commands), **controller.player.metrics(), "client": robot.metrics.as_dict()}))


if __name__ == "__main__":
    try:
        main()
    except taktline.TaktlineError as error:
        raise SystemExit(f"{error}") from None
