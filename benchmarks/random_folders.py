"""Checkpoint folders, and a worker that serves one: random and full-size on a GPU, the golden tiny ones on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from random_vjepa2 import PUBLISHED, random_checkpoint
from safetensors.torch import save_file
from taktline_protocol.deployment import EngineConfig
from taktline_worker.models.pi.synthetic import PI05, stream_random_tensors

START_LIMIT_S = 240.0
GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
PI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_PREFIX = "model.paligemma_with_expert."
_STORED = {
    "vision.": f"{_PREFIX}paligemma.model.vision_tower.vision_model.",
    "projector.": f"{_PREFIX}paligemma.model.multi_modal_projector.linear.",
    "prefix.": f"{_PREFIX}paligemma.model.language_model.",
    "expert.": f"{_PREFIX}gemma_expert.model.",
    "lm_head.": f"{_PREFIX}paligemma.lm_head.",
}
"""Canonical prefix -> LeRobot's; the action heads are `model.` and their own name."""


def pi05_folder(target: Path, device: torch.device) -> Path:
    """A LeRobot folder of π0.5: three cameras of 224x224, a state of 8, 50 actions of 7."""
    source = GOLDEN / "pi05_tiny" / "lerobot_folder"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("case_*", "README.md", "model.safetensors"))
    stated = {"control_period_ms": 50}
    if device.type == "cpu":
        shutil.copy(source / "model.safetensors", target)
        stated["architecture"] = {"vision_heads": 2}
    else:
        config = json.loads((target / "config.json").read_text())
        config |= {"chunk_size": 50, "n_action_steps": 50, "image_resolution": [224, 224]}
        (target / "config.json").write_text(json.dumps(config))
        _save_random_pi05(target, device)
    (target / "taktline.json").write_text(json.dumps(stated))
    return target


def openpi_folder(target: Path, device: torch.device) -> Path:
    """An openpi folder of π0.5: three cameras of 224x224, a state of 8 in the prompt, 50 actions of 7."""
    source = GOLDEN / "pi05_tiny" / "lerobot_folder"
    (target / "assets" / "random").mkdir(parents=True)
    shutil.copy(source / "tokenizer" / "tokenizer.model", target)
    limits = {"mean": 0.0, "std": 1.0, "q01": -1.0, "q99": 1.0}
    statistics = {
        name: {what: [value] * width for what, value in limits.items()}
        for name, width in (("state", 8), ("actions", 7))
    }
    (target / "assets" / "random" / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics}))
    stated = {
        "control_period_ms": 50,
        "cameras": {name: name for name in PI_CAMERAS},
        "action_horizon": 50,
        "state_dim": 8,
        "action_dim": 7,
        "relative_mask": [],
        "adapt_to_pi": False,
        "state_in_prompt": True,
    }
    if device.type == "cpu":
        shutil.copy(source / "model.safetensors", target)
        stated["architecture"] = {"vision_heads": 2}
    else:
        _save_random_pi05(target, device)
    (target / "taktline.json").write_text(json.dumps(stated))
    return target


def _save_random_pi05(target: Path, device: torch.device) -> None:
    tensors = {}
    for name, value in stream_random_tensors(PI05, device):
        prefix = next((one for one in _STORED if name.startswith(one)), "")
        stored = _STORED[prefix] + name.removeprefix(prefix) if prefix else f"model.{name}"
        tensors[stored] = value.bfloat16().cpu().contiguous()
    save_file(tensors, target / "model.safetensors")


def planner_folder(target: Path, device: torch.device) -> Path:
    """A folder of V-JEPA 2-AC."""
    target.mkdir(parents=True)
    if device.type == "cpu":
        shutil.copy(GOLDEN / "vjepa2_ac_tiny" / "full" / "checkpoint.pt", target)
        stated = {"image_size": 128, "encoder_heads": 2, "predictor_heads": 2}
    else:
        made = random_checkpoint(device)
        towers = {"encoder": made.encoder, "predictor": made.predictor}
        stored = {
            tower: {f"module.{name}": value.bfloat16().cpu() for name, value in tensors.items()}
            for tower, tensors in towers.items()
        }
        torch.save(stored, target / "checkpoint.pt")
        a = PUBLISHED
        stated = {"image_size": a.image_size, "encoder_heads": a.encoder_heads, "predictor_heads": a.heads}
    (target / "taktline.json").write_text(json.dumps({"architecture": stated}))
    return target


@contextmanager
def served(config: EngineConfig, folder: Path, *flags: str) -> Iterator[str]:
    """A worker process of the product, started with `flags`; its address."""
    path = folder / f"engine-{config.engine.parallel.dp}.json"
    path.write_bytes(msgspec.json.encode(config))
    log = folder / f"worker-{config.engine.parallel.dp}.log"
    command = "import sys; from taktline_worker.cli import main; sys.exit(main())"
    arguments = ("serve", "--config", str(path), "--listen", "127.0.0.1:0", "--linger-s", "0", *flags)
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, "-c", command, *arguments], stderr=stream, env=dict(os.environ))
    try:
        yield f"127.0.0.1:{_port(process, log, config.engine.parallel.dp > 1)}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], log: Path, replicated: bool) -> int:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        entries = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        for entry in entries:
            # Each replica says so, too, of its socket.
            if entry["message"] == "serving" and ("replicas" in entry) == replicated:
                return int(entry["port"])
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit(f"the worker did not serve:\n{log.read_text()[-2000:]}")
