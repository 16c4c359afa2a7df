"""A planner on Ray Serve beside one process: the same plans to the last bit, and what Ray adds to a round.

    python benchmarks/planner_ray.py ENGINE_JSON [--replicas N] [--plans N] [--kill] [--out FILE]

Needs `taktline-worker[ray]`. Ray's share of a round is the Planner's time from the first call to the last reply, less
the slowest replica's own. With --kill one replica is killed in the middle of a plan, once the others are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import torch
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_protocol.deployment import EngineConfig, SearchOptions
from taktline_worker.models.vjepa2_ac.adapter import load
from taktline_worker.models.vjepa2_ac.config import POSE_WIDTH
from taktline_worker.observation import EncodedImage, RobotInput, SearchInput
from taktline_worker.ray.__main__ import RayStartError, end, run

POSE = np.array([0.4, 0.1, 0.3, 3.1, 0.05, -0.4, 0.2], np.float32)
assert len(POSE) == POSE_WIDTH
BUSY = 75
"""Exit status where Ray's own processes found no time to start, within a limit that Ray does not let one change."""


class Asker:
    """One observation's plan, by gRPC as a gateway asks for it, or of an adapter in this process."""

    def __init__(self, config: EngineConfig, port: int, side: int) -> None:
        self._config = config
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        frames = np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
        names = dict(zip(("camera", "goal"), frames, strict=True))
        self._images = {self._robot_name(key): frame for key, frame in names.items()}

    def _robot_name(self, key: str) -> str:
        return next((name for name, value in self._config.model.cameras.items() if value == key), key)

    def by_rpc(self, seed: int, rounds: int | None = None, budget_ms: float = 0.0) -> tuple[bytes, bytes, str]:
        """Actions and energies as bytes, or the code of the error."""
        item = worker_pb2.InferItem(
            request_id=f"plan-{seed}",
            robot_id="arm",
            images={
                name: worker_pb2.Image(encoding="raw", shape=frame.shape, data=frame.tobytes())
                for name, frame in self._images.items()
            },
            state=worker_pb2.Tensor(dtype="float32", shape=POSE.shape, data=POSE.tobytes()),
            instruction="reach the goal image",
            seed=seed,
            budget_ms=budget_ms,
        )
        if rounds is not None:
            item.search.rounds = rounds
        request = worker_pb2.InferRequest(policy=self._config.policy, items=[item])
        (result,) = self._stub.Infer(request, timeout=300).results
        return result.actions.data, result.plan.energies.data, result.error.code

    def here(self, adapter: Any, pool: Any, seed: int, rounds: int | None = None) -> tuple[bytes, bytes, str]:
        """The same of this process alone."""
        images = {name: EncodedImage("raw", frame.tobytes(), frame.shape) for name, frame in self._images.items()}
        search = None if rounds is None else SearchInput(rounds=rounds)
        observation = RobotInput(images, POSE, "reach the goal image", seed=seed, search=search)
        row = adapter.begin(observation, pool).result()
        (chunk,) = adapter.finish([row], adapter.run([row], 1))
        return chunk.actions.tobytes(), chunk.energies.tobytes(), ""

    def close(self) -> None:
        """Ends the channel."""
        self._channel.close()


def timed(
    ask: Callable[[int], tuple[bytes, bytes, str]], plans: int
) -> tuple[list[tuple[bytes, bytes, str]], list[float]]:
    """Plans of the seeds 0, 1, ..., and the milliseconds of each."""
    found, times = [], []
    for seed in range(plans):
        began = time.perf_counter()
        found.append(ask(seed))
        times.append(1000 * (time.perf_counter() - began))
    return found, times


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Starts the application, compares and times its plans, and takes it down."""
    from concurrent.futures import ThreadPoolExecutor

    config = msgspec.json.decode(options.config.read_bytes(), type=EngineConfig)
    alone = msgspec.structs.replace(config.engine.parallel, search=1)
    adapter = load(msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, parallel=alone)))
    handle = run(options)
    found: dict[str, Any] = {}
    try:
        asker = Asker(config, handle.report.remote().result()["port"], adapter.processor.image_size)
        with ThreadPoolExecutor(2) as pool:
            expected, alone_ms = timed(lambda seed: asker.here(adapter, pool, seed), options.plans)
            before = len(handle.report.remote().result()["rounds"])
            plans, found["plan_times_ms"] = timed(asker.by_rpc, options.plans)
            found["alone_ms"] = statistics.median(alone_ms)
            rounds = handle.report.remote().result()["rounds"][before:]
            found |= {
                "equal": plans == expected,
                "rounds": len(rounds),
                "round_ms": 1000 * statistics.median(seconds for seconds, _, _ in rounds),
                "ray_ms": 1000 * statistics.median(seconds - scoring for seconds, scoring, _ in rounds),
                "rounds_with_a_replica_asked_twice": sum(len(set(who)) < len(who) for _, _, who in rounds),
                "replicas": len({one for _, _, who in rounds for one in who}),
            }
            if options.kill:
                found |= kill(asker, adapter, pool, handle)
        asker.close()
    finally:
        end()
    return found


def kill(asker: Asker, adapter: Any, pool: Any, handle: Any) -> dict[str, Any]:
    """A plan that loses a replica, one of a budget that is over before anybody can answer, and the plans after."""
    seed, rounds = 77, 24
    expected = asker.here(adapter, pool, seed, rounds)
    victim = handle.report.remote().result()["rounds"][-1][2][0]
    answers: list[tuple[bytes, bytes, str]] = []
    thread = threading.Thread(target=lambda: answers.append(asker.by_rpc(seed, rounds)))
    known = len(handle.report.remote().result()["rounds"])
    thread.start()
    ends = time.monotonic() + 120
    while len(handle.report.remote().result()["rounds"]) < known + 2 and time.monotonic() < ends:
        time.sleep(0.01)
    os.kill(int(victim), signal.SIGKILL)
    thread.join()
    spans = handle.report.remote().result()["rounds"][known:]
    while time.monotonic() < ends:
        after = asker.by_rpc(seed, rounds)
        scorers = set(handle.report.remote().result()["rounds"][-1][2])
        if victim not in scorers and len(scorers) > 1:
            break
    return {
        "equal_with_a_replica_lost": answers == [expected],
        "victim_took_part": victim in {one for _, _, who in spans[:2] for one in who},
        "victim_was_lost_in_the_plan": victim not in spans[-1][2],
        "replicas_after": len(scorers),
        "equal_after": after == expected,
        "code_of_a_budget_too_short": asker.by_rpc(seed, rounds, budget_ms=0.01)[2],
    }


def main() -> int:
    """Prints the figures as JSON, the last line of the output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="engine.json of a planner")
    parser.add_argument("--replicas", type=int, default=0, help="WorldModels (default: engine.parallel.search)")
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--kill", action="store_true", help="also kill a replica in the middle of a plan")
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--object-store-mb", type=int, default=256)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.metrics_listen, options.linger_s, options.log_level = "", 0.0, "WARNING"
    try:
        found = measure(options)
    except RayStartError as error:
        print(error, file=sys.stderr)
        return BUSY
    row = as_row(found, msgspec.json.decode(options.config.read_bytes(), type=EngineConfig))
    if options.out:
        options.out.write_text(json.dumps([row], indent=1) + "\n")
    print(json.dumps(row))
    return 0


def as_row(found: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """One line of the results, in the form that all benchmarks share; the peer is this process alone."""
    search = config.engine.search or SearchOptions()
    details = found | {"load_average": os.getloadavg()[0], "cores": os.cpu_count()}
    times = details.pop("plan_times_ms")
    return {
        "bench": "planner-ray",
        "policy": "vjepa2-ac",
        "shape": {name: getattr(search, name) for name in ("candidates", "rounds", "elites", "horizon")},
        "batch": 1,
        "dtype": config.engine.precision,
        "gpus": torch.cuda.device_count(),
        "median_ms": statistics.median(times),
        "p99_ms": max(times),
        "n": len(times),
        "peer": "one process",
        "peer_median_ms": found["alone_ms"],
        "ratio": found["alone_ms"] / statistics.median(times),
        "floor_ms": None,
        "versions": {"torch": torch.__version__, "ray": version("ray")},
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/planner_ray.py ENGINE_JSON --plans {len(times)}",
        "details": details,
    }


if __name__ == "__main__":
    sys.exit(main())
