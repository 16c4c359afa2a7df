"""What reusing frames seen before is worth: CPU time of an observation by how many frames are new.

    python benchmarks/frame_reuse.py [--checkpoint DIR] [--runs N] [--episodes N]

The last part drives the simulated arm with the policy and counts how many frames of a live robot came twice.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.observation import EncodedImage, RobotInput


def frame(seed: int) -> EncodedImage:
    """A 640 x 480 JPEG of soft noise, about 25 kB."""
    small = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((640, 480)).save(buffer, "JPEG", quality=90)
    return EncodedImage("jpeg", buffer.getvalue())


def one(
    adapter: PiAdapter, pool: ThreadPoolExecutor, images: Mapping[str, EncodedImage], seed: int
) -> NDArray[np.float32]:
    """One observation from bytes to robot actions."""
    state = np.zeros(adapter.description.state_dim)
    row = adapter.begin(RobotInput(images, state, "reach the red block", seed=seed), pool).result()
    (answer,) = adapter.finish([row], adapter.run([row], 1))
    assert isinstance(answer, np.ndarray), answer
    return answer


def median_ms(adapter: PiAdapter, pool: ThreadPoolExecutor, new: int, runs: int) -> float:
    """Median CPU time (all threads) of an observation of which `new` frames were never seen."""
    cameras = adapter.description.cameras
    images = {name: frame(index) for index, name in enumerate(cameras)}
    one(adapter, pool, images, 0)
    times = []
    for run in range(runs):
        fresh = {name: frame(1000 + run * 10 + index) for index, name in enumerate(cameras[:new])}
        begin = time.process_time()
        one(adapter, pool, {**images, **fresh}, run)
        times.append(1e3 * (time.process_time() - begin))
    return statistics.median(times)


def live(adapter: PiAdapter, pool: ThreadPoolExecutor, episodes: int) -> dict[str, int]:
    """Frames that the simulated arm sent, and how many of them had been seen."""
    from taktline_demo.lockstep import run_episodes

    def act(
        images: Mapping[str, bytes], state: NDArray[np.float32], instruction: str, seed: int
    ) -> NDArray[np.float32]:
        encoded = {name: EncodedImage("jpeg", data) for name, data in images.items()}
        row = adapter.begin(RobotInput(encoded, state, instruction, seed=seed), pool).result()
        (answer,) = adapter.finish([row], adapter.run([row], 1))
        assert isinstance(answer, np.ndarray), answer
        return answer

    hits, misses = adapter.caches()["frame_pixels"]
    run_episodes(act, [(seed, None) for seed in range(episodes)])
    after = adapter.caches()["frame_pixels"]
    return {"frames": sum(after) - hits - misses, "seen": after[0] - hits}


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="demo/checkpoint")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--episodes", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, object] = {}
    with ThreadPoolExecutor(2) as pool:
        for megabytes in (0, 64):
            config = EngineConfig(
                policy="reuse",
                model=ModelConfig(family="pi05", path=str(Path(options.checkpoint)), revision="r"),
                engine=EngineOptions(device="cpu", precision="fp32", frame_cache_mb=megabytes),
            )
            adapter = load(config)
            for new in range(len(adapter.description.cameras) + 1):
                results[f"{megabytes} MiB, {new} new frames, ms"] = round(
                    median_ms(adapter, pool, new, options.runs), 2
                )
        results["live"] = live(adapter, pool, options.episodes)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
