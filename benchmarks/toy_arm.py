"""A small V-JEPA 2-AC that has learned an arm's frames: what control can be tried on where trained weights are not had.

    python benchmarks/toy_arm.py [--steps 1000] [--device cpu] [--out benchmarks/toy_arm]

The arm is drawn, the encoder is random, and the predictor, of the published structure and loss (mean |.| of
layer-normed latents, one step with the frame seen and one with the frame predicted), is fitted to transitions between
random poses by random actions, through the plain statement. The folder that results is one that a worker serves. From a
seed; two minutes on a core. The folder in the repository was made so.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from plain_vjepa2 import PlainPredictor
from safetensors.torch import save_file
from taktline_worker.models.vjepa2_ac import modules, poses, rope
from taktline_worker.models.vjepa2_ac.config import (
    SidecarArchitecture,
    VJepa2Architecture,
    expected_encoder_shapes,
    expected_predictor_shapes,
)
from taktline_worker.models.vjepa2_ac.processor import to_pixels
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import FP32, CheckpointFile, Precision, open_checkpoint, pack_weights
from torch import Tensor
from torch.nn import functional

FOLDER = Path(__file__).with_name("toy_arm")
SIZE = 64
ARCHITECTURE = VJepa2Architecture(
    image_size=SIZE,
    patch_size=16,
    encoder_width=32,
    encoder_depth=1,
    encoder_heads=2,
    encoder_mlp=128,
    width=64,
    depth=2,
    heads=2,
    mlp=256,
)
STATED = SidecarArchitecture(SIZE, ARCHITECTURE.encoder_heads, ARCHITECTURE.heads)
MAX_STEP_M = 0.05
LOW, HIGH = (0.27, -0.27, 0.17), (0.68, 0.15, 0.53)
"""Where the end effector is in the training's frames, metres."""
GRIPPER = 0.5
"""Closedness, held still."""
PEAK_RATE = 3e-3
_EYE, _AT, _FOCAL = (1.3, 0.0, 0.85), (0.4, 0.0, 0.25), 1.35
_SHOULDER = (0.0, 0.0, 0.45)


def frames(pose: Tensor) -> Tensor:
    """What the camera sees of poses (n, 7): uint8 (n, SIZE, SIZE, 3).

    A soft shadow on the table, the forearm from the shoulder, and the hand.
    """
    like = {"device": pose.device, "dtype": pose.dtype}
    hand, hand_depth = _seen(pose[:, :3])
    shoulder, _ = _seen(torch.tensor(_SHOULDER, **like).expand(len(pose), 3))
    shadow, shadow_depth = _seen(pose[:, :3] * torch.tensor((1.0, 1.0, 0.0), **like))
    line = (torch.arange(SIZE, **like) + 0.5) / SIZE * 2.0 - 1.0
    pixel = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1)
    table = torch.stack((0.35 + 0.1 * pixel[..., 1], 0.35 + 0.1 * pixel[..., 0], torch.full_like(pixel[..., 0], 0.4)))
    image = table.expand(len(pose), *table.shape)
    colours = torch.tensor(((0.05, 0.05, 0.1), (0.8, 0.5, 0.2), (0.6, 0.2, 0.5)), **like)
    along = hand - shoulder
    offset = pixel - shoulder[:, None, None]
    share = ((offset * along[:, None, None]).sum(-1) / along.square().sum(-1)[:, None, None]).clamp(0.0, 1.0)
    distances = (
        (pixel - shadow[:, None, None]).norm(dim=-1),
        (offset - share[..., None] * along[:, None, None]).norm(dim=-1),
        (pixel - hand[:, None, None]).norm(dim=-1),
    )
    radii = (0.20 / shadow_depth, 0.09 / hand_depth, 0.16 / hand_depth)
    for distance, radius, edge, cover, colour in zip(
        distances, radii, (0.10, 0.05, 0.08), (0.6, 1.0, 1.0), colours, strict=True
    ):
        mask = cover * torch.sigmoid((radius[:, None, None] - distance) / edge)[:, None]
        image = image * (1.0 - mask) + mask * colour[:, None, None]
    return (255.0 * image).round().clamp(0.0, 255.0).byte().permute(0, 2, 3, 1)


def _seen(points: Tensor) -> tuple[Tensor, Tensor]:
    """Where points (n, 3) are in the picture, (n, 2) in -1 .. 1, and how far away, (n,)."""
    eye, at, up = (torch.tensor(one, device=points.device, dtype=points.dtype) for one in (_EYE, _AT, (0.0, 0.0, 1.0)))
    ahead = functional.normalize(at - eye, dim=0)
    right = functional.normalize(torch.linalg.cross(ahead, up), dim=0)
    offset = points - eye
    depth = offset @ ahead
    flat = torch.stack((offset @ right, -(offset @ torch.linalg.cross(right, ahead))), dim=-1)
    return _FOCAL * flat / depth[:, None], depth


def untrained(seed: int = 0) -> CheckpointFile:
    """A random encoder, and a predictor that begins by answering about what it sees."""
    generator = torch.Generator().manual_seed(seed)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=generator)
        if "norm" in name:
            return 0.02 * value + (1.0 if name.endswith("weight") else 0.0)
        return 0.02 * value if name.endswith("bias") else value * value[0].numel() ** -0.5

    a = ARCHITECTURE
    encoder = {name: made(name, shape) for name, shape in expected_encoder_shapes(a).items()}
    predictor = {name: made(name, shape) for name, shape in expected_predictor_shapes(a).items()}
    through = torch.eye(a.width)
    predictor["predictor_embed.weight"] = through[:, : a.encoder_width].contiguous()
    predictor["predictor_proj.weight"] = through[: a.encoder_width].contiguous()
    for name in predictor:
        if name.endswith(("attn.proj.weight", "fc2.weight")):
            predictor[name] *= 0.1
    # Metres are small numbers: without this the norms would show a token's bias alone.
    for name, scale in (("action_encoder", 40.0), ("state_encoder", 8.0)):
        predictor[f"{name}.weight"][:, :3] *= scale
        predictor[f"{name}.bias"] = torch.randn(a.width, generator=generator)
    return CheckpointFile(Path("untrained"), encoder, predictor, a)


def world_of(
    checkpoint: CheckpointFile,
    device: torch.device | None = None,
    precision: Precision = FP32,
    micro_batch: int = 100,
    fused: bool | None = None,
) -> VJepa2World:
    """The world model, on the CPU unless stated, for plans of two actions."""
    weights = pack_weights(checkpoint, precision, device or torch.device("cpu"))
    return VJepa2World(weights, checkpoint.architecture, micro_batch, 2, fused=fused)


def trained(folder: Path = FOLDER) -> CheckpointFile:
    """The weights in the repository, or others that were made here."""
    return open_checkpoint(folder / "model.safetensors", STATED)


def transitions(encoder: CheckpointFile, count: int, device: torch.device, seed: int = 5) -> tuple[Tensor, ...]:
    """Poses before two actions (n, 2, 7), the actions (n, 2, 7), and the three frames' latents (n, 3, T, D)."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    pose, actions = torch.zeros(count, 7), torch.zeros(count, 2, 7)
    pose[:, :3] = low + (high - low) * torch.rand(count, 3, generator=generator)
    pose[:, 6] = GRIPPER
    actions[..., :3] = (MAX_STEP_M * torch.randn(count, 2, 3, generator=generator)).clamp(-MAX_STEP_M, MAX_STEP_M)
    pose, actions = pose.to(device), actions.to(device)
    second = poses.integrate(pose, actions[:, 0])
    passed = torch.stack((pose, second, poses.integrate(second, actions[:, 1])), dim=1)
    a = encoder.architecture
    weights = pack_weights(encoder, FP32, device).encoder
    cos, sin = (one.to(device) for one in rope.tables(rope.frame_positions(a.grid, 0), a.encoder_head_dim))
    latents = []
    for part in passed.flatten(0, 1).split(1024):
        pixels = torch.stack([to_pixels(frame, SIZE) for frame in frames(part).cpu().numpy()]).to(device)
        with torch.no_grad():
            latents.append(modules.latent_norm(modules.encode(weights, pixels, cos, sin, a.encoder_heads)))
    return passed[:, :2], actions, torch.cat(latents).unflatten(0, (count, 3))


def train(start: CheckpointFile, steps: int, batch: int, count: int, device: torch.device) -> CheckpointFile:
    """The predictor fitted by AdamW under a cosine; on a GPU a step is one graph, as its operations are small."""
    began = time.perf_counter()
    data = transitions(start, count, device)
    print(f"{count} transitions after {time.perf_counter() - began:.1f} s", flush=True)
    a = start.architecture
    model = PlainPredictor(a, {name: tensor.to(device) for name, tensor in start.predictor.items()}, 2)
    rate, loss = torch.tensor(PEAK_RATE, device=device), torch.zeros((), device=device)
    graphed = device.type == "cuda"
    optimiser = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.0, capturable=graphed)
    chosen = torch.zeros(batch, dtype=torch.long, device=device)

    def step() -> None:
        pose, actions, latents = (one[chosen] for one in data)
        width, present = (a.encoder_width,), latents[:, :1]
        first = functional.layer_norm(model(present, actions[:, :1], pose[:, :1]), width, eps=1e-5)
        both = torch.cat((present, first[:, None]), dim=1)
        second = functional.layer_norm(model(both, actions, pose), width, eps=1e-5)
        error = torch.stack((first, second), dim=1).sub(latents[:, 1:]).abs().mean()
        error.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=False)
        loss.copy_(error.detach())

    run: Callable[[], None] = _graph(step).replay if graphed else step
    order = torch.Generator().manual_seed(6)
    for index in range(steps):
        rate.fill_(PEAK_RATE * min(1.0, (index + 1) / 100) * 0.5 * (1.0 + math.cos(math.pi * index / steps)))
        chosen.copy_(torch.randint(count, (batch,), generator=order))
        run()
        if index % max(1, steps // 20) == 0 or index == steps - 1:
            print(f"step {index}: {float(loss):.4f} after {time.perf_counter() - began:.1f} s", flush=True)
    return CheckpointFile(Path("trained"), start.encoder, start.predictor | model.tensors(), a)


def _graph(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def save(checkpoint: CheckpointFile, folder: Path) -> None:
    """A folder that a worker serves."""
    folder.mkdir(parents=True, exist_ok=True)
    towers = {"encoder": checkpoint.encoder, "predictor": checkpoint.predictor}
    tensors = {f"{tower}.{name}": value for tower, values in towers.items() for name, value in values.items()}
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    stated = {
        "description": "A toy arm's frames, for trying control loops; benchmarks/toy_arm.py makes it.",
        "control_period_ms": 1000.0,
        "architecture": {
            "image_size": STATED.image_size,
            "encoder_heads": STATED.encoder_heads,
            "predictor_heads": STATED.predictor_heads,
        },
    }
    (folder / "taktline.json").write_text(json.dumps(stated, indent=1) + "\n")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--transitions", type=int, default=1500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)  # a step's operations are too small to share
    save(train(untrained(), options.steps, options.batch, options.transitions, device), options.out)


if __name__ == "__main__":
    main()
