"""The V-JEPA 2-AC world model's runner: static buffers of one micro-batch, its key and value cache, and the rollout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from taktline_worker.devices import sent
from taktline_worker.graph_capture import GraphPool
from taktline_worker.graph_parts import Replayed
from taktline_worker.models.vjepa2_ac import modules, poses, rope
from taktline_worker.models.vjepa2_ac.config import ACTION_WIDTH, POSE_WIDTH, VJepa2Architecture
from taktline_worker.models.vjepa2_ac.fused import MAX_FRAMES, FusedPredictor
from taktline_worker.models.vjepa2_ac.weights import VJepa2Weights
from taktline_worker.planning.world import Scene

logger = logging.getLogger(__name__)

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
    read, one shape for each horizon. On a GPU each horizon's unit is one captured graph.

    The key and value cache is valid for one unit of one round: actions are new in every unit, and the patches of frame
    0 attend to them.

    Args:
        micro_batch: candidates of a unit.
        max_horizon: longest rollout; sizes the cache.
        fused: score with `FusedPredictor`; None = on a GPU in bf16. `rollout` is always the plain statement.
        quantised: the predictor's wide projections in e4m3; fused only.
    """

    def __init__(
        self,
        weights: VJepa2Weights,
        architecture: VJepa2Architecture,
        micro_batch: int,
        max_horizon: int,
        *,
        fused: bool | None = None,
        quantised: bool = False,
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
        m = micro_batch
        self._cache: tuple[Tensor, Tensor] | None = None
        self._graphs: dict[int, Replayed] = {}
        self._fused: FusedPredictor | None = None
        if fused is None:
            fused = self.device.type == "cuda" and precision.predictor == torch.bfloat16
            if fused and max_horizon > MAX_FRAMES:
                fused = False
                logger.warning(
                    "the fused predictor has no room for this horizon; the plain one runs, several times slower",
                    extra={"max_horizon": max_horizon, "room": MAX_FRAMES},
                )
        if fused:
            self._fused = FusedPredictor(weights.predictor, a, m, max_horizon, quantised)
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
                for frame in sent(pixels, self.device)
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

    @torch.inference_mode()
    def predict(self, scene: Scene, actions: Tensor) -> Scene:
        """Where the model expects actions (n, 7) to lead from `scene`, n at most the longest horizon; same goal."""
        latents, pose = self._rollout(
            sent(actions[None], self.device, self.dtype),
            modules.embed_latents(self.weights.predictor, scene.latent),
            scene.pose.to(self.dtype),
            self._new_caches(1, len(actions)),
        )
        return Scene(latents[0], scene.goal, pose[0])

    def synchronize(self) -> None:
        """See `WorldModel.synchronize`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _load(self, prepared: PreparedScene, actions: Tensor) -> None:
        self._actions[:, : actions.shape[1]].copy_(actions)
        self._patches.copy_(prepared.patches)
        self._goal.copy_(prepared.goal)
        self._pose.copy_(prepared.pose)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures the unit of every horizon, longest first; on a CPU there is nothing to capture."""
        if self.device.type != "cuda":
            return
        pool = GraphPool(self.device)
        units = {horizon: partial(self._unit, horizon) for horizon in range(self.max_horizon, 0, -1)}
        pool.compile(units.values())
        for horizon, unit in units.items():
            self._graphs[horizon] = pool.capture(unit, horizon=horizon, micro_batch=self.micro_batch).graph
        torch.cuda.synchronize(self.device)

    def _launch(self, horizon: int) -> None:
        """Runs the unit that lies in the buffers: its graph where there is one."""
        graph = self._graphs.get(horizon)
        if graph is None:
            self._unit(horizon)
        else:
            graph.replay()

    def _unit(self, horizon: int) -> None:
        if self._fused is None:
            self._compute(horizon)
        else:
            found = self._fused.energies(self._actions[:, :horizon], self._patches, self._goal, self._pose)
            self._energies.copy_(found)

    def _caches(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the plain statement's unit, made when it first runs."""
        if self._cache is None:
            self._cache = self._new_caches(self.micro_batch, self.max_horizon)
        return self._cache

    def _new_caches(self, candidates: int, frames: int) -> tuple[Tensor, Tensor]:
        """Two (layers, m, heads, frames * K, d)."""
        a = self.architecture
        shape = (a.depth, candidates, a.heads, frames * a.frame_tokens, a.head_dim)
        dtype = self.weights.precision.predictor
        return torch.zeros(shape, device=self.device, dtype=dtype), torch.zeros(shape, device=self.device, dtype=dtype)

    def _compute(self, horizon: int, observer: StepObserver | None = None) -> None:
        actions = self._actions[:, :horizon]
        latents, _ = self._rollout(actions, self._patches, self._pose, self._caches(), observer)
        self._energies.copy_(modules.energy(latents, self._goal))

    def _rollout(
        self,
        actions: Tensor,
        patches: Tensor,
        pose: Tensor,
        caches: tuple[Tensor, Tensor],
        observer: StepObserver | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Latents (m, T, D) and poses (m, 7) after actions (m, n, 7) from patches (T, W) and a pose (7,)."""
        weights = self.weights.predictor
        m, horizon, _ = actions.shape
        keys, values = caches
        pose = pose.expand(m, -1)
        patches = patches.expand(m, -1, -1)
        for step in range(horizon):
            action = actions[:, step]
            x = modules.frame_tokens(weights, action, pose, patches, self._residual)
            cos, sin = self._tables[step]
            x = modules.predictor_frame(weights, x, keys, values, step * self.architecture.frame_tokens, cos, sin)
            raw = modules.predictor_output(weights, x)
            latents = modules.latent_norm(raw)
            pose = poses.integrate(pose, action)
            if observer is not None:
                observer(step, raw, latents, pose)
            if step + 1 < horizon:
                patches = modules.embed_latents(weights, latents)
        return latents, pose
