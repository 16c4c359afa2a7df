"""The typed PolicyDeployment that the planner reads: the CRD's spec after validation and defaults."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

import msgspec
from taktline_protocol.delivery import MODELS_FOLDER, DeliveryConfig
from taktline_protocol.deployment import ClientMapping, ClientProtocol, DegradeOptions, EngineOptions, ModelConfig
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.messages import PriorityName

from taktline_operator import model_source, schema, search_ranks
from taktline_operator.engine_spec import Engine
from taktline_operator.model_source import CACHE_MOUNT, PVC_MOUNT, Delivery, Source, StatisticsFrom
from taktline_operator.scaling_spec import Placement, Queue, Scaling
from taktline_operator.slo_windows import DEFAULT_PERIOD_DAYS

Family = Literal["pi0", "pi05", "gr00t-n1.7", "cosmos3-nano", "cosmos3-edge", "minicpm-robot", "vjepa2-ac"]
Accelerator = Literal["cpu", "jetson-thor", "rtx-5090", "a40", "a100", "h100", "h200"]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Spelled in camelCase on the wire, as Kubernetes writes fields."""


class Model(_Struct, frozen=True):
    """The checkpoint."""

    family: Family
    source: Source
    revision: str = ""
    sha256: dict[str, str] = {}
    statistics: str = ""
    statistics_from: StatisticsFrom | None = None
    cameras: dict[str, str] = {}


class Resources(_Struct, frozen=True):
    """Requests and limits, quantities as written."""

    requests: dict[str, int | str] = {}
    limits: dict[str, int | str] = {}


class Toleration(_Struct, frozen=True, omit_defaults=True):
    """One toleration of a pod."""

    key: str = ""
    operator: Literal["", "Exists", "Equal"] = ""
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    toleration_seconds: int | None = None


class Mesh(_Struct, frozen=True):
    """How the pods of one worker find and reach each other, where its GPUs are those of several nodes."""

    port: int = 29400
    interface: str = ""
    topology_key: str = ""


class Pool(_Struct, frozen=True):
    """A group of like accelerators."""

    name: str
    accelerator: Accelerator
    min_replicas: int = 1
    max_replicas: int | None = None
    replicas: int | None = None
    cost_per_hour: float = 0.0
    profile: tuple[PoolTime, ...] = ()
    image: str | None = None
    runtime_class_name: str | None = None
    mig_profile: str = ""
    claim_template: str = ""
    spot: bool = False
    startup_seconds: int | None = None
    gpus_per_node: int | None = None
    mesh: Mesh = Mesh()
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    resources: Resources = Resources()

    @property
    def limits(self) -> dict[str, int | str]:
        """Limits of one worker's pod, with the MIG slice that the pool names."""
        slice_ = {f"nvidia.com/mig-{self.mig_profile.replace('+', '.')}": 1} if self.mig_profile else {}
        return {**slice_, **self.resources.limits}

    @property
    def ceiling(self) -> int:
        """Most workers this pool may have."""
        if self.max_replicas is not None:
            return self.max_replicas
        return max(self.min_replicas, self.replicas or 0)


class Slo(_Struct, frozen=True):
    """The time the fleet has."""

    control_budget_ms: float
    on_time_objective: float = 0.999
    window_days: int = DEFAULT_PERIOD_DAYS
    priority: Literal["safety", "production", "background"] = "production"


class Batching(_Struct, frozen=True):
    """How observations share an inference."""

    max_batch: int | None = None
    max_wait_ms: float = 5.0


class Mirroring(_Struct, frozen=True):
    """How much of the live traffic a candidate gets to see before it serves any."""

    percent: int = 20
    min_observations: int = 200


class Parity(_Struct, frozen=True):
    """How alike a candidate's actions must be."""

    tolerance: float = 0.02
    tolerances: tuple[float, ...] = ()
    rows: int = 0
    min_agreement: float = 0.99


class Rollout(_Struct, frozen=True):
    """How a change of model, engine or image reaches the robots."""

    strategy: Literal["RollingUpdate", "Progressive"] = "RollingUpdate"
    shadow: Mirroring = Mirroring()
    parity: Parity = Parity()
    steps: tuple[int, ...] = (5, 25, 50, 100)
    step_seconds: int = 300
    step_min_observations: int = 200
    session_hold_seconds: int = 30
    capacity: Literal["Surge", "Shared"] = "Surge"
    timeout_minutes: int | None = None


class PoolTime(_Struct, frozen=True):
    """A measured batch time of a pool that has no worker yet."""

    batch: int
    median_ms: float
    p99_ms: float


class ActionPart(_Struct, frozen=True):
    """A named part of the action row."""

    name: str
    width: int


class Client(_Struct, frozen=True):
    """How observations of one client protocol are read."""

    protocol: ClientProtocol
    images: dict[str, str] = {}
    state: tuple[str, ...] = ()
    instruction: str = ""
    default_instruction: str = ""
    control_hz: float = 0.0
    execute_steps: int = 0
    actions: tuple[ActionPart, ...] = ()
    metadata: dict[str, bool | float | str | list[float]] = {}

    def mapping(self) -> ClientMapping:
        """The same as the gateway reads it."""
        return ClientMapping(
            images=self.images,
            state=self.state,
            instruction=self.instruction,
            default_instruction=self.default_instruction,
            control_hz=self.control_hz,
            execute_steps=self.execute_steps,
            actions={part.name: part.width for part in self.actions},
            metadata=self.metadata,
        )


class Access(_Struct, frozen=True):
    """How robots share workers where there is not enough for all."""

    robot_weights: dict[str, float] = {}
    priority_ceilings: dict[str, PriorityName] = {}


class Degrade(_Struct, frozen=True):
    """What may be made cheaper before a robot is refused."""

    min_solver_steps: int = 0
    min_action_horizon: int = 0
    fallback_policy: str = ""

    def options(self) -> DegradeOptions:
        """The same as the gateway reads it."""
        return DegradeOptions(
            min_solver_steps=self.min_solver_steps,
            min_action_horizon=self.min_action_horizon,
            fallback_policy=self.fallback_policy,
        )


class Spec(_Struct, frozen=True):
    """PolicyDeployment.spec."""

    model: Model
    pools: tuple[Pool, ...]
    slo: Slo
    engine: Engine = Engine()
    batching: Batching = Batching()
    rollout: Rollout = Rollout()
    scaling: Scaling | None = None
    placement: Placement = Placement()
    queue: Queue | None = None
    replicas: int | None = None
    clients: tuple[Client, ...] = ()
    degrade: Degrade = Degrade()
    access: Access = Access()
    delivery: Delivery = Delivery()

    def desired_replicas(self) -> dict[str, int]:
        """Workers wanted by pool: each pool's minimum, then spec.replicas filled up in the order of the pools."""
        wanted = {pool.name: pool.min_replicas if pool.replicas is None else pool.replicas for pool in self.pools}
        if self.replicas is None:
            return wanted
        left = self.replicas - sum(wanted.values())
        for pool in self.pools:
            added = max(0, min(left, pool.ceiling - wanted[pool.name]))
            wanted[pool.name] += added
            left -= added
        return wanted

    def model_path(self) -> str:
        """The checkpoint folder as the worker sees it."""
        if self.model.source.path is not None:
            return self.model.source.path
        if self.model.source.fetched:
            return f"{CACHE_MOUNT}/{MODELS_FOLDER}/{self.delivery_config().key}"
        inside = self.model.source.oci or self.model.source.pvc
        assert inside is not None, "the CRD admits exactly one source"
        return f"{PVC_MOUNT}/{inside.path}".rstrip("/")

    def delivery_config(self, policy: str = "") -> DeliveryConfig:
        """What the program gets that fetches the checkpoint, where it is fetched."""
        return model_source.delivery_config(
            self.model.source,
            self.delivery,
            policy=policy,
            revision=self.revision(),
            sha256=self.model.sha256,
            statistics=self.model.statistics_from,
        )

    def revision(self) -> str:
        """The revision every chunk carries: the user's name, else one derived from model and engine."""
        if self.model.revision:
            return self.model.revision
        described = [model_source.described(msgspec.to_builtins(self.model)), self.engine.described()]
        return f"r-{hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:10]}"

    def model_config(self) -> ModelConfig:
        """The model part of engine.json."""
        return ModelConfig(
            family=self.model.family,
            path=self.model_path(),
            revision=self.revision(),
            # A fetched file was checked on its way; reading it all again would only make the start longer.
            sha256={} if self.model.source.fetched else self.model.sha256,
            cameras=self.model.cameras,
            statistics=self.model.statistics,
        )

    def engine_options(self, device: Literal["cpu", "cuda"]) -> EngineOptions:
        """The engine part of engine.json on the given device."""
        return self.engine.options(device)


class WorkerTls(msgspec.Struct, frozen=True, kw_only=True):
    """Certificates of the workers, as the installation decides.

    Attributes:
        secret: Secret in each policy's namespace with tls.crt, tls.key and ca.crt.
        client_auth: whether workers serve only gateways with a certificate of the issuer in ca.crt.
    """

    secret: str
    client_auth: bool = False


class PolicyDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """One PolicyDeployment as the planner sees it.

    Attributes:
        tls: certificates of its workers; None where gateways reach them in plain text.
        uid: empty when the object never met an API server; its children then carry no owner reference.
        created: metadata.creationTimestamp, RFC 3339; decides who keeps a contested policy name.
        spec: with the ranks of the search in it, where they were chosen.
        search: how they were; None where the spec states them.
        kernel_cache: folder of each node that keeps the kernels its workers compile, by namespace; empty for none.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    created: str
    deleting: bool
    spec: Spec
    search: search_ranks.Choice | None = None
    tls: WorkerTls | None = None
    kernel_cache: str = ""

    def with_cache(self, folder: str) -> PolicyDeployment:
        """The same with a folder of each node as the cache of fetched checkpoints."""
        cache = model_source.ModelCache(host_path=folder)
        delivery = msgspec.structs.replace(self.spec.delivery, cache=cache)
        return msgspec.structs.replace(self, spec=msgspec.structs.replace(self.spec, delivery=delivery))

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name


def parse(body: dict[str, Any]) -> PolicyDeployment:
    """Read a PolicyDeployment from plain JSON data.

    Raises:
        TaktlineError: CONFIG_INVALID, naming every wrong field.
    """
    return admitted(schema.validated(body))


def admitted(complete: dict[str, Any]) -> PolicyDeployment:
    """The same of an object that was checked and given its defaults already, as by the API server.

    Raises:
        TaktlineError: CONFIG_INVALID; a CRD of another release let something in that this operator does not know.
    """
    metadata = complete["metadata"]
    try:
        spec = msgspec.convert(complete["spec"], Spec)
    except msgspec.ValidationError as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"PolicyDeployment {metadata['name']!r}: {error}",
            "the installed CRD is not this operator's: taktline-operator crd | kubectl apply --server-side -f -",
        ) from error
    spec = msgspec.convert(complete["spec"], Spec)
    choice = search_ranks.choose(spec.engine, spec.slo.control_budget_ms)
    if choice is not None:
        spec = msgspec.structs.replace(spec, engine=search_ranks.applied(spec.engine, choice))
    return PolicyDeployment(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 1),
        created=metadata.get("creationTimestamp", ""),
        deleting=bool(metadata.get("deletionTimestamp")),
        spec=spec,
        search=choice,
    )
