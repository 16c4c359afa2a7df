"""What a byte a number does to actions: the GPU's computation in each format against fp32.

    python benchmarks/fp8_error.py [--episodes N] [--json FILE]

Of GR00T and MiniCPM-Robot: bf16 and FP8 products in the backbone (`fp8_backbones`). Of π0 and π0.5: bf16, FP8
products in vision tower and prefix (`engine.precision: fp8`), FP8 or INT8 weights of the action expert
(`engine.quantisation`), and both. The computation runs over reference operations on the CPU
(`fused_reference`), with the roundings of the GPU's. Golden cases have random weights and are compared with official
fp32 actions. The shipped policy drives its simulated arm: each of N layouts once for each block, in lockstep, in each
number format; the error is between the formats' answers to the observations of the fp32 episodes, in rad.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from fp8_backbones import backbone_errors
from fused_reference import FusedReference
from numpy.typing import NDArray
from safetensors.torch import load_file
from taktline_demo.arm import COLOURS
from taktline_demo.lockstep import run_episodes
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig, QuantisationOptions
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.byte_expert import label
from taktline_worker.models.pi.config import ArchitectureHints, read_architecture
from taktline_worker.models.pi.folder import open_folder
from taktline_worker.models.pi.keys import canonical_names, family_of
from taktline_worker.models.pi.runner import PiRow, collate
from taktline_worker.models.pi.synthetic import conventions as plain_conventions
from taktline_worker.models.pi.weights import BF16_VISION, pack_weights
from taktline_worker.observation import EncodedImage, RobotInput

Precision = Literal["bf16", "fp8"]
ROOT = Path(__file__).resolve().parent.parent
# Batches of every size here read the stored weights.
FP8_EXPERT, INT8_EXPERT = (QuantisationOptions(expert=form, max_batch=1024) for form in ("fp8", "int8"))
FORMATS: tuple[tuple[Precision, QuantisationOptions | None], ...] = (
    ("bf16", None),
    ("bf16", INT8_EXPERT),
    ("bf16", FP8_EXPERT),
    ("fp8", None),
    ("fp8", INT8_EXPERT),
)
CASES = (("pi05_tiny/full_real_heads", "case_b1"), ("pi05_tiny/full", "case_b3"), ("pi0_tiny/full", "case_b3"))


@dataclass
class Recorded:
    """An adapter that keeps what it was asked and answered."""

    adapter: PiAdapter
    pool: ThreadPoolExecutor
    asked: list[RobotInput]
    answers: list[NDArray[np.float32]]

    def act(
        self, images: Mapping[str, bytes], state: NDArray[np.float32], instruction: str, seed: int
    ) -> NDArray[np.float32]:
        """One answer, (H, 4) rad."""
        frames = {name: EncodedImage("jpeg", data) for name, data in images.items()}
        self.asked.append(RobotInput(images=frames, state=state, instruction=instruction, seed=seed))
        self.answers.append(self.answer(self.asked[-1]))
        return self.answers[-1]

    def answer(self, observation: RobotInput) -> NDArray[np.float32]:
        """Joint targets for one observation."""
        row = self.adapter.begin(observation, self.pool).result()
        chunk = self.adapter.finish([row], self.adapter.run([row], 1))[0]
        if not isinstance(chunk, np.ndarray):
            raise TypeError(f"no chunk: {chunk}")
        return chunk


def golden_errors() -> list[dict[str, Any]]:
    """Relative L2 error and least cosine of each golden case and format."""
    found = []
    for folder, name in CASES:
        path = ROOT / "tests" / "golden" / folder
        case, stored = load_file(path / f"{name}.safetensors"), load_file(path / "model.safetensors")
        canonical = {target: stored[key] for key, target in canonical_names(stored).items()}
        shapes = {key: tuple(tensor.shape) for key, tensor in canonical.items()}
        family = family_of(shapes)
        heads = json.loads((path / "config_tiny.json").read_text())["vision"]["num_attention_heads"]
        architecture = read_architecture(family, shapes, ArchitectureHints(vision_heads=heads))
        settings = plain_conventions(3, case["noise"].shape[1], 10)
        weights = pack_weights(canonical, architecture, settings, BF16_VISION, torch.device("cpu"))
        batch = collate(_rows(case, family), architecture.tokens_per_image)
        expected = case["actions"].flatten(1)
        for precision, stored in FORMATS:
            actions = FusedReference(weights, architecture, precision, stored).run(batch).flatten(1)
            found.append(
                {
                    "policy": family,
                    "case": f"{folder}/{name}",
                    "dtype": label(precision, stored),
                    "relative": float((actions - expected).norm() / expected.norm()),
                    "cosine": float(torch.nn.functional.cosine_similarity(actions, expected).min()),
                }
            )
    return found


def _rows(case: Mapping[str, torch.Tensor], family: str) -> list[PiRow]:
    rows = []
    for index in range(len(case["tokens"])):
        present = [case[f"image_{i}"][index] for i in range(3) if bool(case[f"image_mask_{i}"][index])]
        count = int(case["token_mask"][index].sum())
        state = case["state"][index] if family == "pi0" else None
        rows.append(PiRow(torch.stack(present), case["tokens"][index, :count].numpy(), case["noise"][index], state))
    return rows


def demo_errors(checkpoint: Path, episodes: int) -> list[dict[str, Any]]:
    """Error in rad and closed-loop success of the shipped policy in each format."""
    engine = EngineOptions(precision="fp32", device="cpu", buckets=(1,))
    model = ModelConfig(family="pi05", path=str(checkpoint), revision="")
    config = EngineConfig(policy="demo", model=model, engine=engine)
    folder = open_folder(checkpoint, "")
    cases = [(seed, goal) for seed in range(episodes) for goal in COLOURS]
    found = []
    with ThreadPoolExecutor(2) as pool:
        exact = Recorded(load(config), pool, [], [])
        reached = sum(result.success for result in run_episodes(exact.act, cases))
        found.append(
            {"policy": "pi05", "case": "demo/checkpoint", "dtype": "fp32", "success": reached, "episodes": len(cases)}
        )
        conventions = exact.adapter.processor.conventions
        # The GPU's storage types, on the CPU.
        stored = pack_weights(
            folder.files.read(folder.names), folder.architecture, conventions, BF16_VISION, torch.device("cpu")
        )
        for precision, quantisation in FORMATS:
            runner = FusedReference(stored, folder.architecture, precision, quantisation)
            rounded = Recorded(PiAdapter(exact.adapter.processor, runner, precision), pool, [], [])
            distance = np.stack([rounded.answer(asked) for asked in exact.asked]) - np.stack(exact.answers)
            reached = sum(result.success for result in run_episodes(rounded.act, cases))
            found.append(
                {
                    "policy": "pi05",
                    "case": "demo/checkpoint",
                    "dtype": label(precision, quantisation),
                    "success": reached,
                    "episodes": len(cases),
                    "observations": len(exact.asked),
                    "mean_abs_rad": float(np.abs(distance).mean()),
                    "p99_abs_rad": float(np.quantile(np.abs(distance), 0.99)),
                    "max_abs_rad": float(np.abs(distance).max()),
                }
            )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "demo" / "checkpoint")
    parser.add_argument(
        "--episodes", type=int, default=10, help="layouts; each is run once for each block; 0 leaves the arm out"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    golden = [*golden_errors(), *backbone_errors()]
    for row in golden:
        print(f"{row['case']:>34} {row['dtype']:>16}: relative error {row['relative']:.2e}, cosine {row['cosine']:.6f}")
    demo = demo_errors(options.checkpoint, options.episodes) if options.episodes else []
    for row in demo:
        line = f"{'shipped policy':>34} {row['dtype']:>16}: {row['success']} of {row['episodes']} episodes"
        if "mean_abs_rad" in row:
            line += f", error mean {row['mean_abs_rad']:.1e}, p99 {row['p99_abs_rad']:.1e}, "
            line += f"max {row['max_abs_rad']:.1e} rad"
        print(line)
    if options.json:
        command = f"python benchmarks/fp8_error.py --episodes {options.episodes}"
        shared = {"date": time.strftime("%Y-%m-%d"), "command": command}
        rows = [{"bench": "fp8_error", **row, **shared} for row in (*golden, *demo)]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
