"""What a fleet run leaves behind: one record a chunk, a control cycle and an episode."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ChunkRecord:
    """One chunk that came, in time or not. Times in ms.

    Attributes:
        first: the robot stood still until this chunk came.
        margin_ms: control margin; negative means that the chunk came after the hand-off deadline.
        batch: observations that shared the engine call.
    """

    first: bool
    observe_ms: float
    transfer_ms: float
    queue_ms: float
    inference_ms: float
    actuate_ms: float
    margin_ms: float
    batch: int

    @property
    def critical_ms(self) -> float:
        """L_critical, the sum of the five terms."""
        return self.observe_ms + self.transfer_ms + self.queue_ms + self.inference_ms + self.actuate_ms


@dataclass(frozen=True)
class CycleRecord:
    """One control cycle: a chunk is executed until the next one takes over. Times in ms.

    Attributes:
        serial: the robot stood still until its chunk came, and the wait is part of the cycle; else the next chunk was
            asked for while this one was executed.
        rows: rows of the chunk that were executed.
        env_ms: L_env, the time the environment takes for these rows.
        inference_ms: L_inference of the chunk that the cycle waited for: its own if serial, else the next one.
        control_ms: L_control, the time the cycle really took.
    """

    serial: bool
    rows: int
    env_ms: float
    inference_ms: float
    control_ms: float

    @property
    def ratio(self) -> float:
        """X of the control-time roofline, L_env / L_inference."""
        return self.env_ms / max(self.inference_ms, 1e-3)

    @property
    def efficiency(self) -> float:
        """Y of the control-time roofline, L_env / L_control."""
        return self.env_ms / max(self.control_ms, 1e-3)


@dataclass(frozen=True)
class EpisodeRecord:
    """How one episode of the fleet ended; `reached` is the block at which the tip dwelt, None for none."""

    seed: int
    instruction: str
    goal: str
    reached: str | None
    steps: int
    duration_s: float

    @property
    def success(self) -> bool:
        """The block reached is the block named."""
        return self.reached == self.goal


@dataclass
class RobotReport:
    """Everything one robot measured.

    Attributes:
        requests: observations sent, failed ones included.
        misses: times that the action buffer ran dry before the next chunk was there.
        errors: error code -> how often the gateway answered it.
        running_s: time between the first request and the end of the last episode.
        transport: how the observations travelled: stream or http.
        bytes_sent: of all observations, with their framing.
        picture: JPEG of the scene at the end.
    """

    robot: str
    requests: int = 0
    misses: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    running_s: float = 0.0
    chunks: list[ChunkRecord] = field(default_factory=list)
    cycles: list[CycleRecord] = field(default_factory=list)
    episodes: list[EpisodeRecord] = field(default_factory=list)
    transport: str = ""
    bytes_sent: int = 0
    picture: bytes = b""

    @property
    def successes(self) -> int:
        """Episodes that reached the block they named."""
        return sum(episode.success for episode in self.episodes)

    @property
    def chunk_rate_hz(self) -> float:
        """Chunks received a second."""
        return len(self.chunks) / self.running_s if self.running_s > 0 else 0.0

    def median(self, name: str) -> float:
        """Median of a field of the chunk records, 0.0 where there are none."""
        return float(np.median([getattr(chunk, name) for chunk in self.chunks])) if self.chunks else 0.0

    def margin_reached_by(self, share: float) -> float:
        """The control margin in ms that `share` of the chunks reach, 0.0 where there are none."""
        if not self.chunks:
            return 0.0
        return float(np.quantile([chunk.margin_ms for chunk in self.chunks], 1.0 - share))


@dataclass(frozen=True)
class FleetRun:
    """A whole run: what was asked for and one report a robot."""

    url: str
    policy: str
    revision: str
    seed: int
    control_period_s: float
    robots: list[RobotReport]

    @property
    def chunks(self) -> list[ChunkRecord]:
        """Chunks of all robots."""
        return [chunk for robot in self.robots for chunk in robot.chunks]

    @property
    def cycles(self) -> list[CycleRecord]:
        """Control cycles of all robots."""
        return [cycle for robot in self.robots for cycle in robot.cycles]

    @property
    def episodes(self) -> list[EpisodeRecord]:
        """Episodes of all robots."""
        return [episode for robot in self.robots for episode in robot.episodes]

    @property
    def transports(self) -> str:
        """How the observations of all robots travelled."""
        return " and ".join(sorted({robot.transport for robot in self.robots if robot.transport}))

    @property
    def successes(self) -> int:
        """Successful episodes of all robots."""
        return sum(robot.successes for robot in self.robots)

    @property
    def misses(self) -> int:
        """Deadline misses of all robots."""
        return sum(robot.misses for robot in self.robots)

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file; pictures stay out."""
        robots = []
        for robot in self.robots:
            entry = asdict(robot)
            del entry["picture"]
            entry |= {"successes": robot.successes, "chunk_rate_hz": robot.chunk_rate_hz}
            robots.append(entry)
        totals = {"episodes": len(self.episodes), "successes": self.successes, "misses": self.misses}
        head = {"policy": self.policy, "revision": self.revision, "seed": self.seed}
        return {**head, "control_period_s": self.control_period_s, **totals, "robots": robots}
