"""The V-JEPA 2-AC adapter: a checkpoint folder as a world model and a search, behind every family's interface."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from taktline_protocol import TaktlineError
from taktline_protocol.deployment import EngineConfig, SearchOptions
from taktline_protocol.search_latency import unit_on

from taktline_worker.checkpoint import read_sidecar, verify_digests
from taktline_worker.devices import choose_device, sent
from taktline_worker.engine_options import config_error
from taktline_worker.fp8_layers import check_device
from taktline_worker.models.vjepa2_ac.config import PUBLISHED_CONTROL_PERIOD_S, Sidecar
from taktline_worker.models.vjepa2_ac.planner import FAMILY, PlannerAdapter, ends_of
from taktline_worker.models.vjepa2_ac.processor import PlannerProcessor, PlannerRow
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import BF16, FP32, find_file, open_checkpoint, pack_weights
from taktline_worker.planning.group_ranks import start_ranks
from taktline_worker.planning.mesh import OneRank
from taktline_worker.planning.ranks import FixedRanks, Ranks
from taktline_worker.planning.round_times import RoundTimes
from taktline_worker.planning.search import Plan, Problem
from taktline_worker.planning.settings import SearchLimits, SearchSettings, check
from taktline_worker.planning.timely import TimelySearch
from taktline_worker.planning.world import Scene

logger = logging.getLogger(__name__)

__all__ = ["FAMILY", "VJepa2Adapter", "load"]

_DIMENSIONS = ("x", "y", "z", "gripper")


class VJepa2Adapter(PlannerAdapter):
    """One loaded planner, alone or as rank 0 of a mesh.

    Args:
        ranks: those that share the search; this process is rank 0. None = it is the only one.
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
        self.ranks = ranks if ranks is not None else FixedRanks(OneRank())
        self._search = TimelySearch(world, self.ranks, clock)
        times = RoundTimes(world.micro_batch, self.ranks.mesh().size)
        super().__init__(processor, str(world.device), precision, control_period_s, times, clock)

    def plans(self, rows: Sequence[PlannerRow], deadlines: Sequence[float | None]) -> list[Plan | TaktlineError]:
        """Plans on the mesh, or as much of them as can be had by their deadlines where a rank is lost.

        Without a deadline such a plan is made whole by this rank alone, with bit-identical results.
        """
        problems = [problem_of(self.world, row, deadline) for row, deadline in zip(rows, deadlines, strict=True)]
        alone = self.round_times.on(1)
        found = self._search.plans(problems, ends_of(rows, deadlines), lambda problem: alone.round_s(problem.settings))
        self.ordinary = not self._search.disturbed
        return found

    def wait_turn(self, rows: Sequence[PlannerRow], deadlines: Sequence[float | None]) -> bool:
        """See `PlannerAdapter`: the device may be waiting for a rank, and would keep the images' encoding with it."""
        waits = self._search.busy
        if waits:
            taken = self._search.wait(ends_of(rows, deadlines))
            if taken is not None:
                # The round that was late: budgets are held against what rounds take now.
                self.round_times = self.round_times.on(taken.ranks)
                self.round_times.learn(taken.work, taken.seconds)
        ranks = self.ranks.mesh().size
        if ranks != self.round_times.ranks:
            self.round_times = self.round_times.on(ranks)
        return waits

    def close(self) -> None:
        """Lets the other ranks go."""
        self._search.close()
        self.ranks.close()


def problem_of(world: VJepa2World, row: PlannerRow, deadline: float | None) -> Problem:
    """A row's search with its images encoded, tensors on the world's device."""
    latent, goal = world.encode(row.pixels)
    scene = Scene(latent, goal, sent(row.pose, world.device))
    if row.pending is not None:
        scene = world.predict(scene, row.pending)
    return Problem(scene, row.settings, row.seed, row.previous, deadline)


@dataclass(frozen=True, slots=True)
class Deployed:
    """A deployment that passed all checks but those of its weights.

    Attributes:
        limits: the most that requests may ask for.
    """

    config: EngineConfig
    sidecar: Sidecar
    processor: PlannerProcessor
    limits: SearchLimits
    control_period_s: float
    device: torch.device
    micro_batch: int


def load(config: EngineConfig) -> VJepa2Adapter:
    """Loads the checkpoint that `config` names, after all startup checks.

    Raises:
        TaktlineError: CHECKPOINT_INVALID, CONFIG_INVALID or SEARCH_INVALID with the reason and the next step.
    """
    # Before the weights: a wrong camera name must not cost minutes of loading.
    deployed = check_deployment(config)
    _check_precision(deployed)
    verify_digests(Path(config.model.path), config.model.sha256)
    world = load_world(deployed)
    ranks = start_ranks(config, deployed.device) if config.engine.parallel.search > 1 else None
    return VJepa2Adapter(world, deployed.processor, config.engine.precision, deployed.control_period_s, ranks)


def check_deployment(config: EngineConfig, device: torch.device | None = None) -> Deployed:
    """Reads what is beside the weights, and refuses what cannot work.

    Args:
        device: where the world model is to run, if that is not this process; None chooses one here.

    Raises:
        TaktlineError: CONFIG_INVALID, CHECKPOINT_INVALID or SEARCH_INVALID.
    """
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise config_error(f"model.path {folder} is no folder", "mount the volume that holds the checkpoint")
    sidecar = read_sidecar(folder, Sidecar, "docs/planner.md")
    device = device if device is not None else choose_device(config.engine.device)
    parallel = config.engine.parallel
    if parallel.tp != 1 or parallel.cfg != 1 or (parallel.dp != 1 and parallel.search != 1):
        asked = f"dp {parallel.dp}, cfg {parallel.cfg}, tp {parallel.tp}, search {parallel.search}"
        raise config_error(
            f"engine.parallel asks for {asked}",
            "a planner has either dp (plans side by side) or search (ranks that share one plan)",
        )
    options = config.engine.search or SearchOptions()
    settings, limits = resolve_search(options, config.engine.action_horizon)
    processor = PlannerProcessor(
        sidecar.architecture.image_size, settings, limits, config.model.cameras, config.engine.max_image_pixels
    )
    return Deployed(
        config=config,
        sidecar=sidecar,
        processor=processor,
        limits=limits,
        control_period_s=_control_period_s(sidecar, config.engine.control_period_ms),
        device=device,
        micro_batch=options.micro_batch or unit_on(device.type),
    )


def load_world(deployed: Deployed) -> VJepa2World:
    """Loads the weights and captures the unit of every horizon.

    Raises:
        TaktlineError: CHECKPOINT_INVALID, or CONFIG_INVALID where this GPU does not have the precision.
    """
    _check_precision(deployed)
    folder, precision = Path(deployed.config.model.path), deployed.config.engine.precision
    checkpoint = open_checkpoint(find_file(folder), deployed.sidecar.architecture)
    quantised = precision == "fp8"
    weights = pack_weights(checkpoint, {"fp32": FP32, "bf16": BF16, "fp8": BF16}[precision], deployed.device)
    world = VJepa2World(
        weights,
        checkpoint.architecture,
        deployed.micro_batch,
        deployed.limits.horizon,
        fused=True if quantised else None,
        quantised=quantised,
    )
    world.capture()
    return world


def _check_precision(deployed: Deployed) -> None:
    # Not among the deployment's checks: those may run where the world model does not. A CPU only imitates the rounding.
    if deployed.config.engine.precision == "fp8" and deployed.device.type == "cuda":
        check_device(deployed.device)


def resolve_search(options: SearchOptions, horizon: int | None) -> tuple[SearchSettings, SearchLimits]:
    """The deployment's search and what its requests may ask for.

    Args:
        horizon: EngineOptions.action_horizon, which means the same as `options.horizon` and comes first.

    Raises:
        TaktlineError: SEARCH_INVALID for a setting out of range, CONFIG_INVALID for a pin of an unknown dimension.
    """
    unknown = sorted(options.pins.keys() - set(_DIMENSIONS))
    if unknown:
        raise config_error(f"search.pins names {unknown}", f"pin one of {', '.join(_DIMENSIONS)}")
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
        temperature=options.temperature,
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
        raise config_error(
            f"the control period is {period_s * 1000:g} ms",
            "set spec.engine.controlPeriodMs to the time between two planned actions",
        )
    return period_s
