"""The parts of a PolicyDeployment's spec that say how many workers there are, where they go, and who admits them."""

from __future__ import annotations

from typing import Literal

import msgspec


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Spelled in camelCase on the wire, as Kubernetes writes fields."""


class Shift(_Struct, frozen=True):
    """A time of day in which robots work; `start` and `end` as HH:MM."""

    name: str
    start: str
    end: str
    min_replicas: int
    days: tuple[str, ...] = ()


class ToZero(_Struct, frozen=True):
    """When the last worker may go."""

    idle_seconds: int = 900
    cold_start_budget_seconds: int = 60


class Keda(_Struct, frozen=True):
    """The ScaledObject that lets KEDA set the number of workers from what scaling recommends."""

    server_address: str
    polling_seconds: int = 15
    cooldown_seconds: int = 300


class Queue(_Struct, frozen=True):
    """The Kueue queue that the workers' quota comes from."""

    name: str
    priority_class: str = ""


class Scaling(_Struct, frozen=True):
    """How the number of workers follows demand."""

    mode: Literal["Automatic", "Recommend"] = "Automatic"
    target_utilization: int = 70
    scale_up_step: int = 4
    scale_down_step: int = 1
    up_cooldown_seconds: int = 15
    down_cooldown_seconds: int = 300
    warm_replicas: int = 0
    lead_seconds: int = 60
    to_zero: ToZero | None = None
    shifts: tuple[Shift, ...] = ()
    time_zone: str = "UTC"
    keda: Keda | None = None


class Placement(_Struct, frozen=True):
    """In which pools workers run."""

    mode: Literal["Ordered", "Cheapest"] = "Ordered"
    gain_percent: int = 15
    hold_seconds: int = 600
