"""Bytes a request of the timed stream against stateless POSTs, on recorded camera sequences.

python -m benchmarks.gateway.stream_bytes [--episodes N] [--output FILE]

Scene and wrist camera of the demo's arm, 84 x 84, JPEG as the fleet sends it. Each sequence is sent twice by the SDK
through a relay that counts every byte on TCP, headers and control frames included: once as POST .../act in msgpack,
once over the stream. What the stream saves depends on what the cameras see, so five sequences are measured:

- recorded: what an arm sent in closed loop with the demo's policy, byte by byte (recordings/arm-cameras.zip, made by
  `recorded_fleets cameras`); the others are rendered while the expert drives:
- moving: an observation every third control step while the arm moves, so that every camera changes every time;
- with rests: one every control step, through the rests between episodes, in which nothing changes. (A rendered camera
  at rest repeats itself to the bit. A real sensor does where it is asked faster than it delivers.);
- noisy: the same, of sensors with noise, so that no two frames are alike;
- planner: scene and a goal picture that stays for the episode, as a planner is asked.

`region_bytes` is what the images would take if only the bounding box of the 16 x 16 blocks that changed were sent as
JPEG: the saving that is left on the table, as the gateway would have to decode and paste pictures that it now passes on
as they are. How long both take: `benchmarks.gateway.overhead`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import taktline
from numpy.typing import NDArray

from benchmarks.gateway.processes import Deployment
from benchmarks.gateway.recorded import CAMERAS_FILE
from benchmarks.gateway.results import write_rows

STATE_DIM = 8
BUDGET_MS = 10_000.0
REST_STEPS = 20
REPLAN_STEPS = 3
SENSOR_NOISE = 1.5
"""Standard deviation of a pixel of 8 bit, as of a camera in a room."""
Pictures = dict[str, NDArray[np.uint8]]


@dataclasses.dataclass(frozen=True)
class Seen:
    """One observation of a recorded sequence."""

    frames: Pictures
    state: NDArray[np.float32]
    instruction: str


def recorded() -> tuple[list[Seen], dict[int, bytes]]:
    """What the arm of the recording sent, and the bytes of each frame by its `id`."""
    from taktline_demo.jpeg import decode_jpeg

    with zipfile.ZipFile(CAMERAS_FILE) as archive:
        told = json.loads(archive.read("sequence.json"))["sent"]
        encoded: dict[int, bytes] = {}
        sequence = []
        for number, about in enumerate(told):
            frames = {}
            for camera in ("scene", "wrist"):
                jpeg = archive.read(f"{number:03d}-{camera}.jpg")
                frames[camera] = decode_jpeg(jpeg)
                encoded[id(frames[camera])] = jpeg
            sequence.append(Seen(frames, np.asarray(about["state"], np.float32), about["instruction"]))
    return sequence, encoded


def rendered(episodes: int) -> dict[str, list[Seen]]:
    """The other sequences, rendered from the same episodes."""
    from taktline_demo.environment import ReachEnvironment
    from taktline_demo.expert import expert_chunk
    from taktline_demo.task import HORIZON

    environment = ReachEnvironment()
    sequences: dict[str, list[Seen]] = {"moving": [], "with rests": [], "noisy": [], "planner": []}
    noise = np.random.default_rng(1)
    for seed in range(episodes):
        environment.reset(seed)
        run: list[Seen] = []
        step = 0
        while not environment.outcome().done:
            chunk = expert_chunk(environment.state(), environment.target(environment.goal))
            for command in chunk[: HORIZON // 2]:
                run.append(Seen(environment.frames(), environment.state(), environment.instruction))
                environment.step(command)
                step += 1
                if environment.outcome().done:
                    break
        rest = run[-1]
        sequences["moving"] += run[::REPLAN_STEPS]
        sequences["with rests"] += [*run, *[rest] * REST_STEPS]
        sequences["noisy"] += [
            dataclasses.replace(seen, frames={name: _noisy(frame, noise) for name, frame in seen.frames.items()})
            for seen in (*run, *[rest] * REST_STEPS)
        ]
        goal = rest.frames["scene"]
        sequences["planner"] += [
            dataclasses.replace(seen, frames={"scene": seen.frames["scene"], "wrist": goal})
            for seen in run[::REPLAN_STEPS]
        ]
    environment.close()
    return sequences


def _noisy(frame: NDArray[np.uint8], noise: np.random.Generator) -> NDArray[np.uint8]:
    return (frame + noise.normal(0.0, SENSOR_NOISE, frame.shape)).round().clip(0, 255).astype(np.uint8)


class Counter:
    """A relay that counts the bytes of both directions."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._relays: set[asyncio.Task[None]] = set()
        self.up = self.down = 0

    async def serve(self) -> tuple[asyncio.Server, int]:
        """Starts it; its port."""
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return server, server.sockets[0].getsockname()[1]

    async def settled(self) -> None:
        """Returns when every connection has closed."""
        await asyncio.gather(*self._relays)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        there, to = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(self._copy(reader, to, "up"), self._copy(there, writer, "down"))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        while data := await reader.read(65536):
            setattr(self, way, getattr(self, way) + len(data))
            writer.write(data)
            await writer.drain()
        writer.close()


async def sent(
    port: int, name: str, sequence: list[Seen], transport: Literal["stream", "http"], encoded: dict[int, bytes]
) -> tuple[float, float]:
    """Bytes a request, up and down, of one sequence over one transport."""
    counter = Counter(port)
    server, relay = await counter.serve()
    async with taktline.AsyncRobot(f"http://127.0.0.1:{relay}", "noop", name, transport=transport) as robot:
        for seen in sequence:
            images = {
                camera: encoded[id(seen.frames[seen_as])]
                for camera, seen_as in (("front", "scene"), ("wrist", "wrist"))
            }
            state = np.zeros(STATE_DIM)
            state[: len(seen.state)] = seen.state
            await robot.act(images, state, seen.instruction, BUDGET_MS)
    await counter.settled()
    server.close()
    return counter.up / len(sequence), counter.down / len(sequence)


def region_bytes(sequence: list[Seen]) -> float:
    """Image bytes a request if only the box around what changed were sent, JPEG of the same quality."""
    from taktline_demo.jpeg import encode_jpeg

    total = 0
    before: Pictures = {}
    for seen in sequence:
        for camera, frame in seen.frames.items():
            box = _changed(before.get(camera), frame)
            if box is not None:
                total += len(encode_jpeg(np.ascontiguousarray(frame[box])))
        before = seen.frames
    return total / len(sequence)


def _changed(before: NDArray[np.uint8] | None, now: NDArray[np.uint8]) -> tuple[slice, slice] | None:
    if before is None:
        return slice(None), slice(None)
    ys, xs = np.nonzero((before != now).any(axis=2))
    if not len(ys):
        return None
    return (
        slice(ys.min() // 16 * 16, (ys.max() // 16 + 1) * 16),
        slice(xs.min() // 16 * 16, (xs.max() // 16 + 1) * 16),
    )


def measured_bytes(episodes: int) -> list[dict[str, object]]:
    """One row for each sequence; `episodes` of those that are rendered."""
    from taktline_demo.jpeg import encode_jpeg

    sent_then, encoded = recorded()
    sequences = {"recorded": sent_then, **rendered(episodes)}
    frames = {id(frame): frame for seq in sequences.values() for seen in seq for frame in seen.frames.values()}
    encoded |= {key: encode_jpeg(frame) for key, frame in frames.items() if key not in encoded}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder))
        try:
            deployment.write_routes([deployment.start_worker()])
            deployment.start_gateway("--log-level", "warning")
            deployment.until_ready(1)
            for name, sequence in sequences.items():
                post_up, post_down = asyncio.run(sent(deployment.port, f"{name} post", sequence, "http", encoded))
                up, down = asyncio.run(sent(deployment.port, f"{name} stream", sequence, "stream", encoded))
                images = np.mean([sum(len(encoded[id(f)]) for f in seen.frames.values()) for seen in sequence])
                rows.append(
                    {
                        "bench": "gateway-stream-bytes",
                        "policy": "noop",
                        "sequence": name,
                        "n": len(sequence),
                        "image_bytes": round(float(images)),
                        "region_bytes": round(region_bytes(sequence)),
                        "peer": "POST act, msgpack",
                        "peer_up_bytes": round(post_up),
                        "peer_down_bytes": round(post_down),
                        "up_bytes": round(up),
                        "down_bytes": round(down),
                        "ratio": round((post_up + post_down) / (up + down), 3),
                    }
                )
        finally:
            deployment.stop()
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=6, help="rendered episodes of each sequence")
    parser.add_argument("--output", type=Path, help="also write the rows as JSON")
    options = parser.parse_args()
    rows = measured_bytes(options.episodes)
    print(f"{'sequence':12} {'requests':>8} {'images':>8} {'POST':>8} {'stream':>8} {'ratio':>6} {'region':>8}   bytes")
    for row in rows:
        post = int(str(row["peer_up_bytes"])) + int(str(row["peer_down_bytes"]))
        stream = int(str(row["up_bytes"])) + int(str(row["down_bytes"]))
        print(
            f"{row['sequence']:12} {row['n']:8} {row['image_bytes']:8} {post:8} {stream:8} {row['ratio']:6}"
            f" {row['region_bytes']:8}"
        )
    if options.output is not None:
        names = ("taktline", "taktline-gateway", "uvicorn", "websockets", "httpx")
        versions = {name: version(name) for name in names}
        command = " ".join(["python -m benchmarks.gateway.stream_bytes", *sys.argv[1:]])
        write_rows(options.output, [{**row, "versions": versions} for row in rows], command)


if __name__ == "__main__":
    main()
