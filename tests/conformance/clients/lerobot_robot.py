"""LeRobot's own asynchronous inference client, unmodified, on a stand-in robot. Prints JSON."""

import json
import sys
import threading
import time

import numpy as np
from lerobot.async_inference import robot_client
from lerobot.async_inference.configs import RobotClientConfig
from lerobot.robots import RobotConfig

STEPS = 25


class Arm:
    """A robot of two motors and two cameras that remembers what it was told."""

    name = "arm"

    def __init__(self):
        self.observation_features = {"a.pos": float, "b.pos": float}
        self.observation_features |= {"image": (16, 24, 3), "wrist_image": (16, 24, 3)}
        self.action_features = dict.fromkeys(("x", "y", "image_mean", "wrist_mean", "words", "row"), float)
        self.done = []

    def connect(self):
        pass

    def disconnect(self):
        pass

    def get_observation(self):
        return {
            "a.pos": 1.5,
            "b.pos": np.float32(2.5),
            "image": np.full((16, 24, 3), 30, np.uint8),
            "wrist_image": np.full((16, 24, 3), 40, np.uint8),
        }

    def send_action(self, action):
        self.done.append(action)
        return action


class ArmConfig(RobotConfig):
    pass


def run(address, model, actions_per_chunk="8"):
    arm = Arm()
    robot_client.make_robot_from_config = lambda config: arm
    client = robot_client.RobotClient(
        RobotClientConfig(
            policy_type="pi05",
            pretrained_name_or_path=model,
            robot=ArmConfig(id="arm"),
            actions_per_chunk=int(actions_per_chunk),
            task="go",
            server_address=address,
            policy_device="cuda",
            fps=20,
        )
    )
    if not client.start():
        return {"started": False}
    chunks = []
    take = client._aggregate_action_queues

    def noted(actions, function=None):
        chunks.append([action.get_timestep() for action in actions])
        take(actions, function)

    client._aggregate_action_queues = noted
    threads = [
        threading.Thread(target=client.receive_actions, daemon=True),
        threading.Thread(target=client.control_loop, args=("go",), daemon=True),
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while len(arm.done) < STEPS and time.monotonic() < end:
        time.sleep(0.05)
    client.shutdown_event.set()
    threads[1].join(5)
    return {"started": True, "done": arm.done[:STEPS], "chunks": chunks}


if __name__ == "__main__":
    address, models = sys.argv[1:]
    print(json.dumps([run(address, model) for model in models.split(",")]), flush=True)
