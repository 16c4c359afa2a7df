"""Plans of one planner on meshes of several sizes: measured, and the latency model that they determine."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig
from taktline_protocol.deployment import SearchOptions as Options
from taktline_protocol.search_latency import LatencyModel, unit_on, units_of

from taktline_worker.devices import choose_device
from taktline_worker.lifecycle import read_config
from taktline_worker.models.vjepa2_ac import inspection
from taktline_worker.models.vjepa2_ac.adapter import FAMILY, load
from taktline_worker.planning.latency import Measurement, fit
from taktline_worker.profiling.figure import empty_figure


@dataclass(frozen=True)
class RankTimes:
    """What was measured, and what fits it.

    Attributes:
        measurements: one for each number of ranks, the median of its runs.
        plans_equal: whether all meshes gave the same plan, to the last bit.
        units: that the candidates of a round are scored in.
    """

    measurements: tuple[Measurement, ...]
    plans_equal: bool
    candidates: int
    units: int
    horizon: int
    precision: str
    device: str

    @functools.cached_property
    def model(self) -> LatencyModel:
        """The fit. Raises TaktlineError CONFIG_INVALID where fewer than three sizes were measured, or 1 was not."""
        return fit(self.measurements, self.units)


def check_sizes(sizes: Sequence[int]) -> None:
    """Raises TaktlineError CONFIG_INVALID where plans on so many ranks cannot determine the latency model."""
    wanted = sorted(set(sizes))
    if len(wanted) < 3 or wanted[0] != 1:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"{wanted} ranks do not determine the three constants of the model",
            "measure 1 and at least two more, e.g. --ranks 1,2,4",
        )


def default_sizes(config: EngineConfig, candidates: int = 0) -> list[int]:
    """Three numbers of ranks to measure: the fewest that divide the units of a round, then others with smaller shares.

    Shares that are all of one size are what further ranks are best told from.
    """
    options = config.engine.search or Options()
    unit = options.micro_batch or unit_on(choose_device(config.engine.device).type)
    units = units_of(candidates or options.candidates, unit)
    useful = list(LatencyModel(1.0, 0.0, 0.0, units).useful(units))
    return sorted(sorted(useful, key=lambda ranks: (units % ranks != 0, ranks))[:3])


def planner_config(source: Path, device: str, precision: str) -> EngineConfig:
    """The engine config in `source`, or one for the checkpoint folder `source` with the published search.

    Raises:
        TaktlineError: CONFIG_INVALID where it is neither, or of another family.
    """
    if source.is_dir():
        if not inspection.recognises(source):
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"{source} holds no world model",
                f"give the checkpoint folder of a {FAMILY} policy; `taktline profile` is for the others",
            )
        options = EngineOptions(device=device, precision=precision or "bf16", search=Options())  # type: ignore[arg-type]
        model = ModelConfig(family=FAMILY, path=str(source), revision="profile")
        return EngineConfig(policy=source.name, model=model, engine=options)
    config = read_config(source)
    if config.model.family != FAMILY:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"{source} is for family {config.model.family}, which does not plan",
            f"give the engine.json or checkpoint folder of a {FAMILY} policy; `taktline profile` is for the others",
        )
    changes = {"device": device} | ({"precision": precision} if precision else {})
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, **changes))


def measure(
    config: EngineConfig,
    sizes: Sequence[int],
    runs: int,
    say: Callable[[str], None],
    rounds: int = 0,
    candidates: int = 0,
) -> RankTimes:
    """Loads the planner once for each number of ranks, and times its deployment's own search on neutral images.

    Args:
        sizes: ranks; 1 and at least two more where the model is wanted.
        runs: plans of each, after one more.
        rounds: instead of the deployment's own; likewise `candidates`.

    Raises:
        TaktlineError: what loading refuses.
    """
    measurements, plans = [], []
    for size in sorted(set(sizes)):
        say(f"loading on {size} rank{'s' if size > 1 else ''}")
        parallel = msgspec.structs.replace(config.engine.parallel, search=size, dp=1)
        engine = msgspec.structs.replace(config.engine, parallel=parallel)
        adapter = load(msgspec.structs.replace(config, engine=engine))
        try:
            row = adapter.largest_row()
            settings = replace(
                row.settings,
                rounds=rounds or row.settings.rounds,
                candidates=candidates or row.settings.candidates,
            )
            row = replace(row, settings=settings)
            seconds = []
            for run in range(runs + 1):
                say(f"{size} rank{'s' if size > 1 else ''}: plan {run} of {runs}")
                began = time.perf_counter()
                (outcome,) = adapter.run([row], 1)
                if run:
                    seconds.append(time.perf_counter() - began)
            if outcome.plan is None:
                raise outcome.error or AssertionError("a plan without a budget has no reason to fail")
            measurements.append(Measurement(size, outcome.plan.rounds, statistics.median(seconds)))
            plans.append((outcome.plan.actions.numpy().tobytes(), outcome.plan.energies.numpy().tobytes()))
        finally:
            adapter.close()
    return RankTimes(
        measurements=tuple(measurements),
        plans_equal=len(set(plans)) == 1,
        candidates=settings.candidates,
        units=units_of(settings.candidates, adapter.world.micro_batch),
        horizon=settings.horizon,
        precision=adapter.description.precision,
        device=adapter.description.device,
    )


def draw(times: RankTimes, path: Path, deadline_s: float | None = None) -> None:
    """Seconds of a plan by ranks: the measured points, the model through them, and the deadline if there is one.

    Raises:
        TaktlineError: CONFIG_INVALID where matplotlib is not installed.
    """
    figure = empty_figure(6.4, 4.2)
    rounds = times.measurements[0].rounds
    most = max(8, max(one.ranks for one in times.measurements))
    ranks = list(range(1, most + 1))
    axes = figure.subplots()
    axes.plot(ranks, [times.model.plan_s(one, rounds) for one in ranks], color="#0072B2", label="model")
    points = times.measurements
    axes.plot([one.ranks for one in points], [one.seconds for one in points], "o", color="#D55E00", label="measured")
    if deadline_s is not None:
        axes.axhline(deadline_s, color="#555555", linestyle="--", label=f"deadline {deadline_s:g} s")
    axes.set_xlabel("ranks")
    axes.set_ylabel("seconds a plan")
    axes.set_xticks(ranks)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{times.candidates} candidates, {rounds} rounds, {times.precision} on {times.device}")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
