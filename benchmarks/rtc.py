"""What real-time chunking is worth: the simulated arm moves on while its next chunk is made, with and without it.

    python benchmarks/rtc.py [--checkpoint DIR] [--episodes N] [--delay STEPS] [--json FILE]

An observation is taken every 8 actions. Its chunk comes `delay` actions later, made from frames that are old by then,
and takes over at once. The jump is how far the new chunk's first executed joint targets are from those that the old one
had for the same instant. Time is simulated, so results do not depend on this machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_demo.environment import ReachEnvironment
from taktline_demo.jpeg import encode_jpeg
from taktline_demo.lockstep import REPLAN_STEPS, observation_seed
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig, RtcOptions
from taktline_worker.adapter import GuidedChunk
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.observation import EncodedImage, RobotInput, RtcInput

Chunk = NDArray[np.float32]
WAYS: dict[str, RtcOptions | None] = {
    "plain": None,
    "guided, linear": RtcOptions(schedule="linear"),
    "guided, exp": RtcOptions(schedule="exp"),
    "guided, exp, vjp": RtcOptions(schedule="exp", gradient="vjp"),
}


def ask(
    adapter: PiAdapter, pool: ThreadPoolExecutor, environment: ReachEnvironment, seed: int, rtc: RtcInput | None
) -> Chunk:
    """The chunk for what the arm sees now."""
    images = {name: EncodedImage("jpeg", encode_jpeg(frame)) for name, frame in environment.frames().items()}
    sent = RobotInput(images, environment.state(), environment.instruction, seed=seed, rtc=rtc)
    row = adapter.begin(sent, pool).result()
    (answer,) = adapter.finish([row], adapter.run([row], 1))
    if isinstance(answer, GuidedChunk):
        return answer.actions
    assert isinstance(answer, np.ndarray), answer
    return answer


def episode(
    adapter: PiAdapter, pool: ThreadPoolExecutor, environment: ReachEnvironment, seed: int, delay: int, *, rtc: bool
) -> tuple[bool, int, list[float]]:
    """(reached the block, control steps, jump at each hand-off in rad) of one episode."""
    environment.reset(seed)
    chunk, row, asked = ask(adapter, pool, environment, observation_seed(seed, 0), None), 0, 1
    jumps: list[float] = []
    outcome = environment.outcome()
    while not outcome.done:
        if row < REPLAN_STEPS:
            outcome = environment.step(chunk[row])
            row += 1
            continue
        tail = chunk[row:]
        sent = RtcInput(tail, delay=delay) if rtc else None
        coming = ask(adapter, pool, environment, observation_seed(seed, asked), sent)
        asked += 1
        for action in tail[:delay]:
            outcome = environment.step(action)
            if outcome.done:
                return outcome.success, outcome.steps, jumps
        if delay < len(tail):
            jumps.append(float(np.abs(coming[delay] - tail[delay]).max()))
        chunk, row = coming, delay
    return outcome.success, outcome.steps, jumps


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """One row a way."""
    rows = []
    environment = ReachEnvironment()
    with ThreadPoolExecutor(2) as pool:
        for name, rtc in WAYS.items():
            config = EngineConfig(
                policy="rtc",
                model=ModelConfig(family="pi05", path=str(options.checkpoint), revision="r"),
                engine=EngineOptions(device="cpu", precision="fp32", buckets=(1,), rtc=rtc or RtcOptions()),
            )
            adapter = load(config)
            found = [
                episode(adapter, pool, environment, seed, options.delay, rtc=rtc is not None)
                for seed in range(1000, 1000 + options.episodes)
            ]
            jumps = [jump for _, _, each in found for jump in each]
            rows.append(
                {
                    "bench": "rtc",
                    "way": name,
                    "delay": options.delay,
                    "episodes": options.episodes,
                    "success": sum(success for success, _, _ in found) / len(found),
                    "steps": float(np.mean([steps for _, steps, _ in found])),
                    "jump_mean_rad": float(np.mean(jumps)),
                    "jump_p95_rad": float(np.percentile(jumps, 95)),
                    "jump_max_rad": float(np.max(jumps)),
                    "hand_offs": len(jumps),
                    "date": time.strftime("%Y-%m-%d"),
                }
            )
    environment.close()
    return rows


def table(rows: list[Mapping[str, object]] | list[dict[str, object]]) -> str:
    """The rows for a person."""
    lines = [f"{'way':<18} {'success':>7} {'steps':>6} {'jump mean':>10} {'p95':>7} {'max':>7}  (rad)"]
    lines += [
        f"{row['way']:<18} {row['success']:>7.2f} {row['steps']:>6.1f} {row['jump_mean_rad']:>10.4f}"
        f" {row['jump_p95_rad']:>7.4f} {row['jump_max_rad']:>7.4f}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("demo/checkpoint"))
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--delay", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options)
    print(table(rows))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
