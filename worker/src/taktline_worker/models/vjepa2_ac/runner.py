"""The V-JEPA 2-AC world model's runner: static buffers of one micro-batch, its key and value cache, and the rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from taktline_worker.models.vjepa2_ac import modules, poses, rope
from taktline_worker.models.vjepa2_ac.config import ACTION_WIDTH, POSE_WIDTH, VJepa2Architecture
from taktline_worker.models.vjepa2_ac.weights import VJepa2Weights
from taktline_worker.planning.world import Scene

StepObserver = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called with (step, predicted latents (m, T, D) before and after their norm, poses (m, 7) after the step)."""


@dataclass(frozen=True, slots=True)
class PreparedScene:
    """What all units of one plan share, on the device.

    Attributes:
        patches: (T, W) fp32, the present, embedded.
        goal: (T, D) fp32.
        pose: (7,) fp32, as sent: its angles are re-wrapped by the first integration, not here.
    """

    patches: Tensor
    goal: Tensor
    pose: Tensor


class VJepa2World:
    """Scores micro-batches on one device (`planning.world.WorldModel`). One call at a time.

    A unit copies its inputs into static buffers, then computes over buffers alone: no allocation of inputs, no host
    read, one shape for each horizon. That is what a captured graph needs, and `_launch` is where one is replayed.

    The key and value cache is valid for one unit of one round: actions are new in every unit, and the patches of frame
    0 attend to them.

    Args:
        micro_batch: candidates of a unit.
        max_horizon: longest rollout; sizes the cache.
    """

    def __init__(
        self, weights: VJepa2Weights, architecture: VJepa2Architecture, micro_batch: int, max_horizon: int
    ) -> None:
        a = architecture
        self.weights = weights
        self.architecture = a
        self.micro_batch = micro_batch
        self.max_horizon = max_horizon
        self.device = weights.predictor.embed_weight.device
        precision = weights.precision
        self.dtype = torch.float64 if precision.predictor == torch.float64 else torch.float32
        self._residual = precision.residual
        encoder = rope.tables(rope.frame_positions(a.grid, 0), a.encoder_head_dim, self.dtype)
        self._encoder_tables = encoder[0].to(self.device), encoder[1].to(self.device)
        self._tables = []
        for frame in range(max_horizon):
            positions = rope.frame_positions(a.grid, frame, modules.CONDITIONING)
            cos, sin = rope.tables(positions, a.head_dim, self.dtype)
            self._tables.append((cos.to(self.device), sin.to(self.device)))
        m, k = micro_batch, a.frame_tokens
        cache = (a.depth, m, a.heads, max_horizon * k, a.head_dim)
        self._keys = torch.zeros(cache, device=self.device, dtype=precision.predictor)
        self._values = torch.zeros(cache, device=self.device, dtype=precision.predictor)
        self._actions = torch.zeros(m, max_horizon, ACTION_WIDTH, device=self.device, dtype=self.dtype)
        self._patches = torch.zeros(a.tokens, a.width, device=self.device, dtype=self.dtype)
        self._goal = torch.zeros(a.tokens, a.encoder_width, device=self.device, dtype=self.dtype)
        self._pose = torch.zeros(POSE_WIDTH, device=self.device, dtype=self.dtype)
        self._energies = torch.zeros(m, device=self.device, dtype=self.dtype)

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """Latents (N, T, D), fp32, of frames (N, 3, size, size), each encoded alone and layer-normed."""
        return modules.latent_norm(self.encode_raw(pixels)).to(self.dtype)

    @torch.inference_mode()
    def encode_raw(self, pixels: Tensor) -> Tensor:
        """The encoder's own output (N, T, D), before the planner's layer norm."""
        cos, sin = self._encoder_tables
        # One frame a call: a plan must not depend on how many frames were encoded beside its own.
        return torch.cat(
            [
                modules.encode(self.weights.encoder, frame[None], cos, sin, self.architecture.encoder_heads)
                for frame in pixels.to(self.device)
            ]
        )

    @torch.inference_mode()
    def prepare(self, scene: Scene) -> PreparedScene:
        """Embeds the present once a plan."""
        return PreparedScene(
            patches=modules.embed_latents(self.weights.predictor, scene.latent),
            goal=scene.goal.to(self.dtype),
            pose=scene.pose.to(self.dtype),
        )

    @torch.inference_mode()
    def score(self, prepared: PreparedScene, actions: Tensor, energies: Tensor) -> None:
        """See `WorldModel.score`: mean absolute latent distance to the goal after the last action."""
        self._load(prepared, actions)
        self._launch(actions.shape[1])
        energies.copy_(self._energies)

    @torch.inference_mode()
    def rollout(self, prepared: PreparedScene, actions: Tensor, observer: StepObserver) -> Tensor:
        """The energies (m,) of one unit (m, horizon, 7), with every step shown to `observer`."""
        self._load(prepared, actions)
        self._compute(actions.shape[1], observer)
        return self._energies.clone()

    @torch.inference_mode()
    def poses(self, scene: Scene, actions: Tensor) -> Tensor:
        """See `WorldModel.poses`; needs no network."""
        pose, found = scene.pose.to(self.dtype), []
        for action in actions:
            pose = poses.integrate(pose, action)
            found.append(pose)
        return torch.stack(found)

    def synchronize(self) -> None:
        """See `WorldModel.synchronize`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _load(self, prepared: PreparedScene, actions: Tensor) -> None:
        self._actions[:, : actions.shape[1]].copy_(actions)
        self._patches.copy_(prepared.patches)
        self._goal.copy_(prepared.goal)
        self._pose.copy_(prepared.pose)

    def _launch(self, horizon: int) -> None:
        """Runs the unit that lies in the buffers; eager here."""
        self._compute(horizon)

    def _compute(self, horizon: int, observer: StepObserver | None = None) -> None:
        weights, m = self.weights.predictor, self.micro_batch
        frame_tokens = self.architecture.frame_tokens
        pose = self._pose.expand(m, -1)
        patches = self._patches.expand(m, -1, -1)
        latents = self._goal
        for step in range(horizon):
            action = self._actions[:, step]
            x = modules.frame_tokens(weights, action, pose, patches, self._residual)
            cos, sin = self._tables[step]
            x = modules.predictor_frame(weights, x, self._keys, self._values, step * frame_tokens, cos, sin)
            raw = modules.predictor_output(weights, x)
            latents = modules.latent_norm(raw)
            pose = poses.integrate(pose, action)
            if observer is not None:
                observer(step, raw, latents, pose)
            if step + 1 < horizon:
                patches = modules.embed_latents(weights, latents)
        self._energies.copy_(modules.energy(latents, self._goal))
