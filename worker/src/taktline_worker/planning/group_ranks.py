"""Rank 0 of a planner whose ranks are spread over a group of pods: all serve, or none does."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from taktline_worker import group
from taktline_worker.group import Place
from taktline_worker.planning import ranks
from taktline_worker.planning.mesh import Mesh, OneRank, ProcessGroupMesh
from taktline_worker.planning.ranks import FollowerRanks, RankCommand, Ranks
from taktline_worker.planning.relay import dismiss

logger = logging.getLogger(__name__)

GENERATION = 1
"""A group that loses a rank starts again as a whole, with a new store, so it has one generation."""
GO = "go"
"""Set by rank 0 once every rank has loaded: only then do they join, within a minute of each other."""
BROKEN = "broken"
"""Set, to the reason, by a pod that leaves the group: the others then leave at once."""
BEAT_S = 1.0
SILENT_S = 20.0
"""A pod that has not been heard for so long is lost, though no connection says so."""
POLL_S = 0.1


def start_ranks(config: EngineConfig, device: torch.device) -> Ranks:
    """The further ranks of a planner: of this pod, or of the group that the environment says it leads.

    Raises:
        TaktlineError: CONFIG_INVALID; the ranks could not be started or joined.
    """
    place = group.from_environment(os.environ)
    if place is None:
        return FollowerRanks(config, config.engine.parallel.search, device)
    return GroupRanks(config, place, device)


def beat_key(node: int) -> str:
    """A number in the store that pod `node` counts up while it is well."""
    return f"beat/{node}"


def started_key(node: int) -> str:
    """How many processes pod `node` has had in this group: a second one means that the first is lost."""
    return f"started/{node}"


def joined_key(rank: int) -> str:
    """What a rank sets in the store once it takes orders."""
    return f"joined/{rank}"


class GroupRanks:
    """Rank 0's view of a group of pods. Losing any rank ends this process, and with it the whole group.

    A plan that lost a rank is made again by this one alone, with the same bytes, so no robot loses its answer; then the
    worker drains as on SIGTERM, and the pods start again together.

    Args:
        config: of the worker; all ranks load the same policy.
        place: of this pod, which leads.
        device: of this rank.

    Raises:
        TaktlineError: CONFIG_INVALID; a rank did not load or join in time, or the store's port is taken.
    """

    def __init__(self, config: EngineConfig, place: Place, device: torch.device) -> None:
        self.size = place.size
        self._place = place
        self._nccl = device.type == "cuda"
        self._mesh: ProcessGroupMesh | None = None
        self._gone = threading.Event()
        self._closing = threading.Event()
        self._host = place.own_address or "0.0.0.0"  # noqa: S104 - the other pods of the group connect to it
        self._store = _open_store(self._host, place.port)
        self._folder = tempfile.TemporaryDirectory(prefix="taktline-group-")
        path = ranks.write_config(config, Path(self._folder.name))
        reached = place.own_address or "127.0.0.1"
        self._local: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for index, rank in enumerate(place.ranks):
                if rank:
                    told = RankCommand(path, rank, place.size, reached, place.port, GENERATION, grouped=True)
                    self._local[rank] = ranks.start_rank(told, ranks.rank_environment(index, place.local_size, device))
            self._wait_loaded()
            self._store.set(GO, "1")
            self._mesh = ranks.join(self._store, GENERATION, 0, self.size, device)
        except BaseException:
            self.close()
            raise
        logger.info("group joined", extra={"ranks": self.size, "pods": place.nodes, "backend": dist.get_backend()})
        threading.Thread(target=self._watch, args=(reached,), name="group-watch", daemon=True).start()

    def mesh(self) -> Mesh:
        """The whole mesh; this rank alone for what is answered after a loss."""
        return OneRank() if self._mesh is None or self._gone.is_set() else self._mesh

    def sound(self, mesh: Mesh | None = None) -> bool:
        """See `Ranks`."""
        del mesh  # there is one group
        return not self._gone.is_set()

    def lost(self) -> None:
        """A plan lost a rank."""
        self._lose("a plan lost a rank")

    def close(self) -> None:
        """Lets the other ranks go; their pods start again and wait for a leader."""
        self._closing.set()
        if self._mesh is not None and not self._gone.is_set():
            with contextlib.suppress(RuntimeError):
                dismiss(self._mesh)
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self._mesh = None
        for process in self._local.values():
            process.kill()
            process.wait()
        self._folder.cleanup()

    def pids(self) -> list[int]:
        """Processes of this pod's other ranks."""
        return [process.pid for process in self._local.values()]

    def _wait_loaded(self) -> None:
        waiting = {rank: ranks.loaded_key(GENERATION, rank) for rank in range(1, self.size)}
        ends = time.monotonic() + ranks.START_TIMEOUT_S
        while True:
            waiting = {rank: key for rank, key in waiting.items() if not self._store.check([key])}
            if not waiting:
                return
            ended = self._ended() or _broken(self._store)
            if ended:
                raise _not_started(ended, "read the log of that rank's pod")
            if time.monotonic() > ends:
                missing = ", ".join(str(rank) for rank in sorted(waiting))
                raise _not_started(
                    f"ranks {missing} of {self.size} did not load within {ranks.START_TIMEOUT_S:g} s",
                    "look at the group's other pods: each must run, reach this one, and have its GPUs",
                )
            time.sleep(POLL_S)

    def _ended(self) -> str:
        for rank, process in self._local.items():
            if process.poll() is not None:
                return f"rank {rank} of the group ended with code {process.returncode}"
        return ""

    def _watch(self, host: str) -> None:
        """Notices a local rank that ends, and a pod that is silent, while no plan would tell."""
        try:
            store = ranks.follower_store(self._place.port, host)
            heard = dict.fromkeys(range(1, self._place.nodes), (0, time.monotonic()))
            while not self._closing.wait(BEAT_S):
                now = time.monotonic()
                for node, (count, at) in heard.items():
                    beats = store.add(beat_key(node), 0)
                    heard[node] = (beats, now) if beats != count else (count, at)
                silent = [node for node, (_, at) in heard.items() if now - at > SILENT_S]
                reason = self._ended() or _broken(store) or (f"pod {silent[0]} is silent" if silent else "")
                if reason:
                    self._lose(reason)
                    return
        except RuntimeError as error:
            self._lose(f"the group's store fails: {error}"[:300])

    def _lose(self, reason: str) -> None:
        if self._closing.is_set() or self._gone.is_set():
            return
        self._gone.set()
        if self._nccl:
            # Nothing else ends a collective whose peer is gone.
            with contextlib.suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()
        group.leave(reason)


def _broken(store: TCPStore) -> str:
    """Why a pod has left the group; empty while none has."""
    return store.get(BROKEN).decode("utf-8", "replace") if store.check([BROKEN]) else ""


def _open_store(host: str, port: int) -> TCPStore:
    """The group's store, on the pod's own address only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        # The store of the process before this one has just been there.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
        return TCPStore(
            host,
            port,
            None,
            is_master=True,
            timeout=timedelta(seconds=ranks.JOIN_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        listener.close()
        raise _not_started(
            f"the group's store cannot listen on {host}:{port}: {error}",
            f"free the port, or let the operator choose another one ({group.PORT})",
        ) from error


def _not_started(message: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.CONFIG_INVALID, message, next_step)
