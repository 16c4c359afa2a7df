"""Turns recorded demonstrations into training tensors: JPEG frames, prompts as tokens, normalised action chunks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from taktline_demo.arm import CAMERAS, COLOURS
from taktline_demo.demonstrations import Demonstrations
from taktline_demo.jpeg import decode_jpeg, encode_jpeg
from taktline_demo.policy.architecture import Architecture
from taktline_demo.policy.normalisation import Statistics
from taktline_demo.policy.prompt import discretise, prompt_text
from taktline_demo.policy.tokenizer import BOS_ID, PAD_ID
from taktline_demo.task import INSTRUCTIONS


@dataclass(frozen=True)
class TrainingData:
    """All samples of a data set on one device; N observations, three goals each, one prompt a goal and template.

    Attributes:
        frames: uint8, shape (N, cameras, 3, size, size).
        tokens: int64, shape (N, goals, templates, P); padded with zeros.
        actions: normalised and padded, float32, shape (N, goals, H, action width).
    """

    frames: Tensor
    tokens: Tensor
    actions: Tensor

    def to(self, device: torch.device) -> TrainingData:
        """The same data on `device`."""
        return TrainingData(self.frames.to(device), self.tokens.to(device), self.actions.to(device))


def measure_statistics(demonstrations: Demonstrations) -> dict[str, Statistics]:
    """Statistics of states and actions under LeRobot's feature names."""
    return {
        "observation.state": Statistics.of(demonstrations.states),
        "action": Statistics.of(demonstrations.chunks.reshape(-1, demonstrations.chunks.shape[-1])),
    }


def prepare(
    demonstrations: Demonstrations, statistics: dict[str, Statistics], tokenizer: Any, a: Architecture
) -> TrainingData:
    """Encodes a data set. Raises ValueError where a prompt is longer than the architecture's budget."""
    with ThreadPoolExecutor() as pool:
        through_jpeg = [
            np.stack(list(pool.map(lambda frame: decode_jpeg(encode_jpeg(frame)), demonstrations.frames[name])))
            for name in CAMERAS
        ]
    frames = torch.from_numpy(np.stack(through_jpeg, axis=1)).permute(0, 1, 4, 2, 3).contiguous()
    bins = discretise(statistics["observation.state"].normalise(demonstrations.states))
    tokens = [
        [[encode_prompt(tokenizer, template.format(colour), row) for template in INSTRUCTIONS] for colour in COLOURS]
        for row in bins
    ]
    longest = max(len(ids) for goals in tokens for templates in goals for ids in templates)
    if longest > a.prompt_tokens:
        raise ValueError(f"a prompt has {longest} tokens, the budget is {a.prompt_tokens}")
    padded = np.full((len(bins), len(COLOURS), len(INSTRUCTIONS), longest), PAD_ID, np.int64)
    for index, goals in enumerate(tokens):
        for goal, templates in enumerate(goals):
            for template, ids in enumerate(templates):
                padded[index, goal, template, : len(ids)] = ids
    normalised = statistics["action"].normalise(demonstrations.chunks)
    actions = np.zeros((*normalised.shape[:-1], a.action_width), np.float32)
    actions[..., : a.action_dim] = normalised
    return TrainingData(frames, torch.from_numpy(padded), torch.from_numpy(actions))


def encode_prompt(tokenizer: Any, instruction: str, bins: NDArray[np.int64]) -> list[int]:
    """Token ids of the prompt, BOS first."""
    return [BOS_ID, *tokenizer.encode(prompt_text(instruction, bins))]
