"""What may be made cheaper before a robot is refused: fewer solver steps, or a smaller policy in its place."""

from __future__ import annotations

import dataclasses

from taktline_protocol.deployment import DegradeOptions
from taktline_protocol.messages import Degraded, PolicyInfo

from taktline_gateway.service_times import ServiceTimes


@dataclasses.dataclass(frozen=True, slots=True)
class Levels:
    """The qualities below the policy's own that one worker may be asked for, dearest first.

    Attributes:
        steps: solver steps of each.
        times: T_sync with each.
    """

    steps: tuple[int, ...] = ()
    times: tuple[ServiceTimes, ...] = ()


def levels_of(info: PolicyInfo, options: DegradeOptions, max_batch: int, known: Levels | None = None) -> Levels:
    """What the worker can do, of what the deployment allows; `known` levels keep the times they have measured."""
    allowed = [
        level
        for level in sorted(info.cheaper, key=lambda level: -level.solver_steps)
        if 0 < options.min_solver_steps <= level.solver_steps and level.t_sync
    ]
    measured = dict(zip(known.steps, known.times, strict=True)) if known is not None else {}
    times = tuple(measured.get(level.solver_steps) or ServiceTimes(level.t_sync, max_batch) for level in allowed)
    for one in times:
        one.limit(max_batch)
    return Levels(tuple(level.solver_steps for level in allowed), times)


def degraded(solver_steps: int, policy: str) -> Degraded | None:
    """What an answer says of itself; None where it is the policy's own. 0 and the empty name are the policy's own."""
    if not solver_steps and not policy:
        return None
    return Degraded(solver_steps=solver_steps or None, policy=policy or None)


def stands_in(asked: PolicyInfo, other: PolicyInfo) -> bool:
    """Whether `other` reads what was sent for `asked` and answers in the same units: the same robot interface."""
    return (
        other.ready
        and set(other.cameras) <= set(asked.cameras) <= {*other.cameras, *other.optional_cameras}
        and (other.state_dim, other.action_dim, other.dt_s) == (asked.state_dim, asked.action_dim, asked.dt_s)
    )
