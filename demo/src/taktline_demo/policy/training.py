"""Trains the demo policy by flow matching and writes its checkpoint."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from taktline_demo.demonstrations import Demonstrations
from taktline_demo.kinematics import tip_position
from taktline_demo.policy.architecture import Architecture
from taktline_demo.policy.checkpoint import save_checkpoint
from taktline_demo.policy.network import DemoPolicy, flow_matching_loss
from taktline_demo.policy.normalisation import Statistics
from taktline_demo.policy.tokenizer import PAD_ID, load_tokenizer, train_tokenizer
from taktline_demo.policy.training_data import TrainingData, measure_statistics, prepare


@dataclass(frozen=True)
class TrainingOptions:
    """Everything that decides the result, next to the demonstrations.

    Attributes:
        draws: solver times and noises drawn for each observation of a batch; the prefix is computed once for all.
        held_out: share of the episodes that only measure the error.
    """

    steps: int = 1000
    batch: int = 768
    draws: int = 4
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup: int = 200
    average: float = 0.998
    held_out: float = 0.03
    seed: int = 0


def train(
    data: Path, out: Path, options: TrainingOptions, device: torch.device, log: Callable[[str], None] = print
) -> None:
    """Trains on the demonstrations in `data` and writes the checkpoint folder `out`, tokenizer included."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    architecture = Architecture()
    demonstrations = Demonstrations.load(data)
    train_tokenizer(out / "tokenizer", architecture.vocabulary)
    statistics = measure_statistics(demonstrations)
    everything = prepare(demonstrations, statistics, load_tokenizer(out / "tokenizer"), architecture).to(device)
    split = _held_out(demonstrations, options)
    seen, unseen = torch.from_numpy(np.flatnonzero(~split)).to(device), torch.from_numpy(np.flatnonzero(split))
    policy = DemoPolicy(architecture).to(device)
    averaged = copy.deepcopy(policy)
    log(f"{sum(p.numel() for p in policy.parameters()) / 1e6:.2f} M parameters, {len(seen)} observations on {device}")
    optimiser = _optimiser(policy, options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, options))
    generator = torch.Generator(device).manual_seed(options.seed)
    started = time.monotonic()
    for step in range(1, options.steps + 1):
        loss = _batch_loss(policy, everything, seen, options, generator)
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        _average(averaged, policy, min(options.average, step / (step + 10)))
        if step % max(1, options.steps // 12) == 0:
            errors = _tip_errors_cm(averaged, everything, unseen.to(device), statistics, options)
            rate = step / (time.monotonic() - started)
            log(f"step {step}: loss {loss.item():.4f}, held-out tip error in cm {errors}, {rate:.1f} steps/s")
    save_checkpoint(out, averaged, statistics, "Reaches the red, green or blue block with a simulated four-joint arm.")


@torch.no_grad()
def _average(averaged: DemoPolicy, policy: DemoPolicy, keep: float) -> None:
    """Moves the exponential moving average of the weights, which is what gets saved, towards `policy`."""
    targets: list[Tensor] = list(averaged.parameters())
    sources: list[Tensor] = list(policy.parameters())
    torch._foreach_lerp_(targets, sources, 1.0 - keep)


def _held_out(demonstrations: Demonstrations, options: TrainingOptions) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    episodes = np.unique(demonstrations.episodes)
    count = max(1, round(len(episodes) * options.held_out))
    return np.isin(demonstrations.episodes, episodes[-count:])


def _optimiser(policy: DemoPolicy, options: TrainingOptions) -> torch.optim.Optimizer:
    matrices = [p for p in policy.parameters() if p.ndim >= 2]
    vectors = [p for p in policy.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98), fused=True)


def _rate(step: int, options: TrainingOptions) -> float:
    if step < options.warmup:
        return (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def _batch_loss(
    policy: DemoPolicy, data: TrainingData, seen: Tensor, options: TrainingOptions, generator: torch.Generator
) -> Tensor:
    device = seen.device
    rows = seen[torch.randint(len(seen), (options.batch,), device=device, generator=generator)]
    goals = torch.randint(data.tokens.shape[1], (options.batch,), device=device, generator=generator)
    templates = torch.randint(data.tokens.shape[2], (options.batch,), device=device, generator=generator)
    tokens = data.tokens[rows, goals, templates]
    pixels = _augment(data.frames[rows].float() / 127.5 - 1.0, generator)
    actions = data.actions[rows, goals].repeat_interleave(options.draws, 0)
    # t = 0.999 b + 0.001 with b ~ Beta(1.5, 1): the cumulative distribution b^1.5 is inverted.
    uniform = torch.rand(len(actions), device=device, generator=generator)
    times = uniform ** (2.0 / 3.0) * 0.999 + 0.001
    noise = torch.randn(actions.shape, device=device, generator=generator)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        prefix = policy.encode(pixels, tokens, tokens != PAD_ID).repeat(options.draws)
        return flow_matching_loss(policy, prefix, actions, times, noise)


def _augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Slight changes of brightness, contrast and tint, and some grain; the geometry stays."""
    shape = (*pixels.shape[:2], 1, 1, 1)
    gain = 1.0 + 0.1 * torch.randn(shape, device=pixels.device, generator=generator)
    tint = 0.05 * torch.randn((*pixels.shape[:3], 1, 1), device=pixels.device, generator=generator)
    grain = 0.02 * torch.randn(pixels.shape, device=pixels.device, generator=generator)
    return (pixels * gain + tint + grain).clamp(-1.0, 1.0)


@torch.no_grad()
def _tip_errors_cm(
    policy: torch.nn.Module,
    data: TrainingData,
    rows: Tensor,
    statistics: dict[str, Statistics],
    options: TrainingOptions,
) -> str:
    """Mean distance between the tips of sampled and expert commands at the first, middle and last row, all goals."""
    assert isinstance(policy, DemoPolicy)
    a = policy.architecture
    rows = rows[:256]
    generator = torch.Generator(rows.device).manual_seed(options.seed + 1)
    totals = []
    for goal in range(data.tokens.shape[1]):
        tokens = data.tokens[rows, goal, 0]
        noise = torch.randn((len(rows), a.horizon, a.action_width), device=rows.device, generator=generator)
        prefix = policy.encode(data.frames[rows].float() / 127.5 - 1.0, tokens, tokens != PAD_ID)
        sampled = policy.sample(prefix, noise)[..., : a.action_dim].cpu().numpy()
        wanted = data.actions[rows, goal][..., : a.action_dim].cpu().numpy()
        for row in (0, a.horizon // 2, a.horizon - 1):
            pairs = zip(
                statistics["action"].restore(sampled[:, row]), statistics["action"].restore(wanted[:, row]), strict=True
            )
            totals.append(100.0 * float(np.mean([np.linalg.norm(tip_position(s) - tip_position(w)) for s, w in pairs])))
    first, middle, last = (np.mean(totals[index::3]) for index in range(3))
    return f"{first:.2f} / {middle:.2f} / {last:.2f}"
