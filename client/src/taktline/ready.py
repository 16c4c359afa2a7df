"""Waiting for a policy whose robot was started first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.messages import PolicyInfo

from taktline.address import unreachable
from taktline.stream_link import Timeout

ASK_AGAIN_S = 0.5
ANSWER_LEAST_S = 2.0
"""So long the last answer is waited for, too: the first one finds nothing loaded yet."""
_PASSES = frozenset({ErrorCode.GATEWAY_UNREACHABLE, ErrorCode.DRAINING})
"""A gateway that is still to come, or comes again."""
_logger = logging.getLogger("taktline")


async def until_ready(
    ask: Callable[[], Awaitable[PolicyInfo]], url: str, policy: str, robot_id: str, wait_s: float
) -> PolicyInfo:
    """What `ask` tells once a worker is ready. That the gateway itself is waited for is logged, with the reason.

    Raises:
        TaktlineError: `worker_unavailable` or `gateway_unreachable` where none was ready within `wait_s`; others as
            they come.
    """
    end = time.monotonic() + wait_s
    told = False
    while True:
        try:
            info = await asyncio.wait_for(ask(), max(ANSWER_LEAST_S, end - time.monotonic()))
            if info.ready:
                return info
            missing = TaktlineError(
                ErrorCode.WORKER_UNAVAILABLE,
                f"no worker of policy {policy!r} was ready within {wait_s:g} s",
                "wait longer, or look at the worker's log",
            )
        except (TaktlineError, Timeout) as error:
            missing = error if isinstance(error, TaktlineError) else unreachable(url, "did not answer in time")
            if missing.code not in _PASSES:
                raise
            if not told:
                _logger.warning("robot %s waits up to %g s for its gateway: %s", robot_id, wait_s, missing)
            told = True
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise missing
        await asyncio.sleep(min(ASK_AGAIN_S, left_s))
