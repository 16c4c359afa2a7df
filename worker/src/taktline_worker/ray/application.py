"""The Serve application of one planner: its two deployments, joined by a handle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import ray
import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.devices import choose_device
from taktline_worker.lifecycle import ServeOptions, read_config
from taktline_worker.models.vjepa2_ac.adapter import check_deployment
from taktline_worker.models.vjepa2_ac.planner import FAMILY
from taktline_worker.ray.planner import Planner
from taktline_worker.ray.world_model import WorldModel
from taktline_worker.tls import TlsFiles

PLANNER = "Planner"
WORLD_MODEL = "WorldModel"
ROUND_ROBIN = "ray.serve.experimental.round_robin_router.RoundRobinRouter"
"""Serve's default router picks the shorter queue of two replicas, and sometimes deals one replica two shards of a round
while another one idles."""
HEAD = "node:__internal_head__"
_QUIET = {"enable_access_log": False}
"""A line for each shard says nothing that the spans of the Planner's report do not."""


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the `args` of a Serve config hold.

    Attributes:
        config: path of engine.json on the head; WorldModels get its content, so only the checkpoint's folder has to be
            mounted everywhere.
        replicas: WorldModels, each with a GPU of its own where the engine is for one; 0 = `engine.parallel.search`.
        listen: gRPC HOST:PORT of the Planner, the address that the gateway routes to.
        on_head: whether the Planner is bound to the head node, where a service finds its port.
        tls_cert: PEM files of the gRPC port, as for `taktline-worker serve`; likewise the other two.
    """

    config: str
    replicas: int = 0
    listen: str = "0.0.0.0:50051"  # a pod's port is for the gateway, which is in other pods
    metrics_listen: str = ""
    on_head: bool = True
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    linger_s: float = 1.0
    grace_s: float = 30.0
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


def build(args: dict[str, Any]) -> Any:
    """The application; the deployments are not started yet.

    Args:
        args: `Arguments` by name.

    Raises:
        TaktlineError: CONFIG_INVALID, CHECKPOINT_INVALID or SEARCH_INVALID.
    """
    try:
        given = msgspec.convert(args, Arguments)
    except msgspec.ValidationError as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, f"the application's args do not fit: {error}", "see docs/planner.md, Ray Serve"
        ) from error
    config = read_config(Path(given.config))
    if config.model.family != FAMILY:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"{given.config} is for family {config.model.family}, and only {FAMILY} runs on Ray Serve",
            "leave engine.runtime out for this policy",
        )
    if config.engine.parallel.dp != 1:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"engine.parallel.dp is {config.engine.parallel.dp}; on Ray Serve one Planner leads all world models",
            "set engine.parallel.search to the number of GPUs that share a plan",
        )
    deployed = check_deployment(config, world_device(config.engine.device))
    replicas = given.replicas or config.engine.parallel.search
    alone = msgspec.structs.replace(config.engine.parallel, search=1)
    engine = msgspec.structs.replace(config.engine, parallel=alone, device=deployed.device.type)
    content = msgspec.json.encode(msgspec.structs.replace(config, engine=engine))
    world_models = serve.deployment(
        WorldModel,
        name=WORLD_MODEL,
        num_replicas=replicas,
        max_ongoing_requests=1,
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if deployed.device.type == "cuda" else 0},
        logging_config=_QUIET,
        request_router_config=RequestRouterConfig(request_router_class=ROUND_ROBIN),
    ).bind(content, given.log_level)
    planner = serve.deployment(
        Planner,
        name=PLANNER,
        num_replicas=1,
        max_ongoing_requests=1,
        logging_config=_QUIET,
        # The head often offers no CPUs, so that nothing but this runs there.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001} if given.on_head else {}},
    )
    options = ServeOptions(given.listen, given.metrics_listen, given.linger_s, given.grace_s, _tls(given))
    return planner.bind(world_models, content, replicas, options, given.log_level)


def world_device(stated: str) -> torch.device:
    """Where world models run: `auto` is a GPU where the cluster has any, whatever this process's machine has.

    The head often has none. Before Ray runs, this machine is all of its cluster.

    Raises:
        TaktlineError: CONFIG_INVALID where `auto` finds no GPU in a cluster: one that is still to come would idle.
    """
    if stated != "auto":  # checked where the weights are loaded
        return torch.device(stated)
    if not ray.is_initialized():
        return choose_device(stated)
    if ray.cluster_resources().get("GPU", 0) > 0:
        return torch.device("cuda")
    raise TaktlineError(
        ErrorCode.CONFIG_INVALID,
        "engine.device is auto, and the Ray cluster has no GPU",
        "state cuda, for GPUs that are still to come, or cpu",
    )


def _tls(given: Arguments) -> TlsFiles | None:
    if not (given.tls_cert or given.tls_key or given.tls_client_ca):
        return None
    if not (given.tls_cert and given.tls_key):
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, "tls_cert and tls_key go together", "give both, or no certificate at all"
        )
    return TlsFiles(
        Path(given.tls_cert), Path(given.tls_key), Path(given.tls_client_ca) if given.tls_client_ca else None
    )
