"""The routing table file: read, checked, and read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import RoutingTable

from taktline_gateway.logs import log

POLL_S = 0.5
_logger = logging.getLogger(__name__)


def read_routes(path: Path) -> RoutingTable:
    """Reads and checks the table. Raises TaktlineError `config_invalid`."""
    try:
        table = msgspec.json.decode(path.read_bytes(), type=RoutingTable)
    except OSError as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, f"the routing table {path} cannot be read: {error.strerror}", "check --routes"
        ) from error
    except msgspec.MsgspecError as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"the routing table {path} is not valid: {error}",
            "compare it with docs/api.md, section Routing table",
        ) from error
    policies = [route.policy for route in table.routes]
    repeated = sorted({policy for policy in policies if policies.count(policy) > 1})
    if repeated:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"the routing table {path} names {', '.join(repeated)} more than once",
            "give each policy one route; list its workers as targets",
        )
    for route in table.routes:
        if route.max_batch < 1 or not 0 <= route.max_wait_ms < 60_000:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"route {route.policy!r} has max_batch {route.max_batch} and max_wait_ms {route.max_wait_ms:g}",
                "use max_batch >= 1 and 0 <= max_wait_ms < 60000",
            )
    return table


def file_identity(path: Path) -> tuple[int, int, int, int] | None:
    """What changes when a file is replaced: device, inode, mtime, size of what the path leads to; None if absent.

    A mounted ConfigMap changes by swapping a symlink above the file, which changes the inode seen here.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


class FileChanges:
    """When files are to be read again: once they have changed, and as long as the system does not give them out.

    That a process is out of descriptors, or a disk does not answer, says nothing about the file: what is in it must
    take effect as soon as it can be read.

    Args:
        look: what changes when the files are replaced.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._seen = look()
        self._again = False
        self._told: tuple[object, str] | None = None

    def due(self) -> bool:
        """Whether to read them now."""
        identity = self._look()
        due = self._again or identity != self._seen
        self._seen, self._again = identity, False
        return due

    def failed(self, error: TaktlineError) -> bool:
        """They were due, and could not be read or used; whether that is to be logged: once for each version."""
        self._again = isinstance(error.__cause__, OSError)
        before, self._told = self._told, (self._seen, str(error))
        return before != self._told


async def watch_routes(path: Path, changes: FileChanges, apply: Callable[[RoutingTable], None]) -> None:
    """Calls `apply` with each valid new table, for ever. A broken table is logged and the last good one stays."""
    while True:
        await asyncio.sleep(POLL_S)
        if not changes.due():
            continue
        try:
            table = read_routes(path)
        except TaktlineError as error:
            if changes.failed(error):
                log(_logger, logging.ERROR, "routes_refused", code=error.code.value, reason=str(error))
            continue
        try:
            apply(table)
        except Exception:  # a fault of ours must not end the watching: the next table may be the way out
            log(_logger, logging.ERROR, "internal", exc_info=True, reason="the routing table is applied in part")
