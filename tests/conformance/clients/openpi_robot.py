"""A robot program on the published openpi client, unmodified. Runs in that package's environment; prints JSON."""

import contextlib
import json
import sys
import time

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy


def droid(prompt="go"):
    return {
        "observation/exterior_image_1_left": np.full((224, 224, 3), 10, np.uint8),
        "observation/wrist_image_left": np.full((224, 224, 3), 20, np.uint8),
        "observation/joint_position": np.arange(7, dtype=np.float64),
        "observation/gripper_position": np.array([0.5]),
        "prompt": prompt,
    }


def libero(prompt="go"):
    return {
        "observation/state": np.arange(8, dtype=np.float32),
        "observation/image": np.full((224, 224, 3), 30, np.uint8),
        "observation/wrist_image": np.full((224, 224, 3), 40, np.uint8),
        "prompt": prompt,
    }


def aloha(prompt="go"):
    names = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")
    return {
        "state": np.arange(14, dtype=np.float64),
        "images": {name: np.full((3, 224, 224), 50 + 10 * i, np.uint8) for i, name in enumerate(names)},
        "prompt": prompt,
    }


OBSERVATIONS = {"droid": droid, "libero": libero, "aloha": aloha}


def connect(where, **options):
    if where.startswith("ws"):
        return WebsocketClientPolicy(host=where, **options)
    host, port = where.split(":")
    return WebsocketClientPolicy(host=host, port=int(port), **options)


def describe(result):
    return {
        "shape": result["actions"].shape,
        "dtype": str(result["actions"].dtype),
        "first": result["actions"][0].tolist(),
        "server_timing": result["server_timing"],
        "policy_timing": result["policy_timing"],
        "arrays": [key for key, value in result.items() if isinstance(value, np.ndarray)],
    }


def act(where, kind, count="1"):
    policy = connect(where, api_key="secret-key-1")
    answers = [describe(policy.infer(OBSERVATIONS[kind]())) for _ in range(int(count))]
    policy.reset()
    return {"metadata": policy.get_server_metadata(), "answers": answers}


def broker(where, steps):
    policy = ActionChunkBroker(connect(where), action_horizon=10)
    return [policy.infer(libero())["actions"].tolist() for _ in range(int(steps))]


def errors(where):
    policy = connect(where)
    bad = libero()
    del bad["observation/wrist_image"]
    said = []
    for observation in (
        bad,
        {**libero(), "observation/state": np.full(8, np.nan)},
        libero("fail"),
        libero("item-error"),
    ):
        try:
            policy.infer(observation)
            said.append(None)
        except RuntimeError as error:
            said.append(str(error))
    return {"said": said, "after": describe(policy.infer(libero("fine")))["first"]}


def gives_up(where):
    """Stops waiting for an answer, then asks again on the same connection, as impatient robot programs do."""
    policy = connect(where)
    policy._ws.send(policy._packer.pack(libero("slow 800")))
    with contextlib.suppress(TimeoutError):
        policy._ws.recv(timeout=0.1)
    try:
        answer = policy.infer(libero("a different instruction"))
        return {"answer": describe(answer)["first"]}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


def waits(where):
    began = time.monotonic()
    policy = connect(where)
    return {"waited_s": time.monotonic() - began, "first": describe(policy.infer(libero()))["first"]}


def many(where, count):
    policy = connect(where)
    times = []
    for _ in range(int(count)):
        began = time.perf_counter()
        policy.infer(libero())
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    print(json.dumps(globals()[scenario](*arguments)))
