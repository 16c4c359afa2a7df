"""The V-JEPA 2-AC adapter: a checkpoint folder as a world model and a search, behind every family's interface."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig, SearchOptions

from taktline_worker.adapter import Description, PlannedChunk
from taktline_worker.checkpoint import read_sidecar, verify_digests
from taktline_worker.devices import choose_device
from taktline_worker.models.vjepa2_ac.config import (
    ACTION_WIDTH,
    POSE_WIDTH,
    PUBLISHED_CONTROL_PERIOD_S,
    Sidecar,
)
from taktline_worker.models.vjepa2_ac.processor import PendingPlannerRow, PlannerProcessor, PlannerRow
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import BF16, FP32, find_file, open_checkpoint, pack_weights
from taktline_worker.observation import RobotInput
from taktline_worker.planning.mesh import OneRank
from taktline_worker.planning.ranks import FixedRanks, FollowerRanks, Ranks
from taktline_worker.planning.relay import lead
from taktline_worker.planning.round_times import RoundTimes
from taktline_worker.planning.search import Plan, Problem
from taktline_worker.planning.settings import SearchLimits, SearchSettings, check
from taktline_worker.planning.world import Scene

logger = logging.getLogger(__name__)

FAMILY = "vjepa2-ac"
_MICRO_BATCH_CUDA = 100
"""800 candidates are 8 units then: whole shares for 1, 2, 4 and 8 ranks."""
_MICRO_BATCH_CPU = 16
_DIMENSIONS = ("x", "y", "z", "gripper")


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What `run` hands to `finish` for one row; tensors are on the CPU."""

    plan: Plan | None
    error: TaktlineError | None = None


class VJepa2Adapter:
    """One loaded planner. Rows of a batch are searched side by side, each as if alone.

    Args:
        ranks: those that share the search; this process is rank 0. None = it is the only one.
        clock: monotonic seconds, the clock of `RobotInput.expires_at`.
    """

    def __init__(
        self,
        world: VJepa2World,
        processor: PlannerProcessor,
        precision: str,
        control_period_s: float,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.world = world
        self.processor = processor
        self.ranks = ranks if ranks is not None else FixedRanks(OneRank())
        self.round_times = RoundTimes(world.micro_batch, self.ranks.mesh().size)
        self._clock = clock
        self.description = Description(
            family=FAMILY,
            precision=precision,
            device=str(world.device),
            cameras=processor.cameras,
            optional_cameras=(),
            state_dim=POSE_WIDTH,
            action_dim=ACTION_WIDTH,
            horizon=processor.settings.horizon,
            control_period_s=control_period_s,
        )

    def begin(self, observation: RobotInput, pool: Executor) -> PendingPlannerRow:
        """Checks an observation and starts decoding its images. Raises TaktlineError where it does not fit."""
        return self.processor.begin(observation, pool)

    def run(self, rows: Sequence[PlannerRow], bucket: int) -> list[_Outcome]:
        """Plans of all rows, or the refusal of those whose budget is too short for one round."""
        del bucket  # units have a fixed shape already; a batch of fewer robots is just fewer of them
        began = self._clock()
        round_s = sum(self.round_times.round_s(row.settings) or 0.0 for row in rows)
        deadlines = [_deadline(row, began) for row in rows]
        outcomes: dict[int, _Outcome] = {}
        for index, deadline in enumerate(deadlines):
            if deadline is not None and began + round_s > deadline:
                outcomes[index] = _Outcome(None, _too_short(deadline - began, round_s, len(rows)))
        kept = [index for index in range(len(rows)) if index not in outcomes]
        if kept:
            problems = [self._problem(rows[index], deadlines[index]) for index in kept]
            plans = [_to_cpu(plan) for plan in self._plan(problems)]
            elapsed_s = self._clock() - began
            self.round_times.learn(
                [(rows[index].settings, plan.rounds) for index, plan in zip(kept, plans, strict=True)], elapsed_s
            )
            outcomes |= {index: _Outcome(plan) for index, plan in zip(kept, plans, strict=True)}
        return [outcomes[index] for index in range(len(rows))]

    def finish(self, rows: Sequence[PlannerRow], outputs: Sequence[_Outcome]) -> list[PlannedChunk | TaktlineError]:
        """Each plan in robot units, or its row's error; a plan that is not finite is an error."""
        assert len(rows) == len(outputs)
        return [outcome.error or _chunk(outcome.plan) for outcome in outputs]

    def largest_row(self) -> PlannerRow:
        """The deployment's own search on neutral images; requests may ask for more, up to the limits."""
        size = self.processor.image_size
        return PlannerRow(
            pixels=torch.zeros(2, 3, size, size),
            pose=torch.zeros(POSE_WIDTH),
            settings=self.processor.settings,
            seed=0,
        )

    def _plan(self, problems: Sequence[Problem]) -> list[Plan]:
        """Plans on the mesh; where a rank is lost, once more on this one alone, with bit-identical results.

        A search with a budget still ends by it: it gets as many rounds as are left, at least one.
        """
        mesh = self.ranks.mesh()
        if mesh.size != self.round_times.ranks:
            self.round_times = RoundTimes(self.world.micro_batch, mesh.size)
        try:
            plans = lead(self.world, problems, mesh, self._clock)
            if self.ranks.sound():
                return plans
            cause = "a follower ended during the plan"
        except RuntimeError as error:  # what torch.distributed raises for a closed connection or a timeout
            if mesh.size == 1:
                raise
            cause = str(error)[:500]
        logger.error("a plan lost a rank; it is made again by this one", extra={"ranks": mesh.size, "cause": cause})
        self.ranks.lost()
        self.round_times = RoundTimes(self.world.micro_batch)
        return lead(self.world, problems, OneRank(), self._clock)

    def close(self) -> None:
        """Lets the other ranks go."""
        self.ranks.close()

    def _problem(self, row: PlannerRow, deadline: float | None) -> Problem:
        latent, goal = self.world.encode(row.pixels)
        scene = Scene(latent, goal, row.pose.to(self.world.device))
        if row.pending is not None:
            scene = self.world.predict(scene, row.pending)
        return Problem(scene, row.settings, row.seed, row.previous, deadline)


def load(config: EngineConfig) -> VJepa2Adapter:
    """Loads the checkpoint that `config` names, after all startup checks.

    Raises:
        TaktlineError: CHECKPOINT_INVALID, CONFIG_INVALID or SEARCH_INVALID with the reason and the next step.
    """
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise _config_error(f"model.path {folder} is no folder", "mount the volume that holds the checkpoint")
    verify_digests(folder, config.model.sha256)
    sidecar = read_sidecar(folder, Sidecar, "docs/planner.md")
    device = choose_device(config.engine.device)
    parallel = config.engine.parallel
    if parallel.tp != 1 or parallel.cfg != 1 or (parallel.dp != 1 and parallel.search != 1):
        asked = f"dp {parallel.dp}, cfg {parallel.cfg}, tp {parallel.tp}, search {parallel.search}"
        raise _config_error(
            f"engine.parallel asks for {asked}",
            "a planner has either dp (plans side by side) or search (ranks that share one plan)",
        )
    options = config.engine.search or SearchOptions()
    settings, limits = resolve_search(options, config.engine.action_horizon)
    period_s = _control_period_s(sidecar, config.engine.control_period_ms)
    image_size = sidecar.architecture.image_size
    # Before the weights: a wrong camera name must not cost minutes of loading.
    processor = PlannerProcessor(image_size, settings, limits, config.model.cameras, config.engine.max_image_pixels)
    checkpoint = open_checkpoint(find_file(folder), sidecar.architecture)
    quantised = config.engine.precision == "fp8"
    precision = {"fp32": FP32, "bf16": BF16, "fp8": BF16}[config.engine.precision]
    weights = pack_weights(checkpoint, precision, device)
    micro_batch = options.micro_batch or (_MICRO_BATCH_CUDA if device.type == "cuda" else _MICRO_BATCH_CPU)
    world = VJepa2World(
        weights,
        checkpoint.architecture,
        micro_batch,
        limits.horizon,
        fused=True if quantised else None,
        quantised=quantised,
    )
    world.capture()
    ranks = FollowerRanks(config, parallel.search, device) if parallel.search > 1 else None
    return VJepa2Adapter(world, processor, config.engine.precision, period_s, ranks)


def resolve_search(options: SearchOptions, horizon: int | None) -> tuple[SearchSettings, SearchLimits]:
    """The deployment's search and what its requests may ask for.

    Args:
        horizon: EngineOptions.action_horizon, which means the same as `options.horizon` and comes first.

    Raises:
        TaktlineError: SEARCH_INVALID for a setting out of range, CONFIG_INVALID for a pin of an unknown dimension.
    """
    unknown = sorted(options.pins.keys() - set(_DIMENSIONS))
    if unknown:
        raise _config_error(f"search.pins names {unknown}", f"pin one of {', '.join(_DIMENSIONS)}")
    settings = SearchSettings(
        optimiser=options.optimiser,
        candidates=options.candidates,
        rounds=options.rounds,
        elites=options.elites,
        horizon=horizon or options.horizon,
        max_step_m=options.max_step_m,
        momentum_mean=options.momentum_mean,
        momentum_std=options.momentum_std,
        momentum_mean_gripper=options.momentum_mean_gripper,
        momentum_std_gripper=options.momentum_std_gripper,
        pins={_DIMENSIONS.index(name): value for name, value in options.pins.items()},
        close_gripper=options.close_gripper,
        convergence=options.convergence,
        anytime=options.anytime,
    )
    limits = SearchLimits(
        candidates=options.max_candidates,
        rounds=options.max_rounds,
        horizon=options.max_horizon or settings.horizon,
    )
    check(settings, limits)
    return settings, limits


def _control_period_s(sidecar: Sidecar, stated_ms: float | None) -> float:
    period_ms = sidecar.control_period_ms if stated_ms is None else stated_ms
    period_s = PUBLISHED_CONTROL_PERIOD_S if period_ms is None else period_ms / 1000.0
    if not 0 < period_s <= 60:
        raise _config_error(
            f"the control period is {period_s * 1000:g} ms",
            "set spec.engine.controlPeriodMs to the time between two planned actions",
        )
    return period_s


def _deadline(row: PlannerRow, began: float) -> float | None:
    ends = [] if row.budget_s is None else [began + row.budget_s]
    if row.settings.anytime and row.expires_at is not None:
        ends.append(row.expires_at)
    return min(ends, default=None)


def _to_cpu(plan: Plan) -> Plan:
    return Plan(plan.actions.cpu(), plan.poses.cpu(), plan.energies.cpu(), plan.rounds, plan.stopped)


def _chunk(plan: Plan | None) -> PlannedChunk | TaktlineError:
    assert plan is not None
    if not bool(torch.isfinite(plan.actions).all() and torch.isfinite(plan.energies).all()):
        return TaktlineError(
            ErrorCode.WORKER_FAILED,
            "the search's energies are not finite",
            "check the observation's state; if others fail too, check the checkpoint",
        )
    return PlannedChunk(
        actions=plan.actions.float().numpy(),
        predicted_states=plan.poses.float().numpy(),
        energies=plan.energies.float().numpy(),
        stopped=plan.stopped,
    )


def _too_short(left_s: float, round_s: float, plans: int) -> TaktlineError:
    company = f" of {plans} plans side by side" if plans > 1 else ""
    return TaktlineError(
        ErrorCode.DEADLINE_UNREACHABLE,
        f"{left_s * 1000.0:.1f} ms are left for the search; one round{company} takes {round_s * 1000.0:.1f} ms here",
        "send a larger budget, ask for fewer candidates, or add ranks",
    )


def _config_error(message: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.CONFIG_INVALID, message, next_step)
