"""A search on a mesh that waits for no rank beyond its deadline.

The search runs on a thread of its own, because what waits for a lost rank waits until somebody ends it: a collective
in the network, or the whole queue of a GPU. After each round of a search with a deadline it leaves where it stands, and
the caller answers from that when the time is over.

A batch is answered as a whole, on a mesh as in one process: a plan whose search has ended in time is answered with the
last of those beside it, whose rounds are not its own to end. Its deadline is kept where its neighbours' end no later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.search_latency import units_of
from torch import Tensor

from taktline_worker.planning.mesh import Mesh, OneRank, RankLostError
from taktline_worker.planning.ranks import Ranks
from taktline_worker.planning.relay import lead
from taktline_worker.planning.search import Plan, Problem, ScoringError, Standing, late, search
from taktline_worker.planning.settings import SearchSettings
from taktline_worker.planning.world import WorldModel

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""For a round that outlives its plan's deadline; then a rank is taken to be lost, though its process is there."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a search on the mesh took that was answered before it ended.

    Attributes:
        work: the settings of each robot's plan with the rounds it ran.
        seconds: from its first round's beginning to its end.
        ranks: of its mesh.
    """

    work: list[tuple[SearchSettings, int]]
    seconds: float
    ranks: int


@dataclass(slots=True)
class _Attempt:
    """A search on the mesh, and what its thread leaves for the caller.

    Attributes:
        poses: (7,) on the CPU, where each problem's arm is; empty where no problem has a deadline.
        standings: after the newest round that all ranks took part in; empty before the first.
        round_s: what that round took.
        seconds: what all of it took, once it has ended.
    """

    problems: Sequence[Problem]
    mesh: Mesh
    poses: list[Tensor]
    standings: list[Standing] = field(default_factory=list)
    round_s: float = 0.0
    seconds: float = 0.0
    ended: Future[list[Plan]] = field(default_factory=Future)


class TimelySearch:
    """Plans on whatever mesh there is, one call at a time.

    Attributes:
        disturbed: whether the newest call took another time than such plans take here.

    Args:
        clock: monotonic seconds, the clock of the deadlines.
    """

    def __init__(self, world: WorldModel, ranks: Ranks, clock: Callable[[], float] = time.monotonic) -> None:
        self.disturbed = False
        self._world = world
        self._ranks = ranks
        self._clock = clock
        self._late: _Attempt | None = None

    @property
    def busy(self) -> bool:
        """Whether a plan that was answered without its end may still run: `wait` before anything touches the device."""
        return self._late is not None

    def wait(self, ends: Sequence[float | None]) -> Taken | None:
        """Waits for such a plan; returns what it took, where its mesh went through it.

        Raises:
            TaktlineError: WORKER_UNAVAILABLE; it still runs at the last of `ends`.
        """
        if self._late is None:
            return None
        attempt = self._late
        if not self._done(attempt, _last(ends)):
            raise _unanswered("the plan before this one still waits for a rank of the mesh")
        self._late = None
        if attempt.ended.exception() is not None or not self._ranks.sound(attempt.mesh):
            return None
        work = [(one.settings, plan.rounds) for one, plan in zip(attempt.problems, attempt.ended.result(), strict=True)]
        return Taken(work, attempt.seconds, attempt.mesh.size)

    def plans(
        self, problems: Sequence[Problem], ends: Sequence[float | None], alone_s: Callable[[Problem], float | None]
    ) -> list[Plan | TaktlineError]:
        """A plan or a typed error for each problem.

        Where a rank is lost, rounds that were whole stay, and this process makes the others alone, with the same bytes
        as a result, as far as the deadlines allow. Where a round outlives the deadline of any of them, all are answered
        there, for a batch is answered as a whole: with the rounds they have, or, without a deadline of their own, with
        an error that has them sent again. A search that has ended by itself, or at its budget, cuts
        nobody short: it waits for those beside it.

        Args:
            ends: instants after which an answer is of no use; None = never.
            alone_s: seconds of one round of a problem in this process alone; None where nobody knows.

        Raises:
            Exception: what the world model or the search raised where no rank was lost.
        """
        self.disturbed = False
        try:
            self.wait(ends)
        except TaktlineError as refusal:
            return [refusal] * len(problems)
        mesh = self._ranks.mesh()
        if mesh.size == 1:
            return list(lead(self._world, problems, mesh, self._clock))
        timed = any(problem.deadline is not None for problem in problems)
        attempt = _Attempt(problems, mesh, [one.scene.pose.cpu() for one in problems] if timed else [])
        self._start(attempt)
        if not self._in_time(attempt, ends):
            return self._cut(attempt)
        error = attempt.ended.exception()
        lost = isinstance(error, RankLostError) or not self._ranks.sound(mesh)
        if error is None and not lost:
            return list(attempt.ended.result())
        self.disturbed = True
        if error is not None and not lost:
            if isinstance(error, ScoringError):
                raise error.__cause__ or error
            self._give_up(error)
            raise error
        cause = "a follower ended during the plan" if error is None else str(error)[:500]
        logger.error("a plan lost a rank; this one goes on alone", extra={"ranks": mesh.size, "cause": cause})
        self._ranks.lost()
        return self._alone(attempt, ends, alone_s)

    def close(self) -> None:
        """Gives up what still waits for a rank."""
        if self._late is not None and not self._late.ended.done():
            self._ranks.lost()

    def _start(self, attempt: _Attempt) -> None:
        # The current GPU is a matter of each thread.
        device = torch.cuda.current_device() if self._world.device.type == "cuda" else None

        def keep(standings: list[Standing], seconds: float) -> None:
            # An aborted collective ends like a whole one; what it leaves must not be believed.
            if self._ranks.sound(attempt.mesh):
                attempt.round_s, attempt.standings = seconds, standings

        def run() -> None:
            began = self._clock()
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                plans = lead(self._world, attempt.problems, attempt.mesh, self._clock, keep)
                self._world.synchronize()
                attempt.seconds = self._clock() - began
                attempt.ended.set_result(plans)
            except BaseException as error:  # whatever it is, the caller's thread is the one to raise it
                attempt.ended.set_exception(error)

        threading.Thread(target=run, name="mesh-search", daemon=True).start()

    def _done(self, attempt: _Attempt, until: float | None) -> bool:
        """Whether it ended by `until`; waits for that."""
        timeout = None if until is None else max(0.0, until - self._clock())
        return bool(wait([attempt.ended], timeout).done)

    def _in_time(self, attempt: _Attempt, ends: Sequence[float | None]) -> bool:
        """Waits for the search; whether it ended before it had to be answered without.

        A problem whose search is over waits for its neighbours beyond its deadline: ending theirs there would leave one
        without a budget no plan, again and again on a mesh that is well.
        """
        deadlines = [
            (end, index)
            for index, (problem, end) in enumerate(zip(attempt.problems, ends, strict=True))
            if problem.deadline is not None and end is not None
        ]
        for end, index in sorted(deadlines):
            if self._done(attempt, end):
                return True
            standings = attempt.standings
            if not standings or standings[index].stopped is None:
                return False
        return self._done(attempt, _last(ends))

    def _cut(self, attempt: _Attempt) -> list[Plan | TaktlineError]:
        """The answers at the deadline, while the search still runs or waits."""
        self.disturbed = True
        self._late = attempt
        threading.Thread(target=self._settle, args=(attempt,), name="mesh-settle", daemon=True).start()
        standings = attempt.standings  # once: the other thread may leave newer ones
        logger.warning(
            "a round on the mesh outlives its plan's deadline",
            extra={"ranks": attempt.mesh.size, "rounds": [one.rounds for one in standings]},
        )
        if not standings:
            return [_unanswered("no round of the plan was whole by its deadline")] * len(attempt.problems)
        return [
            self._plan(problem, pose, standing)
            if standing.stopped is not None or problem.deadline is not None
            else _unanswered("the budget of a plan beside this one ended while a round was late")
            for problem, pose, standing in zip(attempt.problems, attempt.poses, standings, strict=True)
        ]

    def _settle(self, attempt: _Attempt) -> None:
        """Waits for a search that was answered without; where a rank is the cause, it is lost."""
        if not wait([attempt.ended], PATIENCE_S).done:
            self._ranks.lost()
            return
        error = attempt.ended.exception()
        if isinstance(error, RankLostError) or not self._ranks.sound(attempt.mesh):
            self._ranks.lost()
        elif isinstance(error, ScoringError):
            logger.error("a plan failed after its answer; its mesh is well", exc_info=error)
        elif error is not None:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """No rank was lost, but this one left the others midway: the next plan's collectives would meet theirs."""
        logger.error("a plan failed between its ranks; they must start again", exc_info=error)
        self._ranks.lost()

    def _alone(
        self, attempt: _Attempt, ends: Sequence[float | None], alone_s: Callable[[Problem], float | None]
    ) -> list[Plan | TaktlineError]:
        """Goes on in this process from the newest whole round, with what still fits."""
        problems, standings = attempt.problems, attempt.standings
        starts: list[Standing | None] = list(standings) if standings else [None] * len(problems)
        units = sum(units_of(one.settings.candidates, self._world.micro_batch) for one in problems)
        known = [alone_s(one) for one in problems]
        round_s = attempt.round_s * units / -(-units // attempt.mesh.size) or sum(one or 0.0 for one in known)
        now = self._clock()
        found: dict[int, Plan | TaktlineError] = {}
        for index, (problem, end, flag) in enumerate(zip(problems, ends, late(problems, now, round_s), strict=True)):
            start = starts[index]
            left = problem.settings.rounds - (0 if start is None else start.rounds)
            if flag and start is not None and start.rounds:
                found[index] = self._plan(problem, attempt.poses[index], start)
            elif flag or (problem.deadline is None and end is not None and now + left * round_s > end):
                found[index] = _unanswered("a rank was lost, and the time left is too short to plan without it")
        kept = [index for index in range(len(problems)) if index not in found]
        if kept:
            plans = search(
                self._world,
                [problems[index] for index in kept],
                OneRank(),
                self._clock,
                start=[starts[index] for index in kept],
            )
            found |= dict(zip(kept, plans, strict=True))
        return [found[index] for index in range(len(problems))]

    def _plan(self, problem: Problem, pose: Tensor, standing: Standing) -> Plan:
        """The answer of a search that stops here, made on the CPU: the device may be waiting for a rank."""
        scene = replace(problem.scene, pose=pose)
        poses = self._world.poses(scene, standing.actions)
        return Plan(standing.actions, poses, standing.energies, standing.rounds, standing.stopped or "budget")


def _last(ends: Sequence[float | None]) -> float | None:
    """The last of some instants, of which None never comes."""
    known = [end for end in ends if end is not None]
    return max(known) if len(known) == len(ends) else None


def _unanswered(reason: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.WORKER_UNAVAILABLE,
        reason,
        "send a new observation, to another worker if there is one; this one mends its mesh by itself",
    )
