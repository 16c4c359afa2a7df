"""A pod of a group that does not lead: it runs its ranks, reports ready with the group, and ends with it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import grpc
from taktline_protocol.deployment import EngineConfig
from taktline_protocol.rpc import SERVER_OPTIONS
from torch._C._distributed_c10d import TCPStore

from taktline_worker import group
from taktline_worker.devices import choose_device
from taktline_worker.group import EXIT_LOST, GroupLostError, Place
from taktline_worker.lifecycle import Health, ServeOptions, bind, check_address, run
from taktline_worker.planning import ranks
from taktline_worker.planning.group_ranks import (
    BEAT_S,
    BROKEN,
    GENERATION,
    GO,
    SILENT_S,
    beat_key,
    joined_key,
    started_key,
)
from taktline_worker.planning.ranks import RankCommand
from taktline_worker.tls import interceptors, server_credentials

logger = logging.getLogger(__name__)

EXIT_REFUSED = 2
REACH_S = 5.0
STOP_S = 5.0


def serve(config: EngineConfig, options: ServeOptions, place: Place) -> None:
    """Runs this pod's ranks until SIGTERM, SIGINT, or the end of the group.

    Raises:
        TaktlineError: an address or the devices are not as they must be.
        GroupLostError: the group is lost; the process is to end and start again.
    """
    pods: list[GroupPod] = []

    def make() -> GroupPod:
        pods.append(GroupPod(config, options, place))
        return pods[0]

    run(make, config.policy)
    if group.is_lost():
        raise GroupLostError(refused=bool(pods) and pods[0].refused)


def follow(config: EngineConfig, options: argparse.Namespace) -> None:
    """One rank of a group: loads, waits until all have, joins, and follows until it is let go or the mesh breaks up."""
    from taktline_worker.models.vjepa2_ac import adapter
    from taktline_worker.planning import relay

    world = adapter.load(config).world
    store = _reach(options.store_host, options.store_port)
    store.set(ranks.loaded_key(options.generation, options.rank), "1")
    store.wait([GO], timedelta(seconds=ranks.START_TIMEOUT_S))
    try:
        mesh = ranks.join(store, options.generation, options.rank, options.ranks, world.device)
        store.set(joined_key(options.rank), "1")
        relay.follow(world, mesh)
    except RuntimeError as error:  # what torch.distributed raises for a closed connection
        logger.warning("the mesh broke up; this rank leaves", extra={"rank": options.rank, "cause": str(error)[:300]})


class GroupPod:
    """The process of a pod that does not lead: health on the worker's port, and one process for each of its ranks.

    Raises:
        TaktlineError: CONFIG_INVALID; an address cannot be had, or there are fewer devices than ranks.
    """

    def __init__(self, config: EngineConfig, options: ServeOptions, place: Place) -> None:
        self.refused = False
        self._place = place
        self._closing = threading.Event()
        self._heard_at = 0.0
        self._store: TCPStore | None = None
        check_address(options.listen)
        credentials = server_credentials(options.tls) if options.tls is not None else None
        device = choose_device(config.engine.device)
        self._environments = [
            ranks.rank_environment(index, place.local_size, device) for index in range(place.local_size)
        ]
        self._folder = tempfile.TemporaryDirectory(prefix="taktline-group-")
        self._config = ranks.write_config(config, Path(self._folder.name))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._server = grpc.server(
            ThreadPoolExecutor(4, thread_name_prefix="rpc"),
            options=(*SERVER_OPTIONS, ("grpc.so_reuseport", 0)),
            interceptors=interceptors(options.tls),
        )
        self._health = Health(self._server, options.health_listen)
        bind(self._server, options.listen, credentials)

    def start(self) -> None:
        """Starts the ranks; the pod reports ready once they have all joined."""
        self._server.start()
        for rank, environment in zip(self._place.ranks, self._environments, strict=True):
            place = self._place
            told = RankCommand(self._config, rank, place.size, place.address, place.port, GENERATION, grouped=True)
            self._processes[rank] = ranks.start_rank(told, environment)
        logger.info("ranks start", extra={"ranks": list(self._place.ranks), "of": self._place.size})
        for work in (self._keep, self._guard):
            threading.Thread(target=work, name="group", daemon=True).start()

    def drain(self, hurry: threading.Event | None = None) -> None:
        """Ends the ranks: without them the group's plans are nobody's, so there is nothing to wait for."""
        del hurry
        self._closing.set()
        self._health.set(serving=False)
        self._tell(f"pod {self._place.node} was told to leave")
        for process in self._processes.values():
            process.terminate()
        ends = time.monotonic() + STOP_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, ends - time.monotonic()))
            process.kill()
            process.wait()
        self._server.stop(1.0).wait()
        self._folder.cleanup()

    def _keep(self) -> None:
        """Tells pod 0 that this one is well, and ends when a rank or pod 0 does."""
        place, ready = self._place, False
        gives_up = time.monotonic() + ranks.START_TIMEOUT_S
        while not self._closing.wait(BEAT_S):
            ended = {rank: one.returncode for rank, one in self._processes.items() if one.poll() is not None}
            if ended:
                self.refused = EXIT_REFUSED in ended.values()
                self._leave("; ".join(f"rank {rank} ended with code {code}" for rank, code in ended.items()))
                return
            try:
                if self._store is None:
                    self._store = _connect(place.address, place.port)
                    if self._store.add(started_key(place.node), 1) > 1:
                        self._leave(f"pod {place.node} has started again")
                        return
                self._store.add(beat_key(place.node), 1)
                self._heard_at = time.monotonic()
                if not ready and self._store.check([joined_key(rank) for rank in place.ranks]):
                    ready = True
                    self._health.set(serving=True)
                    logger.info("group joined", extra={"ranks": list(place.ranks), "of": place.size})
            except RuntimeError as error:
                if self._store is not None or time.monotonic() > gives_up:
                    group.leave(f"pod 0 of the group is lost: {error}"[:300])
                    return

    def _leave(self, reason: str) -> None:
        self._tell(reason)
        group.leave(reason)

    def _tell(self, reason: str) -> None:
        """Tells the other pods that the group is lost; the first reason stands."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # pod 0 is gone already
                if not self._store.check([BROKEN]):
                    self._store.set(BROKEN, reason)

    def _guard(self) -> None:
        """Ends the process where pod 0 is silent: a call to its store then never returns."""
        while not self._closing.wait(BEAT_S):
            if self._heard_at and time.monotonic() - self._heard_at > SILENT_S:
                logger.error("pod 0 of the group is silent; this pod starts again", extra={"silent_s": SILENT_S})
                for process in self._processes.values():
                    process.kill()
                os._exit(EXIT_LOST)


def _reach(host: str, port: int) -> TCPStore:
    """The store of pod 0, whenever that comes up within the time that starting may take.

    Raises:
        RuntimeError: it did not.
    """
    ends = time.monotonic() + ranks.START_TIMEOUT_S
    while True:
        try:
            return _connect(host, port)
        except RuntimeError:
            if time.monotonic() > ends:
                raise
            time.sleep(BEAT_S)  # the name may not be known yet, or nobody listens yet


def _connect(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=REACH_S), wait_for_workers=False)
