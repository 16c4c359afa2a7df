"""What the operator writes and the gateway and workers read: the resolved engine config and the routing table."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which checkpoint to load, and how its inputs are named.

    Attributes:
        path: checkpoint folder, as the worker sees it.
        sha256: expected digest of each named file in the folder (file name -> hex digest).
        cameras: robot camera name -> checkpoint image key; empty means the names are the checkpoint's own.
        statistics: statistics file or asset id where the checkpoint holds several; empty picks the only one.
    """

    family: str
    path: str
    revision: str
    sha256: dict[str, str] = {}
    cameras: dict[str, str] = {}
    statistics: str = ""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the worker runs the checkpoint. None keeps the checkpoint's own value."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "bf16"
    buckets: tuple[Annotated[int, Meta(ge=1)], ...] = (1, 2, 4, 8)
    solver_steps: int | None = None
    action_horizon: int | None = None
    control_period_ms: float | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`engine.json`: everything one worker process needs, resolved."""

    policy: str
    model: ModelConfig
    engine: EngineOptions = EngineOptions()


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker endpoint of a policy: gRPC `host:port`."""

    address: str
    pool: str = "default"
    revision: str = ""


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the gateway serves one policy.

    Attributes:
        control_budget_ms: the SLO's budget, shown to clients; each observation still carries its own.
        max_batch: upper bound of a batch, whatever the worker's buckets allow.
        max_wait_ms: how long the first queued observation may wait for company.
    """

    policy: str
    family: str = ""
    revision: str = ""
    targets: tuple[Target, ...] = ()
    control_budget_ms: float = 0.0
    max_batch: int = 8
    max_wait_ms: float = 5.0


class RoutingTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`routes.json`: all policies of one gateway."""

    routes: tuple[Route, ...] = ()
