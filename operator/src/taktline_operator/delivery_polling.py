"""Asks pods that fetch a checkpoint how far they are; asks nobody where nothing is fetched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from taktline_protocol.delivery import DeliveryProgress

from taktline_operator import delivery_status

logger = logging.getLogger(__name__)

Json = dict[str, Any]
TIMEOUT_S = 1.0
MOST_PODS = 32  # asked at a time of one policy
MOST_BYTES = 64 << 10  # of an answer; who can make pods in the namespace can answer anything


class DeliveryPoller:
    """Must be used inside a running event loop; close it after use."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._session: aiohttp.ClientSession | None = None
        self._answers: dict[tuple[str, ...], tuple[float, DeliveryProgress | None]] = {}

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def of(self, pods: Sequence[Json]) -> dict[str, DeliveryProgress]:
        """What the pods that fetch now tell, by pod name; those that do not answer are left out.

        An answer holds until it is time to look again: it becomes a status, whose event has the policy looked at at
        once, and a newer answer then would be the next status, without end.
        """
        fetching = [(pod, address) for pod in pods if (address := delivery_status.progress_address(pod))][:MOST_PODS]
        if not fetching:
            return {}
        now = self._monotonic()
        self._answers = {key: found for key, found in self._answers.items() if now - found[0] < delivery_status.LOOK_S}
        asked = {key: address for pod, address in fetching if (key := _key(pod)) not in self._answers}
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        answers = await asyncio.gather(*(self._ask(self._session, address) for address in asked.values()))
        self._answers |= {key: (now, answer) for key, answer in zip(asked, answers, strict=True)}
        told = {str(pod["metadata"]["name"]): self._answers.get(_key(pod), (now, None))[1] for pod, _ in fetching}
        return {name: answer for name, answer in told.items() if answer is not None}

    async def _ask(self, session: aiohttp.ClientSession, address: str) -> DeliveryProgress | None:
        try:
            async with session.get(f"http://{address}/progress", allow_redirects=False) as reply:
                if reply.status != 200:
                    return None
                content = bytearray()
                async for block in reply.content.iter_any():
                    content += block
                    if len(content) > MOST_BYTES:
                        return None
                return msgspec.json.decode(content, type=DeliveryProgress)
        except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
            # A network policy may keep us out; the delivery itself does not depend on it.
            logger.debug("no word of a delivery", extra={"address": address, "cause": str(error) or repr(error)})
            return None


def _key(pod: Json) -> tuple[str, ...]:
    return tuple(str(pod["metadata"].get(name, "")) for name in ("namespace", "name", "uid"))
