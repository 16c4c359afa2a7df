"""The search itself: rounds of sampling, scoring and fitting, for one or several robots at once, on any mesh.

Nothing here waits for the device unless a search watches a clock or its own convergence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from taktline_protocol.search_latency import units_of
from torch import Tensor

from taktline_worker.devices import sent
from taktline_worker.planning.cem import CrossEntropy, elites
from taktline_worker.planning.mesh import Mesh, OneRank, share
from taktline_worker.planning.mppi import PathIntegral
from taktline_worker.planning.optimiser import CONTROLLED, ActionSpace, Belief, Optimiser
from taktline_worker.planning.settings import SearchSettings
from taktline_worker.planning.world import Scene, WorldModel

Stopped = Literal["rounds", "converged", "budget"]

Observer = Callable[[int, int, Tensor, Tensor], None]
"""Called with (problem, round, actions (S, h, 7), energies (S,)) before each fit, for tests and reports."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One robot's search.

    Attributes:
        seed: of the noise; equal seeds give equal plans on any mesh of one kind of device.
        previous: (n, 7) the last plan, whose tail is the first mean; None starts at zero.
        deadline: instant of the injected clock after which no round may end; None = all rounds.
        noise: (rounds, horizon, candidates, 4) standard normals instead of the seed's.
    """

    scene: Scene
    settings: SearchSettings
    seed: int = 0
    previous: Tensor | None = None
    deadline: float | None = None
    noise: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a search found; tensors on the world model's device.

    Attributes:
        actions: (horizon, 7), the mean after the last round: exactly the plan of a search with that many rounds.
        poses: (horizon, 7), where the model expects the end effector after each action.
        energies: (rounds run, 2): the lowest energy of each round, and the elites' mean.
        rounds: how many were run.
        stopped: why no further one was.
    """

    actions: Tensor
    poses: Tensor
    energies: Tensor
    rounds: int
    stopped: Stopped


@dataclass(frozen=True, slots=True)
class Standing:
    """One search between two rounds: enough to answer with, on the CPU, and to go on from.

    Attributes:
        actions: (horizon, 7) on the CPU, the plan so far.
        energies: (rounds, 2) on the CPU, as a plan's.
        belief: what the next round samples, on the search's device.
        rounds: how many were run.
        stopped: why no further one will be; None where one is due.
    """

    actions: Tensor
    energies: Tensor
    belief: Belief
    rounds: int
    stopped: Stopped | None


def draw_noise(seed: int, settings: SearchSettings, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normals (rounds, horizon, candidates, 4) of one search, drawn on the CPU.

    One generator a search, in the official order (round by round, step by step): the values depend on neither the
    device nor the number of ranks, and equal those of the official planner run on a CPU with this seed.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (settings.candidates, CONTROLLED)
    draws = [torch.randn(shape, generator=generator) for _ in range(settings.rounds * settings.horizon)]
    return torch.stack(draws).view(settings.rounds, settings.horizon, *shape).to(dtype)


class ScoringError(RuntimeError):
    """Rank 0's world model failed in a search that the other ranks went through to its end; the cause is chained."""


class _Search:
    """The state of one problem between rounds."""

    def __init__(self, world: WorldModel, problem: Problem, start: Standing | None) -> None:
        s = problem.settings
        self.problem = problem
        self.prepared: Any = world.prepare(problem.scene)
        self.space = ActionSpace(s, world.device, world.dtype)
        self.optimiser: Optimiser = (
            CrossEntropy(self.space, s.elites) if s.optimiser == "cem" else PathIntegral(self.space, s.temperature)
        )
        noise = draw_noise(problem.seed, s) if problem.noise is None else problem.noise
        self.noise = sent(noise, world.device, world.dtype)
        self.belief = self.space.first(problem.previous)
        self.units = units_of(s.candidates, world.micro_batch)
        self.actions = torch.zeros(0)
        self.round = 0
        self.history: list[Tensor] = []
        self.stopped: Stopped | None = None
        if start is not None:
            self.belief, self.round, self.stopped = start.belief, start.rounds, start.stopped
            self.history = list(sent(start.energies, world.device))

    def sample(self, micro_batch: int) -> Tensor:
        """This round's units (units, micro_batch, horizon, 7); the last one is padded with zero actions."""
        self.actions = self.space.sample(self.belief, self.noise[self.round])
        padded = self.actions.new_zeros(self.units * micro_batch, *self.actions.shape[1:])
        padded[: len(self.actions)] = self.actions
        return padded.reshape(self.units, micro_batch, *self.actions.shape[1:])

    def fit(self, energies: Tensor) -> None:
        """Ends the round with the energies (candidates,)."""
        s = self.problem.settings
        best = energies.index_select(0, elites(energies, s.elites))
        self.history.append(torch.stack((best[0], best.mean())))
        self.belief = self.optimiser.update(self.belief, self.actions, energies)
        self.round += 1
        if self.round == s.rounds:
            self.stopped = "rounds"
        elif s.convergence and float(self.space.spread(self.belief)) <= s.convergence:
            self.stopped = "converged"

    def standing(self) -> Standing:
        """Where it stands; waits for the device."""
        actions = self.space.answer(self.belief).cpu()
        return Standing(actions, torch.stack(self.history).cpu(), self.belief, self.round, self.stopped)

    def plan(self, world: WorldModel) -> Plan:
        """The answer after the rounds that were run."""
        assert self.stopped is not None
        actions = self.space.answer(self.belief)
        poses = world.poses(self.problem.scene, actions)
        return Plan(actions, poses, torch.stack(self.history), self.round, self.stopped)


class Searches:
    """Searches of several robots side by side, between rounds: `sample`, `score`, `fit`, and `stop` where clocks count.

    The state follows from the problems and each round's energies alone: whoever has those can take it up.

    Args:
        start: by problem, where to go on from.
    """

    def __init__(
        self, world: WorldModel, problems: Sequence[Problem], start: Sequence[Standing | None] | None = None
    ) -> None:
        self._world = world
        starts = [None] * len(problems) if start is None else start
        self._all = [_Search(world, problem, one) for problem, one in zip(problems, starts, strict=True)]
        self._active: list[_Search] = []
        self._units: list[tuple[_Search, Tensor]] = []

    @property
    def running(self) -> bool:
        """Whether a further round is due."""
        return any(one.stopped is None for one in self._all)

    def sample(self) -> int:
        """Draws the next round's units, robot by robot; returns how many there are. Drawing again changes nothing."""
        self._active = [one for one in self._all if one.stopped is None]
        size = self._world.micro_batch
        self._units = [(one, actions) for one in self._active for actions in one.sample(size)]
        return len(self._units)

    def score(self, own: Sequence[int]) -> Tensor:
        """Energies (len(own), micro_batch) of the units `own` of the round that was drawn."""
        mine = torch.zeros(len(own), self._world.micro_batch, device=self._world.device, dtype=self._world.dtype)
        for row, index in zip(mine, own, strict=True):
            one, actions = self._units[index]
            self._world.score(one.prepared, actions, row)
        return mine

    def fit(self, energies: Tensor, observer: Observer | None = None) -> None:
        """Ends the round that was drawn with the energies (units, micro_batch) of all its units."""
        start = 0
        for one in self._active:
            scored = energies[start : start + one.units].reshape(-1)[: one.problem.settings.candidates]
            start += one.units
            if observer is not None:
                observer(self._all.index(one), one.round, one.actions, scored)
            one.fit(scored)

    def stop(self, late: Sequence[bool]) -> None:
        """Ends the searches whose budget is too short for one more round; others that have ended keep their reason."""
        for one, flag in zip(self._all, late, strict=True):
            if flag and one.stopped is None:
                one.stopped = "budget"

    def standings(self) -> list[Standing]:
        """Where each search stands after a round; waits for the device."""
        return [one.standing() for one in self._all]

    def plans(self) -> list[Plan]:
        """The answers, once nothing runs any more."""
        return [one.plan(self._world) for one in self._all]


def late(problems: Sequence[Problem], now: float, round_s: float) -> list[bool]:
    """Whose deadline comes before another round of `round_s` would end."""
    return [problem.deadline is not None and now + round_s > problem.deadline for problem in problems]


def search(
    world: WorldModel,
    problems: Sequence[Problem],
    mesh: Mesh | None = None,
    clock: Callable[[], float] = time.monotonic,
    observer: Observer | None = None,
    standings: Callable[[list[Standing], float], None] | None = None,
    start: Sequence[Standing | None] | None = None,
) -> list[Plan]:
    """Plans for several robots side by side: each round, the units of all of them are spread over the mesh.

    A unit never mixes robots, so every plan is bit-identical to the one its robot gets alone, and to the one of any
    other number of ranks. A search with a deadline stops before the round that would end after it; its first round is
    always run (the caller refuses budgets that are too short for one). The plans are returned together, when the last
    search has ended.

    A world model that fails on rank 0 of a mesh must not leave the others in the middle of a collective: it scores no
    further unit, and takes part in all that is left.

    Args:
        mesh: all its ranks must call with equal problems; None = this process alone.
        clock: monotonic seconds; only rank 0's is read.
        standings: called after each round of a search with a deadline, with where all of them stand and the seconds of
            that round.
        start: by problem, where to go on from; this process alone.

    Raises:
        ScoringError: see above; a search of this process alone raises what its world model does.
        RankLostError: a rank is gone.
    """
    mesh = mesh if mesh is not None else OneRank()
    searches = Searches(world, problems, start)
    timed = any(problem.deadline is not None for problem in problems)
    failed: Exception | None = None
    while searches.running:
        began = clock() if timed else 0.0
        units = searches.sample()
        own = share(mesh.rank, mesh.size, units)
        if failed is None:
            try:
                mine = searches.score(own)
            except Exception as error:
                if mesh.size == 1 or mesh.rank:  # a process that ends is how the others learn of it
                    raise
                failed = error
        if failed is not None:
            mine = torch.full((len(own), world.micro_batch), torch.nan, device=world.device, dtype=world.dtype)
        searches.fit(mesh.gather(mine, units), observer)
        if timed:
            world.synchronize()
            now = clock()
            # All of them where it failed: what is left would be scored in vain.
            ends = late(problems, now, now - began) if failed is None else [True] * len(problems)
            searches.stop(mesh.agree(torch.tensor(ends, dtype=torch.int64)).tolist())
            if standings is not None and failed is None:
                standings(searches.standings(), now - began)
    if failed is not None:
        raise ScoringError(f"the world model failed: {failed}") from failed
    return searches.plans()
