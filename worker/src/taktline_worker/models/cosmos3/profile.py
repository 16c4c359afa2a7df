"""Cosmos3 as what is measured: its phases, one call each, with the work that each must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from taktline_worker.adapter import Phase
from taktline_worker.models.cosmos3 import modules
from taktline_worker.models.cosmos3.buffers import Buffers
from taktline_worker.models.cosmos3.graphs import GraphRunner
from taktline_worker.models.cosmos3.request import PolicyRequest, draw_noise
from taktline_worker.models.cosmos3.runner import Cosmos3Runner
from taktline_worker.models.cosmos3.vae_config import VaeConfig
from taktline_worker.models.cosmos3.work import PHASES, phase_work

EMPTY_TOKENS = 10
_WEIGHT_BYTES = {"fp32": (4.0, 4.0), "bf16": (2.0, 2.0), "fp8": (2.0, 1.0)}
"""Of the encoder, and of the tower of video and actions."""


class Cosmos3Profile:
    """A request in the steady state: frames on the device, texts encoded before.

    Args:
        policy: family's short name in results.
        runner: eager, or of captured graphs.
        text: tokens of the prompt.
    """

    def __init__(self, policy: str, runner: GraphRunner, vae_config: VaeConfig, precision: str, text: int) -> None:
        self.policy = policy
        self._runner, self._vae, self._text = runner, vae_config, text
        self.precision = precision
        self.device = str(runner.device)
        self.captured = bool(runner.captured)
        s = runner.settings
        self.shape = {
            "tokens": runner.tokens,
            "action_rows": s.action_rows,
            "prompt_tokens": text,
            "encoded_frames": s.encoded_frames,
            "steps": s.steps,
            "passes": s.steps + sum(runner.guided),
        }

    def phases(self, batch: int) -> Sequence[Phase]:
        """Encoding and denoising; the second reads what lies in the buffers."""
        runner, buffers, frames = self._runner, self._loaded(batch), self._frames(batch)
        calls: dict[str, Callable[[], object]] = {
            "encode": lambda: Cosmos3Runner.encode(runner, frames),
            "denoise": lambda: Cosmos3Runner.compute(runner, buffers),
        }
        work = phase_work(
            runner.architecture,
            runner.settings,
            self._vae,
            batch=batch,
            text=self._text,
            empty_text=EMPTY_TOKENS,
            encoder_bytes=_WEIGHT_BYTES[self.precision][0],
            tower_bytes=_WEIGHT_BYTES[self.precision][1],
        )
        return [Phase(name, _inferring(calls[name]), work[name].flops, work[name].bytes) for name in PHASES]

    def whole(self, batch: int) -> Callable[[], object]:
        """One request of `batch` rows: frames to latents, and all solver steps; returns the denoised state."""
        runner, buffers, frames = self._runner, self._loaded(batch), self._frames(batch)
        _, height, width = runner.settings.latent_grid

        def run() -> Tensor:
            clean = runner.encode(frames)[:, :, :1, :height, :width]
            buffers.clean[:batch].copy_(modules.patchify(clean))
            runner.compute(buffers)
            return buffers.result[:batch]

        return _inferring(run)

    def _frames(self, batch: int) -> Tensor:
        s = self._runner.settings
        generator = torch.Generator().manual_seed(1)
        one = torch.rand(3, s.encoded_frames, *s.padded, generator=generator) * 2 - 1
        return one.expand(batch, *one.shape).to(self._runner.device)

    def _loaded(self, batch: int) -> Buffers:
        """The bucket of `batch` rows with a request in it, as a graph reads it."""
        runner = self._runner
        s, vocabulary = runner.settings, runner.architecture.vocabulary
        generator = torch.Generator().manual_seed(2)
        rows = []
        for seed in range(batch):
            video, actions = draw_noise(s, runner.architecture.action_width, seed)
            tokens = torch.randint(vocabulary, (self._text,), generator=generator).tolist()
            state = torch.rand(s.raw_dims, generator=generator) if s.state_row else None
            empty = tuple(range(EMPTY_TOKENS))
            frames = torch.zeros(3, s.encoded_frames, *s.padded)
            rows.append(PolicyRequest(tuple(tokens), empty, frames, state, video, actions))
        inputs = runner.prepare(rows)
        return runner.load(inputs, runner.bucket_for(batch, self._text, False))


def _inferring(call: Callable[[], object]) -> Callable[[], object]:
    """The same without gradients, whatever thread calls it."""

    def run() -> object:
        with torch.inference_mode():
            return call()

    return run
