"""What a gateway measures of its policies for the operator: demand by deadline, service times, trials of revisions."""

from __future__ import annotations

import msgspec

from taktline_protocol.messages import BucketTime

DEADLINE_CLASSES_MS = (20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
"""Upper edges of the deadline classes that demand is counted in; the last class is open."""


class Outcomes(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of observations that had a deadline.

    Attributes:
        on_time: answered before the deadline.
        late: answered after it.
        refused: not answered because no worker could make it, or none was there.
        failed: not answered because a worker failed.
    """

    on_time: int = 0
    late: int = 0
    refused: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.on_time + self.late + self.refused + self.failed

    @property
    def missed(self) -> int:
        """Those without a chunk in time."""
        return self.total - self.on_time


class Shadow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What mirrored observations told of a candidate.

    Attributes:
        outcomes: of the mirrored observations at the candidate.
        compared: answered by both revisions.
        agreed: of these, every action within its tolerance.
        reshaped: of these, chunks of another shape; they count as disagreement.
        ratio_sum: sum over the compared of their largest difference, in tolerances.
        ratio_max: the largest of these; 1 is the tolerance itself.
        distance_max: the largest difference of any action, in robot units.
    """

    outcomes: Outcomes = msgspec.field(default_factory=Outcomes)
    compared: int = 0
    agreed: int = 0
    reshaped: int = 0
    ratio_sum: float = 0.0
    ratio_max: float = 0.0
    distance_max: float = 0.0


class Trial(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Counts of one step of one candidate's trial, since that step began at this gateway.

    Attributes:
        robots: active robots; `candidate_robots` of them are served by the candidate.
        rescued: observations that the candidate failed and the serving revision answered instead.
    """

    id: str
    step: str = ""
    seconds: float = 0.0
    workers: int = 0
    robots: int = 0
    candidate_robots: int = 0
    stable: Outcomes = msgspec.field(default_factory=Outcomes)
    candidate: Outcomes = msgspec.field(default_factory=Outcomes)
    shadow: Shadow = msgspec.field(default_factory=Shadow)
    rescued: int = 0


class Demand(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Observations of one deadline class since the gateway started.

    Attributes:
        up_to_ms: upper edge of the time left at arrival; 0 marks the open class.
    """

    up_to_ms: float
    outcomes: Outcomes = msgspec.field(default_factory=Outcomes)


class PoolTimes(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Usable workers of one pool and their measured T_sync table."""

    pool: str
    workers: int = 0
    t_sync: tuple[BucketTime, ...] = ()


class PolicyMeasurement(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One policy at one gateway. `queued` is the number of observations that wait for a batch now."""

    policy: str
    queued: int = 0
    demand: tuple[Demand, ...] = ()
    pools: tuple[PoolTimes, ...] = ()
    trial: Trial | None = None


class GatewayMeasurements(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer of GET /measurements.

    Attributes:
        instance: drawn at the gateway's start; another one means that all counts began anew.
        seconds: since that start, on a monotonic clock, so that two answers give rates.
    """

    instance: str
    seconds: float
    policies: tuple[PolicyMeasurement, ...] = ()
