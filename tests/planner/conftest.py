"""What the planner's tests share: the golden checkpoints as worlds, their cases, and a tiny servable folder."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from taktline import Robot
from taktline_protocol import TaktlineError
from taktline_protocol.deployment import (
    EngineConfig,
    EngineOptions,
    ModelConfig,
    Route,
    RoutingTable,
    SearchOptions,
    Target,
)
from taktline_worker.models.vjepa2_ac.config import SidecarArchitecture
from taktline_worker.models.vjepa2_ac.processor import to_pixels
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import FP32, Precision, open_checkpoint, pack_weights
from taktline_worker.observation import EncodedImage, RobotInput
from taktline_worker.planning.settings import SearchSettings
from taktline_worker.planning.world import Scene
from torch import Tensor

from tests.engine_fixtures import one_thread, pool, relative_l2  # noqa: F401 (fixtures)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "vjepa2_ac_tiny"
STATED = {"short": SidecarArchitecture(64, 4, 4), "full": SidecarArchitecture(128, 2, 2)}
FILES = {"short": GOLDEN / "checkpoint.pt", "full": GOLDEN / "full" / "checkpoint.pt"}
READY_TIMEOUT_S = 120.0
CEM_CASES = ("main", "notebook_pinned", "close_gripper")


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


def make_world(
    kind: str = "full", precision: Precision = FP32, micro_batch: int = 64, horizon: int = 2, fused: bool | None = None
) -> VJepa2World:
    checkpoint = open_checkpoint(FILES[kind], STATED[kind])
    weights = pack_weights(checkpoint, precision, torch.device("cpu"))
    return VJepa2World(weights, checkpoint.architecture, micro_batch, horizon, fused=fused)


def read_inputs(kind: str) -> dict[str, Tensor]:
    """Frames and poses of a golden set under one naming."""
    if kind == "full":
        case = load_file(GOLDEN / "full" / "inputs.safetensors")
        return {
            "frame": case["frame_0"],
            "frame_1": case["frame_1"],
            "goal": case["goal"],
            "pose": case["states"][0, 0],
            "states": case["states"],
            "actions": case["actions"],
        }
    case = load_file(GOLDEN / "case.safetensors")
    return {"frame": case["frame"], "goal": case["goal"], "pose": case["state"][0, 0]}


def make_scene(world: VJepa2World, kind: str = "full") -> Scene:
    given = read_inputs(kind)
    side = world.architecture.image_size
    pixels = torch.stack([to_pixels(given[name].numpy(), side) for name in ("frame", "goal")])
    latent, goal = world.encode(pixels)
    return Scene(latent, goal, given["pose"])


def cem_settings(case: str) -> SearchSettings:
    """The settings of a golden search, from its configuration file."""
    stated = json.loads((GOLDEN / "full" / "config_tiny.json").read_text())["cem"][case]
    return SearchSettings(
        candidates=stated["samples"],
        rounds=stated["cem_steps"],
        elites=stated["topk"],
        horizon=stated["rollout"],
        max_step_m=stated["maxnorm"],
        pins={int(axis): value for axis, value in stated["axis"].items()},
        close_gripper=stated["close_gripper"],
        **{name: stated[name] for name in stated if name.startswith("momentum")},
    )


def random_raw(height: int = 128, width: int = 128, seed: int = 0) -> EncodedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return EncodedImage("raw", pixels.tobytes(), pixels.shape)


def observe(**changes: Any) -> RobotInput:
    """A good observation for the tiny planner: the golden frame, goal and pose."""
    given = read_inputs("full")
    values: dict[str, Any] = {
        "images": {
            name: EncodedImage("raw", given[key].numpy().tobytes(), tuple(given[key].shape))
            for name, key in (("camera", "frame"), ("goal", "goal"))
        },
        "state": given["pose"].numpy(),
        "instruction": "reach the goal image",
        "seed": 30,
    }
    return RobotInput(**(values | changes))


def other_form(name: str, folder: Path) -> Path:
    """The golden `full` weights as a safetensors file, or as a trainer saves them: other prefixes, more entries."""
    content = torch.load(FILES["full"], weights_only=True)
    path = folder / name
    if name.endswith(".safetensors"):
        save_file({f"{tower}.{key}": value for tower in content for key, value in content[tower].items()}, path)
        return path

    def prefixed(tower: str) -> dict[str, Tensor]:
        return {key.replace("module.", "module.backbone."): value for key, value in content[tower].items()}

    encoder = prefixed("encoder") | {"module.backbone.pos_embed": torch.ones(1, 128, 64)}
    target = {key: value + 1.0 for key, value in encoder.items() if value.ndim == 1}
    rest = {"opt": {"state": {}, "param_groups": [{"lr": 0.0}]}, "scaler": None, "epoch": 3, "loss": 0.5}
    rest |= {"batch_size": 1, "world_size": 1, "lr": 0.0}
    torch.save({"encoder": encoder, "predictor": prefixed("predictor"), "target_encoder": target} | rest, path)
    return path


def make_folder(target: Path, source: str = "checkpoint.pt", **sidecar: Any) -> Path:
    """A servable folder with the golden `full` weights."""
    target.mkdir(parents=True)
    if source == "checkpoint.pt":
        shutil.copy(FILES["full"], target / source)
    else:
        other_form(source, target)
    stated = {"architecture": {"image_size": 128, "encoder_heads": 2, "predictor_heads": 2}} | sidecar
    (target / "taktline.json").write_text(json.dumps(stated))
    return target


def engine_config(path: Path, search: dict[str, Any] | None = None, **changes: Any) -> EngineConfig:
    model = {name: changes.pop(name) for name in ("sha256", "cameras") if name in changes}
    options = {"precision": "fp32", "device": "cpu", "buckets": (1, 2)} | changes
    small = {"candidates": 64, "elites": 8, "rounds": 4, "micro_batch": 32} | (search or {})
    return EngineConfig(
        policy="planner",
        model=ModelConfig(family="vjepa2-ac", path=str(path), revision="r1", **model),
        engine=EngineOptions(search=SearchOptions(**small), **options),
    )


@contextmanager
def serving_gateway(worker_port: int, folder: Path) -> Iterator[str]:
    """A gateway's own process in front of a worker that serves `planner`; its address once it reports that ready."""
    target = Target(address=f"127.0.0.1:{worker_port}", revision="r1")
    table = RoutingTable(routes=(Route(policy="planner", family="vjepa2-ac", revision="r1", targets=(target,)),))
    (folder / "routes.json").write_bytes(msgspec.json.encode(table))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "taktline-gateway"), "serve"]
    command += ["--routes", str(folder / "routes.json"), "--listen", f"127.0.0.1:{port}"]
    log = folder / "gateway.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream, env=os.environ)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with Robot(url, "planner", "probe") as robot:
                if robot.info().ready:
                    return
        except TaktlineError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"the gateway does not report the planner ready\n{log.read_text()[-3000:]}")


@dataclass(frozen=True)
class Kit:
    """The helpers above, handed to tests as one fixture because test folders are no packages."""

    distance: Callable[..., float] = relative_l2
    world: Callable[..., VJepa2World] = make_world
    inputs: Callable[..., dict[str, Tensor]] = read_inputs
    scene: Callable[..., Scene] = make_scene
    settings: Callable[..., SearchSettings] = cem_settings
    observe: Callable[..., RobotInput] = observe
    raw: Callable[..., EncodedImage] = random_raw
    folder: Callable[..., Path] = make_folder
    other_form: Callable[..., Path] = other_form
    config: Callable[..., EngineConfig] = engine_config
    gateway: Callable[..., AbstractContextManager[str]] = serving_gateway
    files: Any = None
    stated: Any = None


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit(files=FILES, stated=STATED)


@pytest.fixture(scope="session")
def world() -> VJepa2World:
    """The full set's model in fp32, one unit a golden round."""
    return make_world()


@pytest.fixture(scope="session")
def scene(world: VJepa2World) -> Scene:
    return make_scene(world)
