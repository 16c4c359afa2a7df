"""The engine part of a PolicyDeployment's spec: what it decides, what engine.json holds of it, the GPUs it needs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from taktline_protocol.deployment import EngineOptions

Precision = Literal["fp32", "bf16", "fp8"]
Runtime = Literal["worker", "ray"]

# Always in engine.json, spelled out also where a value is the default (None is left out).
ALWAYS = ("precision", "buckets", "solver_steps", "action_horizon", "control_period_ms")
# In engine.json only where the spec sets them. A later field belongs here: a spec that does not set it must keep its
# engine.json, its derived revision and its pods.
WHERE_SET = (
    "cheaper_steps",
    "shorter_horizons",
    "max_image_pixels",
    "frame_cache_mb",
    "search",
    "rtc",
    "world_action",
    "parallel",
    "quantisation",
)


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Spelled in camelCase on the wire, as Kubernetes writes fields."""


class Search(_Struct, frozen=True):
    """How a planner searches; the fields are those of `SearchOptions`."""

    optimiser: Literal["cem", "mppi"] = "cem"
    candidates: int = 400
    rounds: int = 10
    elites: int = 10
    horizon: int = 2
    max_step_m: float = 0.05
    momentum_mean: float = 0.15
    momentum_std: float = 0.15
    momentum_mean_gripper: float = 0.15
    momentum_std_gripper: float = 0.15
    pins: dict[str, float] = {}
    close_gripper: int | None = None
    convergence: float = 0.0
    temperature: float = 0.25
    anytime: bool = False
    max_candidates: int = 4096
    max_rounds: int = 100
    max_horizon: int | None = None
    micro_batch: int | None = None


class Rtc(_Struct, frozen=True):
    """Real-time chunking; the fields are those of `RtcOptions`."""

    mode: Literal["auto", "guided", "trained", "off"] = "auto"
    schedule: Literal["linear", "exp", "ones", "zeros"] | None = None
    max_guidance_weight: float | None = None
    gradient: Literal["identity", "vjp"] = "identity"


class SearchModel(_Struct, frozen=True):
    """The constants of `LatencyModel` in ms, as `taktline profile-planner` measures them."""

    round_ms: float
    rank_ms: float = 0.0
    loss: float = 0.0


class WorldAction(_Struct, frozen=True):
    """How a world-action model is asked; the fields are those of `WorldActionOptions`."""

    preset: Literal["official", "paper"] | None = None
    embodiment: str = ""
    guidance: float | None = None
    guidance_interval: tuple[float, float] | None = None
    shift: float | None = None
    prompt: Literal["json", "plain"] | None = None
    imagine: bool = False
    split: Literal["tensor", "sequence"] | None = None


class Parallel(_Struct, frozen=True):
    """How one worker spreads over the GPUs of its pod; all but `search_model` are fields of `ParallelOptions`.

    With `search_model`, `search` is the most ranks that may be chosen (`search_ranks`).
    """

    dp: int = 1
    cfg: int = 1
    tp: int = 1
    search: int = 1
    search_model: SearchModel | None = None


class Quantisation(_Struct, frozen=True):
    """Weights in a byte a number; the fields are those of `QuantisationOptions`."""

    expert: Literal["fp8", "int8"]
    max_batch: int = 4


class Engine(_Struct, frozen=True):
    """How workers run the checkpoint."""

    precision: Precision = "bf16"
    buckets: tuple[int, ...] = (1, 2, 4, 8)
    solver_steps: int | None = None
    cheaper_steps: tuple[int, ...] = ()
    shorter_horizons: tuple[int, ...] = ()
    action_horizon: int | None = None
    control_period_ms: float | None = None
    max_image_pixels: int | None = None
    frame_cache_mb: int | None = None
    search: Search | None = None
    rtc: Rtc | None = None
    world_action: WorldAction | None = None
    parallel: Parallel | None = None
    quantisation: Quantisation | None = None
    runtime: Runtime = "worker"

    @property
    def gpus(self) -> int:
        """GPUs of one worker's pod."""
        found = self.parallel or Parallel()
        return found.dp * found.cfg * found.tp * found.search

    @property
    def lanes(self) -> int:
        """Batches that one worker runs at a time: one in each replica."""
        return (self.parallel or Parallel()).dp

    @property
    def has_collectives(self) -> bool:
        """Whether processes of one pod exchange tensors: ranks do, replicas (`dp`) do not."""
        found = self.parallel or Parallel()
        return found.cfg * found.tp * found.search > 1

    def written(self) -> dict[str, Any]:
        """The fields of engine.json that the spec decides, by their names there, as plain data."""
        found: dict[str, Any] = {name: getattr(self, name) for name in ALWAYS}
        found |= {name: getattr(self, name) for name in WHERE_SET if getattr(self, name) not in (None, ())}
        return {name: _plain(value) for name, value in found.items() if value is not None}

    def options(self, device: Literal["cpu", "cuda"]) -> EngineOptions:
        """The same as the worker reads it, on `device`."""
        return msgspec.convert(self.written() | {"device": device}, EngineOptions)

    def described(self) -> dict[str, Any]:
        """What a derived revision name is made from: fields that are set where they are of `WHERE_SET`, all others."""
        left_out = {name for name in WHERE_SET if getattr(self, name) in (None, ())}
        left_out |= {"runtime"} if self.runtime == "worker" else set()
        found = {}
        for field in msgspec.structs.fields(type(self)):
            if field.name not in left_out:
                value = getattr(self, field.name)
                found[field.encode_name] = _plain(value) if field.name in WHERE_SET else msgspec.to_builtins(value)
        return found


def _plain(value: Any) -> Any:
    """A part of the engine as engine.json spells it: snake_case, without what is None."""
    if isinstance(value, msgspec.Struct):
        found = msgspec.structs.asdict(value)
        return {name: inner for name, inner in found.items() if inner is not None and name != "search_model"}
    return msgspec.to_builtins(value)
