"""Observations as stateless HTTP requests: for gateways and networks without WebSockets, and for single questions."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import quote

import httpx
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.codecs import (
    MediaType,
    decode_chunk,
    decode_error,
    decode_policies,
    decode_policy,
    encode,
    error_from_body,
    media_type,
)
from taktline_protocol.limits import DEFAULT_LIMITS, MIB
from taktline_protocol.messages import ActionChunk, Observation, PolicyInfo, PolicyList

from taktline.access import Access
from taktline.address import gateway_url, unreachable
from taktline.observing import LATE_S, TOO_LARGE_STEP, restamped
from taktline.robot_metrics import RobotMetrics
from taktline.stream_link import Timeout

ANSWER_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
_HEADERS = {"content-type": MediaType.MSGPACK.value, "accept": MediaType.MSGPACK.value}


class HttpClient:
    """One robot's HTTP connection to one policy. Runs on one event loop."""

    def __init__(self, url: str, policy: str, access: Access, timeout_s: float, metrics: RobotMetrics) -> None:
        self._path = f"/v1/policies/{quote(policy, safe='')}"
        self._metrics = metrics
        self._access = access
        self._shown = access.headers()
        self._timeout_s = timeout_s
        address = gateway_url(url)
        try:
            self._http = httpx.AsyncClient(
                base_url=address,
                timeout=_timeout(timeout_s),
                headers=_HEADERS | self._shown,
                verify=access.verify(address),
            )
        except (ImportError, ValueError) as error:  # it reads the environment's proxies, and may not know their kind
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"the proxy that the environment names cannot be used: {error}",
                "correct ALL_PROXY, HTTP_PROXY or HTTPS_PROXY, or name the gateway's host in NO_PROXY",
            ) from error

    async def ask(self, observation: Observation) -> tuple[ActionChunk, Observation, float]:
        """The chunk for one observation, the observation as it was last sent, and the round trip in ms.

        Sent again, with the time that is left, where that may help. Raises TaktlineError; `gateway_unreachable` where
        nothing answers within the client's timeout, or until LATE_S after the budget.
        """
        met: set[ErrorCode] = set()
        while True:
            try:
                return await self._ask(observation)
            except TaktlineError as error:
                observation = restamped(observation)
                reserved_ms = observation.actuate_ms + observation.network_ms
                if not self._may_pass(error, met) or observation.budget_ms <= reserved_ms:
                    raise
                self._metrics.resent += 1

    async def _ask(self, observation: Observation) -> tuple[ActionChunk, Observation, float]:
        body = encode(observation, MediaType.MSGPACK)
        self._metrics.bytes_sent += len(body)
        self._metrics.keyframes += 1
        self._metrics.cameras_whole += len(observation.images)
        began = time.monotonic()
        try:
            response = await asyncio.wait_for(
                _request(self._http, "POST", f"{self._path}/act", content=body),
                min(self._timeout_s, observation.budget_ms / 1e3 + LATE_S),
            )
        except Timeout as error:
            raise unreachable(_address(self._http.base_url), "did not answer in time") from error
        except TaktlineError as error:
            raise _perhaps_too_large(len(body), error) from error.__cause__
        self._metrics.bytes_received += len(response.content)
        answer = _checked(decode_chunk(*_body(response)), observation)
        sent_at = began if observation.sent_at is None else observation.sent_at
        return answer, observation, 1e3 * (time.monotonic() - sent_at)

    async def info(self) -> PolicyInfo:
        """What the policy reads and returns. Raises TaktlineError."""
        return decode_policy(*await self._get(self._path))

    async def policies(self) -> PolicyList:
        """All policies of the gateway that this caller may see. Raises TaktlineError."""
        return decode_policies(*await self._get("/v1/policies"))

    async def close(self) -> None:
        """Closes the connection."""
        await self._http.aclose()

    async def _get(self, path: str) -> tuple[bytes, MediaType]:
        met: set[ErrorCode] = set()
        while True:
            try:
                return _body(await _request(self._http, "GET", path))
            except TaktlineError as error:
                if not self._may_pass(error, met):
                    raise

    def _may_pass(self, error: TaktlineError, met: set[ErrorCode]) -> bool:
        """Whether asking again may help; once for each reason, those `met` before.

        That is where the gateway is shutting down and another one answers next, where it closed an idle connection, or
        where it does not know the key and there is a new one, which is shown from then on.
        """
        if error.code in met:
            return False
        met.add(error.code)
        if error.code is ErrorCode.UNAUTHENTICATED and self._access.renewed(self._shown):
            self._shown = self._access.headers()
            self._http.headers.update(self._shown)
            return True
        return error.code is ErrorCode.DRAINING or isinstance(error.__cause__, httpx.RemoteProtocolError)


def _perhaps_too_large(body_bytes: int, error: TaktlineError) -> TaktlineError:
    """The error, with the size where a gateway hung up on a body over its usual limit: most of such it does not read.

    It may as well have gone away, so that the code says no more than that.
    """
    hung_up = isinstance(error.__cause__, (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError))
    if not hung_up or body_bytes <= DEFAULT_LIMITS.body_bytes:
        return error
    return TaktlineError(
        error.code,
        f"{error.message}; the observation has {body_bytes / MIB:.1f} MiB, and unless told otherwise a gateway takes"
        f" {DEFAULT_LIMITS.body_bytes / MIB:g}",
        f"{error.next_step}; where it does, {TOO_LARGE_STEP}",
    )


def _checked(answer: ActionChunk, observation: Observation) -> ActionChunk:
    if answer.seq != observation.seq or answer.robot_id != observation.robot_id:
        raise TaktlineError(
            ErrorCode.INTERNAL,
            f"asked for observation {observation.seq}, got the answer to {answer.robot_id!r} {answer.seq}",
            "check what stands between robot and gateway: it mixes up answers",
        )
    return answer


def _body(response: httpx.Response) -> tuple[bytes, MediaType]:
    """Body and encoding of a good answer. Raises the TaktlineError that a bad one carries."""
    try:
        media = media_type(response.headers.get("content-type", ""))
        if response.is_success:
            return response.content, media
        body = decode_error(response.content, media)
    except TaktlineError as error:
        raise TaktlineError(
            ErrorCode.GATEWAY_UNREACHABLE,
            f"{response.url} answered {response.status_code} with something that is not Taktline's",
            "check that the URL is a Taktline gateway and no proxy answers in its place",
        ) from error
    raise error_from_body(body)


async def _request(http: httpx.AsyncClient, method: str, path: str, **rest: Any) -> httpx.Response:
    try:
        return await http.request(method, path, **rest)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreachable(http.base_url, error) from error


def _unreachable(url: httpx.URL, error: Exception) -> TaktlineError:
    address = _address(url)
    if isinstance(error, (httpx.ReadTimeout, httpx.WriteTimeout)):
        return unreachable(address, "did not answer in time")
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return unreachable(address, "cannot be reached", error)
    return unreachable(address, "broke the connection", error)


def _address(url: httpx.URL) -> str:
    return str(url).rstrip("/")


def _timeout(answer_s: float) -> httpx.Timeout:
    return httpx.Timeout(answer_s, connect=CONNECT_TIMEOUT_S)
