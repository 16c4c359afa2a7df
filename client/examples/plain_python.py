"""A control loop in plain Python: executes the chunk it has while the next one is on its way.

    python plain_python.py --url http://127.0.0.1:8080 --policy demo-reach --seconds 5

Cameras and arm are stand-ins; put your own in place of the two marked functions.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import taktline
from numpy.typing import NDArray


def read_cameras(names: tuple[str, ...], step: int) -> dict[str, NDArray[np.uint8]]:
    """Stand-in: uint8 RGB (84, 84, 3) of each camera; the first one moves, the others show the same all the time."""
    frames = {name: np.full((84, 84, 3), 90, np.uint8) for name in names}
    frames[names[0]][:, step % 84] = 255
    return frames


def move(joints: NDArray[np.float64], action: NDArray[np.float32]) -> NDArray[np.float64]:
    """Stand-in: an arm that goes a tenth of the way towards its command."""
    width = min(len(joints), len(action))
    joints[:width] += 0.1 * (action[:width] - joints[:width])
    return joints


def main() -> None:
    """Runs for some seconds and prints what happened as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--policy", default="demo-reach")
    parser.add_argument("--robot-id", default="plain-1")
    parser.add_argument("--task", default="reach the red block")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--wait", type=float, default=60.0, help="seconds for gateway and worker to come up")
    parser.add_argument("--jpeg-quality", type=int, help="send JPEG instead of raw pixels (needs taktline[jpeg])")
    options = parser.parse_args()

    robot = taktline.Robot(options.url, options.policy, options.robot_id, jpeg_quality=options.jpeg_quality)
    with robot:
        info = robot.info(wait_s=options.wait)  # the robot may be started first
        player = taktline.Player(robot.ask, info.dt_s, replan_rows=max(1, info.horizon // 2), rtc=bool(info.rtc))
        joints = np.zeros(info.state_dim)
        steps = moved = 0
        next_tick = time.monotonic()
        end = next_tick + options.seconds
        while next_tick < end:
            if player.wants_observation():
                player.observe(read_cameras(info.cameras, steps), joints, options.task)
            action = player.next_action()
            if action is not None:  # else hold: nothing has come yet, or the buffer ran dry
                joints = move(joints, action)
                moved += 1
            steps += 1
            next_tick = max(next_tick + info.dt_s, time.monotonic())  # what a stall missed is not made up for
            time.sleep(max(0.0, next_tick - time.monotonic()))
        print(json.dumps({"steps": steps, "moved": moved, **player.metrics(), "client": robot.metrics.as_dict()}))


if __name__ == "__main__":
    try:
        main()
    except taktline.TaktlineError as error:
        raise SystemExit(f"{error}") from None
