"""What may be made cheaper before a robot is refused: fewer solver steps, a shorter chunk, or a smaller policy."""

from __future__ import annotations

import dataclasses

from taktline_protocol.deployment import DegradeOptions
from taktline_protocol.messages import CheaperLevel, Degraded, PolicyInfo

from taktline_gateway.service_times import ServiceTimes


@dataclasses.dataclass(frozen=True, slots=True)
class Levels:
    """The qualities below the policy's own that one worker may be asked for, dearest first.

    Attributes:
        qualities: what it reports of each.
        times: T_sync with each.
    """

    qualities: tuple[CheaperLevel, ...] = ()
    times: tuple[ServiceTimes, ...] = ()


def levels_of(info: PolicyInfo, options: DegradeOptions, max_batch: int, known: Levels | None = None) -> Levels:
    """What the worker can do, of what the deployment allows; `known` levels keep the times they have measured."""
    measured = (
        {_numbers(level): times for level, times in zip(known.qualities, known.times, strict=True)} if known else {}
    )
    found = []
    for level in info.cheaper:
        if level.t_sync and _allowed(level, options):
            times = measured.get(_numbers(level)) or ServiceTimes(level.t_sync, max_batch, level.action_horizon)
            times.limit(max_batch)
            found.append((level, times))
    # Steps and actions are not of one kind: what a full batch takes says which of two levels gives up more.
    found.sort(key=lambda one: one[1].median_s(one[1].max_batch), reverse=True)
    return Levels(tuple(level for level, _ in found), tuple(times for _, times in found))


def _numbers(level: CheaperLevel) -> tuple[int, int]:
    return level.solver_steps, level.action_horizon


def _allowed(level: CheaperLevel, options: DegradeOptions) -> bool:
    """A number that the deployment does not speak of, or that this level leaves as it is, stays the policy's own."""
    least = (options.min_solver_steps, options.min_action_horizon)
    return any(_numbers(level)) and all(
        number == 0 or 0 < fewest <= number for number, fewest in zip(_numbers(level), least, strict=True)
    )


def degraded(level: CheaperLevel | None, policy: str) -> Degraded | None:
    """What an answer says of itself; None where it is the policy's own. No level and the empty name are its own."""
    steps, horizon = (0, 0) if level is None else _numbers(level)
    if not steps and not horizon and not policy:
        return None
    return Degraded(solver_steps=steps or None, action_horizon=horizon or None, policy=policy or None)


def stands_in(asked: PolicyInfo, other: PolicyInfo) -> bool:
    """Whether `other` reads what was sent for `asked` and answers in the same units: the same robot interface.

    A robot may have fitted its frames to `asked` already: only a policy that would fit them alike sees what it should.
    """
    return (
        other.ready
        and set(other.cameras) <= set(asked.cameras) <= {*other.cameras, *other.optional_cameras}
        and (other.state_dim, other.action_dim, other.dt_s) == (asked.state_dim, asked.action_dim, asked.dt_s)
        and other.image_fit == asked.image_fit
    )
