"""A search whose rounds are scored by whoever is there: calls that carry what was scored so far, and a state a scorer.

A mesh is a fixed group whose ranks move in step. Here a driver asks scorers that come and go. Each call names the plan
and holds the energies of all rounds so far, so any scorer can answer any call: one that knows the plan takes in what is
new, another one replays the fits, which costs next to nothing beside scoring. Scorers sample and fit as ranks do, so
plans have the same bits as on a mesh of the same kind of device, however often a scorer was replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.planning.mesh import share
from taktline_worker.planning.search import Plan, Problem, Searches, late
from taktline_worker.planning.world import Scene, WorldModel


@dataclass(frozen=True, slots=True)
class ScoredRound:
    """One round as all scorers must take it in.

    Attributes:
        energies: (units, micro_batch), in the order of the units.
        late: by problem, whether its budget ended after this round.
    """

    energies: NDArray[Any]
    late: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ShardCall:
    """Score your share of a plan's next round: units `index`, `index + count`, ...

    Attributes:
        plan: names the plan; never used again for another one.
        rounds: all that were scored so far.
    """

    plan: str
    rounds: tuple[ScoredRound, ...]
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class ShardReply:
    """What a scorer answers.

    Attributes:
        units: of the whole round; 0 where every search has ended by itself before it.
        energies: (own units, micro_batch).
        seconds: that scoring took, the scorer's own replay and sampling included.
        scorer: who answered.
        prepared_s: the part of `seconds` that went before: taking up a plan that was new here, and earlier rounds.
    """

    units: int
    energies: NDArray[Any]
    seconds: float
    scorer: str
    prepared_s: float = 0.0


class ShardScorer:
    """One scorer's side, around one world model. Keeps the state of the newest plan; one call at a time."""

    def __init__(self, world: WorldModel, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._world = world
        self._name = name
        self._clock = clock
        self._plan = ""
        self._taken = 0
        self._searches: Searches | None = None

    def score(self, call: ShardCall, problems: Callable[[], Sequence[Problem]]) -> ShardReply:
        """The call's share of the next round.

        Args:
            problems: fetches the plan's problems, tensors on the CPU; asked only where the plan is new here.
        """
        began = self._clock()
        searches = self._at(call.plan, call.rounds, problems)
        prepared_s = self._clock() - began
        units = searches.sample() if searches.running else 0
        energies = searches.score(share(call.index, call.count, units)).cpu().numpy()
        return ShardReply(units, energies, self._clock() - began, self._name, prepared_s)

    def finish(self, plan: str, rounds: Sequence[ScoredRound], problems: Callable[[], Sequence[Problem]]) -> list[Plan]:
        """The plans after their last round, tensors on the CPU."""
        searches = self._at(plan, rounds, problems)
        if rounds:
            searches.stop(rounds[-1].late)  # a driver that ends after a round it has already told of says it here
        found = searches.plans()
        return [Plan(one.actions.cpu(), one.poses.cpu(), one.energies.cpu(), one.rounds, one.stopped) for one in found]

    def _at(self, plan: str, rounds: Sequence[ScoredRound], problems: Callable[[], Sequence[Problem]]) -> Searches:
        """The state after `rounds` of `plan`."""
        searches = self._searches
        if searches is None or plan != self._plan or self._taken > len(rounds):
            searches = Searches(self._world, [_placed(problem, self._world.device) for problem in problems()])
            self._plan, self._taken = plan, 0
        self._searches = None  # where taking in fails half-way, the next call begins anew
        for one in rounds[self._taken :]:
            searches.sample()
            # A copy: what travelled may lie in memory that must not be written.
            searches.fit(torch.from_numpy(one.energies.copy()).to(self._world.device))
            searches.stop(one.late)
        self._taken, self._searches = len(rounds), searches
        return searches


class Scorers(Protocol):
    """The driver's view of all scorers; a call whose scorer is lost is made again to another one in here."""

    @property
    def size(self) -> int:
        """Shards of a round: as many as there are scorers when all are well."""

    def score(self, calls: Sequence[ShardCall], until: float | None) -> list[ShardReply]:
        """Replies in the order of the calls, which run side by side.

        Args:
            until: instant of the driver's clock by which they must be there; None leaves that to the scorers.

        Raises:
            TaktlineError: DEADLINE_EXPIRED or another code; nobody answered in time.
        """

    def finish(self, plan: str, rounds: Sequence[ScoredRound]) -> list[Plan]:
        """The plans. Raises TaktlineError as `score` does."""


@dataclass(frozen=True, slots=True)
class RoundSpan:
    """Where one round's time went: all of it, and the slowest scorer's own, in seconds; and who took part."""

    seconds: float
    scoring_s: float
    scorers: tuple[str, ...]


def drive(
    scorers: Scorers,
    plan: str,
    problems: Sequence[Problem],
    clock: Callable[[], float] = time.monotonic,
    observer: Callable[[RoundSpan], None] | None = None,
) -> list[Plan | TaktlineError]:
    """Runs one plan to its end. Only this side's clock counts for budgets, as rank 0's does on a mesh.

    The first round is not ended by a budget, for there is no plan without it. Where nobody scores a further one before
    the first of the deadlines that still count, the rounds so far are the answer of all that have a deadline, and the
    others' is an error that has them sent again.

    Args:
        problems: whose settings and deadlines count here; the scorers have their own copies.

    Raises:
        TaktlineError: nobody answered in time, and no round was scored.
    """
    rounds: tuple[ScoredRound, ...] = ()
    ended, cut = [False] * len(problems), False
    while not all(ended):
        began = clock()
        due = [one.deadline for one, done in zip(problems, ended, strict=True) if not done and one.deadline is not None]
        calls = [ShardCall(plan, rounds, index, scorers.size) for index in range(scorers.size)]
        try:
            replies = scorers.score(calls, min(due, default=None) if rounds else None)
        except TaktlineError as error:
            if not rounds or error.code is not ErrorCode.DEADLINE_EXPIRED:
                raise
            rounds = (*rounds[:-1], replace(rounds[-1], late=(True,) * len(problems)))
            cut = True
            break
        if replies[0].units == 0:
            break
        now = clock()
        if observer is not None:
            slowest = max(reply.seconds for reply in replies)
            observer(RoundSpan(now - began, slowest, tuple(reply.scorer for reply in replies)))
        # The next round fetches and replays nothing: what this one spent on that is not held against a budget. Who
        # fetched longest need not be who scores longest; what no reply accounts for, the way there and back, stays.
        scored_s = max(reply.seconds - reply.prepared_s for reply in replies)
        round_s = scored_s + now - began - max(reply.seconds for reply in replies)
        flags = late(problems, now, round_s)
        rounds = (*rounds, ScoredRound(_in_order(replies), tuple(flags)))
        ended = [
            done or flag or problem.settings.rounds == len(rounds)
            for done, flag, problem in zip(ended, flags, problems, strict=True)
        ]
    plans = scorers.finish(plan, rounds)
    return [
        _cut_short() if cut and not done and problem.deadline is None else found
        for found, done, problem in zip(plans, ended, problems, strict=True)
    ]


def _cut_short() -> TaktlineError:
    return TaktlineError(
        ErrorCode.WORKER_UNAVAILABLE,
        "a round of the plan was late, and the budget of a plan beside it ended",
        "send a new observation, to another worker if there is one",
    )


def _placed(problem: Problem, device: torch.device) -> Problem:
    scene = problem.scene
    return replace(problem, scene=Scene(scene.latent.to(device), scene.goal.to(device), scene.pose.to(device)))


def _in_order(replies: Sequence[ShardReply]) -> NDArray[Any]:
    """Energies (units, micro_batch): row k of reply r is unit k * size + r."""
    size, units = len(replies), replies[0].units
    energies = np.empty((units, replies[0].energies.shape[1]), replies[0].energies.dtype)
    for index, reply in enumerate(replies):
        energies[index::size] = reply.energies
    return energies
