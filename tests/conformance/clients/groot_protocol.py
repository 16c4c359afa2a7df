"""A client written from the documented GR00T ZeroMQ protocol, in both array generations.

The real client is part of NVIDIA's repository and on no package index, so this stands in for it: REQ socket, 15 s
timeouts, msgpack maps. Runs in an environment of its own with pyzmq, msgpack and msgpack-numpy; prints JSON.
"""

import contextlib
import io
import json
import sys
import time

import msgpack
import msgpack_numpy
import numpy as np
import zmq


class NpyGeneration:
    """N1.6 and early N1.7: arrays as .npy bytes."""

    @staticmethod
    def pack(value):
        def encode(obj):
            if isinstance(obj, np.ndarray):
                file = io.BytesIO()
                np.save(file, obj, allow_pickle=False)
                return {"__ndarray_class__": True, "as_npy": file.getvalue()}
            raise TypeError(type(obj))

        return msgpack.packb(value, default=encode)

    @staticmethod
    def unpack(data):
        def decode(obj):
            if "__ModalityConfig_class__" in obj:
                return ["ModalityConfig", obj["as_json"]]
            if "__ndarray_class__" in obj:
                return np.load(io.BytesIO(obj["as_npy"]), allow_pickle=False)
            return obj

        return msgpack.unpackb(data, object_hook=decode)


class MsgpackNumpyGeneration:
    """Current N1.7: arrays in msgpack-numpy's layout."""

    @staticmethod
    def pack(value):
        return msgpack.packb(value, default=msgpack_numpy.encode)

    @staticmethod
    def unpack(data):
        def decode(obj):
            if "__ModalityConfig__" in obj:
                return ["ModalityConfig", obj["as_json"]]
            return msgpack_numpy.decode(obj)

        return msgpack.unpackb(data, object_hook=decode, raw=False)


GENERATIONS = {"npy": NpyGeneration, "msgpack-numpy": MsgpackNumpyGeneration}


class Client:
    def __init__(self, port, generation, token=None):
        self.codec = GENERATIONS[generation]
        self.token = token
        self.socket = zmq.Context.instance().socket(zmq.REQ)
        self.socket.setsockopt(zmq.RCVTIMEO, 15000)
        self.socket.setsockopt(zmq.SNDTIMEO, 15000)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def call(self, endpoint, data=None, requires_input=True):
        request = {"endpoint": endpoint}
        if requires_input:
            request["data"] = data
        if self.token:
            request["api_token"] = self.token
        self.socket.send(self.codec.pack(request))
        response = self.codec.unpack(self.socket.recv())
        if isinstance(response, dict) and "error" in response:
            raise RuntimeError(f"Server error: {response['error']}")
        return response

    def get_action(self, observation, options=None):
        return tuple(self.call("get_action", {"observation": observation, "options": options}))


def nested(batch=1, text="go"):
    return {
        "video": {
            "ego_view": np.full((batch, 1, 16, 16, 3), 30, np.uint8),
            "wrist": np.full((batch, 1, 16, 16, 3), 40, np.uint8),
        },
        "state": {
            "arm": np.arange(batch * 6, dtype=np.float32).reshape(batch, 1, 6),
            "hand": np.full((batch, 1, 2), 9, np.float32),
        },
        "language": {"annotation.human.task_description": [[text]] * batch},
    }


def flat(batch=1, text="go"):
    return {
        **{f"video.{key}": value for key, value in nested(batch)["video"].items()},
        **{f"state.{key}": value for key, value in nested(batch)["state"].items()},
        "annotation.human.coarse_action": [text] * batch,
    }


def described(action):
    return {key: {"shape": a.shape, "dtype": str(a.dtype), "first": a[:, 0].tolist()} for key, a in action.items()}


def talk(port, generation):
    client = Client(port, generation)
    answers = {}
    for name, observation in (("nested", nested()), ("flat", flat()), ("batch", nested(3))):
        action, info = client.get_action(observation)
        answers[name] = {"action": described(action), "info": info}
    return {
        "ping": client.call("ping", requires_input=False),
        "config": client.call("get_modality_config", requires_input=False),
        "reset": client.call("reset", {"options": None}),
        "answers": answers,
    }


def options(port, generation):
    client = Client(port, generation)
    asked = {"rtc_overlap_steps": 6, "rtc_frozen_steps": 2, "action_horizon": 10}
    said = {}
    for name in ("first", "next"):
        action, info = client.get_action(nested(2), asked)
        said[name] = [info["rtc"], action["hand"][:, 0, 0].tolist()]
    said["plain"] = "rtc" in client.get_action(nested(2))[1]
    client.call("reset", {"options": None})
    said["after a reset"] = client.get_action(nested(2), asked)[1]["rtc"]
    said["refused"] = []
    for endpoint, sent in (
        ("get_action", asked | {"rtc_ramp_rate": 6.0}),
        ("get_action", {"denoising_steps": 8}),
        ("get_action", asked | {"rtc_overlap_steps": 11}),
        ("get_action", [1]),
        ("reset", {"episode_index": 3}),
    ):
        try:
            client.call(endpoint, {"observation": nested(2), "options": sent})
            said["refused"].append(None)
        except RuntimeError as error:
            said["refused"].append(str(error))
    return said


def errors(port, generation):
    client = Client(port, generation)
    two_frames = nested()
    two_frames["video"]["wrist"] = np.zeros((1, 2, 16, 16, 3), np.uint8)
    uneven = nested()
    uneven["state"]["hand"] = np.zeros((2, 1, 2), np.float32)
    no_wrist = nested()
    del no_wrist["video"]["wrist"]
    said = []
    calls = [
        ("kill", None),
        ("shutdown", None),
        ("get_action", {"observation": two_frames}),
        ("get_action", {"observation": uneven}),
        ("get_action", {"observation": no_wrist}),
        ("get_action", {"observation": nested(65)}),
        ("get_action", {"observation": nested(text="fail")}),
        ("get_action", {"observation": None}),
        ("get_action", "text"),
    ]
    for endpoint, data in calls:
        try:
            client.call(endpoint, data)
            said.append(None)
        except RuntimeError as error:
            said.append(str(error))
    for raw in (
        b"",
        b"\xc1",
        b"ERROR",
        msgpack.packb([1]),
        msgpack.packb(np.array([{}]), default=msgpack_numpy.encode),
    ):
        client.socket.send(raw)
        said.append(msgpack.unpackb(client.socket.recv())["error"])
    return {"said": said, "after": described(client.get_action(nested())[0])}


def tokens(port, generation, token):
    said = []
    for sent in (None, "wrong", token):
        try:
            said.append(Client(port, generation, sent).call("ping", requires_input=False))
        except RuntimeError as error:
            said.append(str(error))
    return said


def beside(port, generation):
    """Two clients at once: the slow one's request does not hold the other's back."""
    slow, quick = Client(port, generation), Client(port, generation)
    slow.socket.send(slow.codec.pack({"endpoint": "get_action", "data": {"observation": nested(text="slow 3000")}}))
    began = time.monotonic()
    quick.call("ping", requires_input=False)
    first = quick.get_action(nested(text="slow 1"))[0]
    quick_s = time.monotonic() - began
    slow.codec.unpack(slow.socket.recv())
    return {"quick_s": quick_s, "slow_s": time.monotonic() - began, "quick": described(first)}


def gives_up(port, generation):
    """A REQ socket that is allowed to ask again: the late answer must not be taken for the new one's."""
    client = Client(port, generation)
    client.socket.setsockopt(zmq.REQ_RELAXED, 1)
    client.socket.setsockopt(zmq.RCVTIMEO, 200)
    client.socket.send(client.codec.pack({"data": {"observation": nested(text="slow 800")}}))
    with contextlib.suppress(zmq.Again):
        client.socket.recv()
    client.socket.setsockopt(zmq.RCVTIMEO, 15000)
    return described(client.get_action(nested(text="a different instruction"))[0])


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    print(json.dumps(globals()[scenario](*arguments)))
