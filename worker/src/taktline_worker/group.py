"""The place of this pod in a group of pods that serve as one worker, read from the operator's rendezvous variables."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from taktline_protocol import ErrorCode, TaktlineError

logger = logging.getLogger(__name__)

EXIT_LOST = 3
LEAVE_S = 45.0
"""How long a process whose group is lost may take to drain: a collective whose peer is silent never ends."""

NODES = "NNODES"
NODE_RANK = "NODE_RANK"
LOCAL_SIZE = "LOCAL_WORLD_SIZE"
ADDRESS = "MASTER_ADDR"
PORT = "MASTER_PORT"
OWN_ADDRESS = "POD_IP"


_lost = threading.Event()


class GroupLostError(Exception):
    """The group of this process is lost: all its pods end, and start again together.

    Attributes:
        refused: a rank of this pod refused its checkpoint or configuration, and has said why.
    """

    def __init__(self, refused: bool = False) -> None:
        super().__init__("a rank of the group is lost; the group starts again")
        self.refused = refused


def leave(reason: str) -> None:
    """Ends this process as SIGTERM does, because its group is lost: what it holds is answered, nothing new is taken.

    Safe from any thread, and more than once.
    """
    if _lost.is_set():
        return
    _lost.set()
    logger.error("the group is lost; this pod leaves and starts again with the others", extra={"reason": reason})
    hurry = threading.Timer(LEAVE_S, os._exit, (EXIT_LOST,))
    hurry.daemon = True
    hurry.start()
    os.kill(os.getpid(), signal.SIGTERM)


def is_lost() -> bool:
    """Whether `leave` was called."""
    return _lost.is_set()


@dataclass(frozen=True, slots=True)
class Place:
    """One pod of a group; names and meanings are those of torchrun.

    Attributes:
        node: this pod, counted from 0; pod 0 leads: it has rank 0, keeps the store, and serves robots.
        nodes: pods of the group, at least 2.
        local_size: ranks in each pod.
        address: where the others reach pod 0, a DNS name or an address.
        port: TCP port of the store in pod 0.
        own_address: address of this pod, which pod 0 listens on; empty listens on all.
    """

    node: int
    nodes: int
    local_size: int
    address: str
    port: int
    own_address: str = ""

    @property
    def leads(self) -> bool:
        """Whether this pod serves the group's robots."""
        return self.node == 0

    @property
    def size(self) -> int:
        """Ranks of the whole group."""
        return self.nodes * self.local_size

    @property
    def ranks(self) -> range:
        """Ranks of this pod."""
        return range(self.node * self.local_size, (self.node + 1) * self.local_size)


def from_environment(environment: Mapping[str, str]) -> Place | None:
    """The place that the environment states; None where this pod is a worker by itself (no NNODES, or 1).

    Raises:
        TaktlineError: CONFIG_INVALID; a variable is absent or out of range.
    """
    if environment.get(NODES, "1") == "1":
        return None
    nodes = _number(environment, NODES, 2, 64)
    place = Place(
        node=_number(environment, NODE_RANK, 0, nodes - 1),
        nodes=nodes,
        local_size=_number(environment, LOCAL_SIZE, 1, 64),
        address=environment.get(ADDRESS, ""),
        port=_number(environment, PORT, 1, 65535),
        own_address=environment.get(OWN_ADDRESS, ""),
    )
    if not place.address:
        raise _wrong(f"{ADDRESS} is not set")
    return place


def check_size(place: Place, ranks: int) -> None:
    """Refuse a group whose ranks are not those that engine.json asks for.

    Raises:
        TaktlineError: CONFIG_INVALID.
    """
    if place.size != ranks:
        raise _wrong(f"{place.nodes} pods of {place.local_size} ranks each, and engine.parallel asks for {ranks} ranks")


def _number(environment: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environment.get(name, "")
    if not text.isdecimal() or not low <= int(text) <= high:
        raise _wrong(f"{name} is {text!r}, not a number from {low} to {high}")
    return int(text)


def _wrong(reason: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.CONFIG_INVALID,
        f"this pod's place in its group is wrong: {reason}",
        f"the operator sets {NODES}, {NODE_RANK}, {LOCAL_SIZE}, {ADDRESS} and {PORT}; unset {NODES} to run alone",
    )
