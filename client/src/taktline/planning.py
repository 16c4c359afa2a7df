"""Closed-loop control with a planner policy: one action of each plan, and the next plan made while the arm moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from taktline_protocol import TaktlineError
from taktline_protocol.messages import Array, Search

from taktline.chunk import Chunk


class Planner(Protocol):
    """What answers with plans: a `taktline.Robot` of a planner policy."""

    def act(
        self,
        images: Mapping[str, Any],
        state: Any,
        instruction: str,
        budget_ms: float,
        *,
        search: Search | None = None,
    ) -> Chunk:
        """A plan from what is seen; see `taktline.Robot.act`."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One executed action.

    Attributes:
        action: float (D,), as executed.
        chunk: the plan that it was the first action of.
        plan_ms: from asking for that plan to having it.
        step_ms: the whole step; with overlap it ends when the arm has arrived and the next plan is there.
        idle_ms: the part of it in which the arm stood still.
    """

    action: NDArray[np.floating[Any]]
    chunk: Chunk
    plan_ms: float
    step_ms: float
    idle_ms: float


def plan_and_move(
    planner: Planner,
    sense: Callable[[], tuple[Mapping[str, Any], Any]],
    move: Callable[[NDArray[np.floating[Any]]], None],
    *,
    instruction: str = "",
    budget_ms: float = 60_000.0,
    search: Search | None = None,
    overlap: bool = True,
    warm: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[PlannedStep]:
    """Plans and executes one action after another until the caller stops asking.

    With `overlap`, the plan of the next action is made while this one is executed, from what was seen before it and
    from where the model expects it to lead; what the arm misses by is seen at the next step. Where such a plan is
    refused or lost, the loop waits for the arm, looks again and plans once more; a refusal of that plan is raised.

    >>> for step in plan_and_move(robot, lambda: ({"camera": frame(), "goal": goal}, pose()), arm.move):
    ...     if step.chunk.plan.energies.to_numpy()[-1, 0] < 0.2:
    ...         break

    Args:
        sense: the policy's images (camera and goal; the goal may change from call to call) and state, now.
        move: executes one action and returns when the arm has arrived; with `overlap` it runs in a thread of its own.
        budget_ms: time left for one plan.
        search: asked of every plan; `previous` and `pending` are set by the loop.
        overlap: plan while the arm moves, else only while it stands.
        warm: begin each search at the tail of the last plan.
        clock: monotonic seconds.

    Raises:
        TaktlineError: as `Robot.act` does.
    """
    asked = search or Search()

    def plan(seen: tuple[Mapping[str, Any], Any], previous: Chunk | None, pending: Any) -> tuple[Chunk, float]:
        wanted = msgspec.structs.replace(
            asked,
            previous=Array.from_numpy(previous.actions) if warm and previous is not None else None,
            pending=None if pending is None else Array.from_numpy(pending[None]),
        )
        began = clock()
        chunk = planner.act(*seen, instruction, budget_ms, search=wanted)
        return chunk, 1000.0 * (clock() - began)

    def timed_move(action: NDArray[np.floating[Any]]) -> float:
        began = clock()
        move(action)
        return 1000.0 * (clock() - began)

    with ThreadPoolExecutor(1, thread_name_prefix="taktline-arm") as arm:
        began = clock()
        chunk, plan_ms = plan(sense(), None, None)
        while True:
            action = chunk.actions[0]
            ahead: tuple[Chunk, float] | None = None
            if overlap:
                seen = sense()
                moving = arm.submit(timed_move, action)
                try:
                    ahead = plan(seen, chunk, action)
                except TaktlineError:
                    ahead = None  # the plan below is made from what is seen after the move, and its refusal is raised
                move_ms = moving.result()
            else:
                move_ms = timed_move(action)
            now = clock()
            step_ms = 1000.0 * (now - began)
            yield PlannedStep(action, chunk, plan_ms, step_ms, step_ms - move_ms)
            began = clock()
            chunk, plan_ms = ahead if ahead is not None else plan(sense(), chunk, None)
