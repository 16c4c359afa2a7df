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


async def watch_routes(
    path: Path, seen: tuple[int, int, int, int] | None, apply: Callable[[RoutingTable], None]
) -> None:
    """Calls `apply` with each valid new table, for ever. A broken table is logged and the last good one stays."""
    while True:
        await asyncio.sleep(POLL_S)
        identity = file_identity(path)
        if identity == seen:
            continue
        seen = identity
        try:
            table = read_routes(path)
        except TaktlineError as error:
            log(_logger, logging.ERROR, "routes_refused", code=error.code.value, reason=str(error))
            continue
        apply(table)
