"""What the process of a rank other than 0 of a Cosmos3 mesh runs."""

from __future__ import annotations

import logging

from taktline_protocol.deployment import EngineConfig

from taktline_worker.models.cosmos3 import adapter
from taktline_worker.models.cosmos3.group import follow
from taktline_worker.models.cosmos3.mesh import ProcessGroupMesh
from taktline_worker.planning import ranks as processes

logger = logging.getLogger(__name__)


def serve_rank(config: EngineConfig, rank: int, size: int, store_port: int, generation: int, host: str) -> None:
    """What the process of a rank other than 0 does: load its share, join, follow orders until the group ends.

    Raises:
        TaktlineError: the checkpoint or the configuration is refused.
    """
    store = processes.follower_store(store_port, host)
    loaded = adapter.load_rank(config, rank)
    store.set(processes.loaded_key(generation, rank), "1")
    try:
        control = processes.join(store, generation, rank, size, loaded.device)
        parallel = config.engine.parallel
        mesh = ProcessGroupMesh(parallel.cfg, parallel.tp, loaded.split)
        follow(loaded.member(mesh), loaded.decoder, control)
    except RuntimeError as error:  # what torch.distributed raises for a closed connection
        logger.warning("the mesh broke up; this rank leaves", extra={"rank": rank, "cause": str(error)[:300]})
