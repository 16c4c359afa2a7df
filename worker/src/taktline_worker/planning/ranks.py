"""The ranks of a planner's mesh: follower processes that are started, joined into one group, and replaced when lost."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from taktline_worker.cores import usable_cores
from taktline_worker.planning.mesh import Mesh, OneRank, ProcessGroupMesh
from taktline_worker.planning.relay import dismiss

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0
"""Loading and capturing on all ranks at the first start; after a loss rank 0 plans alone for as long as it takes."""
JOIN_TIMEOUT_S = 60.0
# A follower waits for orders for as long as no robot asks: a lost peer is noticed by its closed connection.
_IDLE = timedelta(days=365)
_POLL_S = 0.05
_LEAVE_S = 5.0
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0
"""Followers that were joined for so long are replaced after the first pause again."""


class Ranks(Protocol):
    """Where an adapter gets the mesh of each plan from."""

    def mesh(self) -> Mesh:
        """The mesh of the next plan."""

    def sound(self, mesh: Mesh | None = None) -> bool:
        """Whether every rank of the plan just made, or of the newest group if it is `mesh`, is still there."""

    def lost(self) -> None:
        """A plan failed or cannot be trusted because a rank is gone: the next meshes are without it. Does not wait."""

    def close(self) -> None:
        """Lets the followers go."""


class FixedRanks:
    """A mesh made elsewhere; when it loses a rank, this process plans alone from then on."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def mesh(self) -> Mesh:
        """See `Ranks`."""
        return self._mesh

    def sound(self, mesh: Mesh | None = None) -> bool:
        """Until it is lost: a fixed mesh tells of that by its failing collectives only."""
        return mesh is None or mesh is self._mesh

    def lost(self) -> None:
        """See `Ranks`."""
        self._mesh = OneRank()

    def close(self) -> None:
        """Nothing was started here."""


class FollowerRanks:
    """Rank 0's view of its followers on this machine, one process for each further device.

    A lost follower costs the plan it took part in some time and no robot its answer: rank 0 plans alone, with the same
    bytes as a result. All the rest is done in the background: what is left of the group is ended, a whole new one is
    started, loads and is joined, and then takes over.

    Args:
        config: of the worker; the followers load the same policy.
        size: all ranks, this one included.
        device: of this rank.

    Raises:
        TaktlineError: CONFIG_INVALID where there are fewer devices than ranks, or a follower refuses to start.
    """

    meanwhile = "this one plans alone"
    """What happens until a new group has loaded, for the log."""
    whose = "the planner"

    def __init__(self, config: EngineConfig, size: int, device: torch.device) -> None:
        self.size = size
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._device = device
        self._environments = [rank_environment(rank, size, device) for rank in range(1, size)]
        self._folder = tempfile.TemporaryDirectory(prefix="taktline-ranks-")
        self._config = Path(self._folder.name) / "engine.json"
        self._config = write_config(config, Path(self._folder.name))
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._generation = 0
        self._followers: list[subprocess.Popen[bytes]] = []
        self._mesh: ProcessGroupMesh | None = None
        self._in_group = False
        self._joined_at = 0.0
        self._losses = 0
        self._closing = threading.Event()
        self._losing, self._aborting = threading.Lock(), threading.Lock()
        self._gone = threading.Event()
        self._starter: threading.Thread | None = None
        try:
            self._spawn()
            self._wait_loaded(START_TIMEOUT_S)
            self._join()
        except BaseException:
            self.close()
            raise

    def mesh(self) -> Mesh:
        """The whole mesh where it stands, else this rank alone; waits for nothing."""
        if self._gone.is_set():
            self.lost()
            return OneRank()
        return self._mesh or OneRank()

    def sound(self, mesh: Mesh | None = None) -> bool:
        """See `Ranks`: with NCCL an aborted collective ends without an error, and its values are worth nothing."""
        return not self._gone.is_set() and (mesh is None or mesh is self._mesh)

    def lost(self) -> None:
        """Has what is left of the group ended and a new one started, in the background."""
        with self._losing:
            if self._closing.is_set() or (self._starter is not None and self._starter.is_alive()):
                return
            steady = self._mesh is not None and time.monotonic() - self._joined_at >= STEADY_S
            self._mesh = None
            self._losses = 0 if steady else self._losses
            pause_s = _PAUSES_S[min(self._losses, len(_PAUSES_S) - 1)]
            self._losses += 1
            logger.error(
                f"a rank of the mesh is lost; {self.meanwhile} until a new group has loaded",
                extra={"ranks": self.size, "restart_in_s": pause_s},
            )
            self._starter = threading.Thread(target=self._replace, args=(pause_s,), name="ranks", daemon=True)
            self._starter.start()

    def close(self) -> None:
        """Lets the followers go, and ends those that stay; call it when no plan is being made."""
        self._closing.set()
        if self._mesh is not None and not self._gone.is_set():
            with contextlib.suppress(RuntimeError):
                self._dismiss(self._mesh)
        self._leave()
        self._end_followers()
        if self._starter is not None:
            self._starter.join(_LEAVE_S)
            self._leave()  # what it had joined and started meanwhile
            self._end_followers()
        self._folder.cleanup()

    def _dismiss(self, mesh: Mesh) -> None:
        dismiss(mesh)

    def pids(self) -> list[int]:
        """Processes of the followers, by rank."""
        return [process.pid for process in self._followers]

    def _spawn(self) -> None:
        self._generation += 1
        self._gone.clear()
        self._followers = [
            start_rank(
                RankCommand(self._config, rank, self.size, "127.0.0.1", self._store.port, self._generation), environment
            )
            for rank, environment in enumerate(self._environments, start=1)
        ]
        threading.Thread(target=self._watch, args=(self._followers,), name="ranks-watch", daemon=True).start()

    def _watch(self, followers: list[subprocess.Popen[bytes]]) -> None:
        """Notices the first follower that ends, and frees a plan that waits for it."""
        while all(process.poll() is None for process in followers):
            time.sleep(_POLL_S)
        if followers is self._followers and not self._closing.is_set():
            self._gone.set()
            if self._backend == "nccl" and self._mesh is not None:
                # Nothing else ends a collective whose peer is gone.
                began = time.monotonic()
                self._abort()
                logger.error("a rank has ended; the collectives are ended", extra={"abort_s": time.monotonic() - began})

    def _wait_loaded(self, timeout_s: float) -> None:
        keys = [loaded_key(self._generation, rank) for rank in range(1, self.size)]
        ends = time.monotonic() + timeout_s
        while not self._store.check(keys):
            ended = next((rank for rank, one in enumerate(self._followers, 1) if one.poll() is not None), None)
            if ended is not None or self._closing.is_set() or time.monotonic() > ends:
                reason = f"the ranks of {self.whose} did not load within {timeout_s:g} s"
                if ended is not None:
                    code = self._followers[ended - 1].returncode
                    reason = f"rank {ended} of {self.whose} ended with code {code} before it joined"
                raise TaktlineError(
                    ErrorCode.CONFIG_INVALID,
                    reason,
                    "read its lines in this log; check that each rank has a device and memory of its own",
                )
            time.sleep(_POLL_S)

    def _join(self) -> None:
        self._in_group = True  # also where joining fails half-way
        self._mesh = join(self._store, self._generation, 0, self.size, self._device)
        self._joined_at = time.monotonic()
        logger.info("mesh joined", extra={"ranks": self.size, "backend": self._backend, "generation": self._generation})

    def _leave(self) -> None:
        self._mesh = None
        if self._backend == "nccl":
            self._abort()
        elif self._in_group and dist.is_initialized():
            dist.destroy_process_group()
        self._in_group = False

    def _abort(self) -> None:
        # One at a time: who notices a loss and who replaces the group both come here.
        with self._aborting:
            if self._in_group and dist.is_initialized():
                _abort()

    def _end_followers(self) -> None:
        followers, self._followers = self._followers, []
        if not self._closing.is_set():
            for process in followers:
                process.kill()
        grace = time.monotonic() + (_LEAVE_S if self._closing.is_set() else 0.0)
        for process in followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, grace - time.monotonic()))
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _replace(self, pause_s: float) -> None:
        """Ends the group and makes a new one, as often as it takes."""
        while True:
            # The processes first: a rank that is there but silent frees the others by its end alone.
            self._end_followers()
            self._leave()
            if self._closing.wait(pause_s):
                return
            try:
                self._spawn()
                self._wait_loaded(START_TIMEOUT_S)
                self._join()
                return
            except (TaktlineError, OSError, RuntimeError) as error:
                if self._closing.is_set():
                    return
                pause_s = _PAUSES_S[-1]
                logger.error(
                    "a new group of ranks does not start", extra={"cause": str(error)[:500], "restart_in_s": pause_s}
                )


class RankCommand(NamedTuple):
    """What a rank is told: where its policy's config is, who it is, and where the group's store is."""

    config: Path
    rank: int
    size: int
    store_host: str
    store_port: int
    generation: int
    grouped: bool = False


def write_config(config: EngineConfig, folder: Path) -> Path:
    """Writes the config of a rank: the worker's own, for a process that starts no ranks itself."""
    alone = msgspec.structs.replace(config.engine.parallel, search=1)
    follower = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, parallel=alone))
    path = folder / "engine.json"
    path.write_bytes(msgspec.json.encode(follower))
    return path


def start_rank(told: RankCommand, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts the process of one rank; it leaves when its standard input closes."""
    return subprocess.Popen(
        (
            *(sys.executable, "-c", "import sys; from taktline_worker.cli import main; sys.exit(main())", "rank"),
            *("--config", str(told.config), "--rank", str(told.rank), "--ranks", str(told.size)),
            *("--store-host", told.store_host, "--store-port", str(told.store_port)),
            *("--generation", str(told.generation)),
            *(("--grouped",) if told.grouped else ()),
            *("--log-level", logging.getLevelName(logging.getLogger().getEffectiveLevel())),
        ),
        env=environment,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def join(store: Store, generation: int, rank: int, size: int, device: torch.device) -> ProcessGroupMesh:
    """Joins one generation of the mesh; all its ranks call this at about the same time.

    Raises:
        RuntimeError: a rank did not come within a minute.
    """
    scope = PrefixStore(f"generation-{generation}", store)
    scope.set_timeout(timedelta(seconds=JOIN_TIMEOUT_S))
    if device.type != "cuda":
        dist.init_process_group("gloo", store=scope, rank=rank, world_size=size, timeout=_IDLE)
        return ProcessGroupMesh()
    own = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=scope, rank=rank, world_size=size, timeout=_IDLE, device_id=own)
    return ProcessGroupMesh(control=dist.new_group(backend="gloo", timeout=_IDLE))


def loaded_key(generation: int, rank: int) -> str:
    """What a follower sets in the store once it has loaded."""
    return f"loaded/{generation}/{rank}"


def follower_store(port: int, host: str = "127.0.0.1") -> TCPStore:
    """The store of rank 0, as its followers reach it.

    Raises:
        RuntimeError: it cannot be reached.
    """
    return TCPStore(host, port, None, is_master=False, wait_for_workers=False)


def _abort() -> None:
    # A collective that waits for a dead peer ends with this and with nothing else.
    with contextlib.suppress(RuntimeError):
        dist.distributed_c10d._abort_process_group()


def rank_environment(index: int, count: int, device: torch.device) -> dict[str, str]:
    """The environment of one of `count` ranks on this machine: the index-th visible GPU, or its share of the cores.

    Raises:
        TaktlineError: CONFIG_INVALID where there are fewer devices than ranks.
    """
    own = dict(os.environ)
    own.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    if device.type != "cuda":
        return own
    visible = [name for name in own.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    devices = visible or [str(index) for index in range(torch.cuda.device_count())]
    if len(devices) < count:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"parallel.search puts {count} ranks in this pod, and {len(devices)} GPUs are visible",
            "give the pod one GPU for each rank, or set spec.engine.parallel.search to what it has",
        )
    own["CUDA_VISIBLE_DEVICES"] = devices[index]
    return own
