"""The robot's client: `Robot` blocks, `AsyncRobot` awaits; both keep one connection and speak msgpack."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
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
from taktline_protocol.messages import Observation, PolicyInfo, PolicyList, Search

from taktline.access import Access
from taktline.chunk import Chunk, complete
from taktline.observing import Frame, Sender, State

ANSWER_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
_HEADERS = {"content-type": MediaType.MSGPACK.value, "accept": MediaType.MSGPACK.value}


class Robot:
    """One robot's session with one policy. Not for use from several threads at once.

    Args:
        url: the gateway, e.g. "http://gateway:8080".
        policy: name of the PolicyDeployment.
        robot_id: name of this robot, unique in the fleet.
        session_id: names this process's session; drawn where None.
        answer_timeout_s: give up on an answer after so long; the connection is then dropped, so that a late answer
            can never be taken for the next one.
        api_key: API key or token, where the gateway asks for one; TAKTLINE_API_KEY where None.
        access: key and certificates together; the environment's where None, see `taktline.access`.
    """

    def __init__(
        self,
        url: str,
        policy: str,
        robot_id: str,
        *,
        session_id: str | None = None,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        api_key: str | None = None,
        access: Access | None = None,
    ) -> None:
        self.policy = policy
        self._sender = Sender(robot_id, session_id)
        self._path = f"/v1/policies/{quote(policy, safe='')}"
        found = Access.of(api_key, access)
        self._http = httpx.Client(
            base_url=url,
            timeout=_timeout(answer_timeout_s),
            headers=_HEADERS | found.headers(),
            verify=found.verify(url),
        )

    def act(
        self,
        images: Mapping[str, Frame],
        state: State,
        instruction: str,
        budget_ms: float,
        *,
        captured_at: float | None = None,
        actuate_ms: float = 0.0,
        seed: int | None = None,
        search: Search | None = None,
    ) -> Chunk:
        """Asks for the next action chunk.

        Args:
            images: camera name -> JPEG/PNG bytes or uint8 RGB array (H, W, 3).
            state: (D,) in robot units.
            instruction: the task in words.
            budget_ms: time left until the action buffer runs dry.
            captured_at: when the cameras were read, on `time.monotonic()`; now where None.
            actuate_ms: the robot's own L_actuate.
            seed: fixes the sampler's noise.
            search: of planners: what this request changes of the deployment's search.

        Raises:
            TaktlineError: every failure, with its code; `gateway_unreachable` where no gateway answered.
        """
        observation = self._sender.observe(
            images,
            state,
            instruction,
            budget_ms,
            captured_at=captured_at,
            actuate_ms=actuate_ms,
            seed=seed,
            search=search,
        )
        try:
            return self._send(observation)
        except TaktlineError as error:
            again = _again(observation, error)
            if again is None:
                raise
            return self._send(again)

    def info(self) -> PolicyInfo:
        """What the policy reads and returns. Raises TaktlineError."""
        return decode_policy(*_body(_request(self._http, "GET", self._path)))

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()

    def __enter__(self) -> Robot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, observation: Observation) -> Chunk:
        response = _request(self._http, "POST", f"{self._path}/act", content=encode(observation, MediaType.MSGPACK))
        return _chunk(response, observation, self._sender)


class AsyncRobot:
    """As `Robot`, for asyncio."""

    def __init__(
        self,
        url: str,
        policy: str,
        robot_id: str,
        *,
        session_id: str | None = None,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        api_key: str | None = None,
        access: Access | None = None,
    ) -> None:
        self.policy = policy
        self._sender = Sender(robot_id, session_id)
        self._path = f"/v1/policies/{quote(policy, safe='')}"
        found = Access.of(api_key, access)
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=_timeout(answer_timeout_s),
            headers=_HEADERS | found.headers(),
            verify=found.verify(url),
        )

    async def act(
        self,
        images: Mapping[str, Frame],
        state: State,
        instruction: str,
        budget_ms: float,
        *,
        captured_at: float | None = None,
        actuate_ms: float = 0.0,
        seed: int | None = None,
        search: Search | None = None,
    ) -> Chunk:
        """As `Robot.act`. Cancelling the task closes the connection, and a queued observation leaves the queue."""
        observation = self._sender.observe(
            images,
            state,
            instruction,
            budget_ms,
            captured_at=captured_at,
            actuate_ms=actuate_ms,
            seed=seed,
            search=search,
        )
        try:
            return await self._send(observation)
        except TaktlineError as error:
            again = _again(observation, error)
            if again is None:
                raise
            return await self._send(again)

    async def info(self) -> PolicyInfo:
        """What the policy reads and returns. Raises TaktlineError."""
        return decode_policy(*_body(await _request_async(self._http, "GET", self._path)))

    async def close(self) -> None:
        """Closes the connection."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncRobot:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, observation: Observation) -> Chunk:
        response = await _request_async(
            self._http, "POST", f"{self._path}/act", content=encode(observation, MediaType.MSGPACK)
        )
        return _chunk(response, observation, self._sender)


def list_policies(url: str, access: Access | None = None) -> PolicyList:
    """The policies of a gateway that this caller may see. Raises TaktlineError."""
    found = access or Access()
    headers = _HEADERS | found.headers()
    with httpx.Client(
        base_url=url, timeout=_timeout(ANSWER_TIMEOUT_S), headers=headers, verify=found.verify(url)
    ) as http:
        return decode_policies(*_body(_request(http, "GET", "/v1/policies")))


def _again(observation: Observation, error: TaktlineError) -> Observation | None:
    """The observation stamped anew for another gateway, where this one is going away and time is left."""
    if error.code is not ErrorCode.DRAINING or observation.sent_at is None:
        return None
    now = time.monotonic()
    left_ms = observation.budget_ms - 1e3 * (now - observation.sent_at)
    if left_ms <= observation.actuate_ms + observation.network_ms:
        return None
    again: Observation = msgspec.structs.replace(observation, sent_at=now, budget_ms=left_ms)
    return again


def _chunk(response: httpx.Response, observation: Observation, sender: Sender) -> Chunk:
    answer = decode_chunk(*_body(response))
    if answer.seq != observation.seq or answer.robot_id != observation.robot_id:
        raise TaktlineError(
            ErrorCode.INTERNAL,
            f"asked for observation {observation.seq}, got the answer to {answer.robot_id!r} {answer.seq}",
            "check what stands between robot and gateway: it mixes up answers",
        )
    sent_at = observation.captured_at if observation.sent_at is None else observation.sent_at
    chunk, unseen_ms = complete(answer, observation, 1e3 * (time.monotonic() - sent_at))
    sender.note_network(unseen_ms)
    return chunk


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


def _request(http: httpx.Client, method: str, path: str, **rest: Any) -> httpx.Response:
    try:
        return http.request(method, path, **rest)
    except httpx.RemoteProtocolError:
        # An idle connection that the gateway had just closed; nothing was read, so ask once more on a new one.
        return _retry(http, method, path, **rest)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreachable(http.base_url, error) from error


def _retry(http: httpx.Client, method: str, path: str, **rest: Any) -> httpx.Response:
    try:
        return http.request(method, path, **rest)
    except httpx.HTTPError as error:
        raise _unreachable(http.base_url, error) from error


async def _request_async(http: httpx.AsyncClient, method: str, path: str, **rest: Any) -> httpx.Response:
    try:
        return await http.request(method, path, **rest)
    except httpx.RemoteProtocolError:
        return await _retry_async(http, method, path, **rest)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreachable(http.base_url, error) from error


async def _retry_async(http: httpx.AsyncClient, method: str, path: str, **rest: Any) -> httpx.Response:
    try:
        return await http.request(method, path, **rest)
    except httpx.HTTPError as error:
        raise _unreachable(http.base_url, error) from error


def _unreachable(url: httpx.URL, error: Exception) -> TaktlineError:
    if isinstance(error, (httpx.ReadTimeout, httpx.WriteTimeout)):
        what = "did not answer in time"
    elif isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        what = "cannot be reached"
    else:
        what = f"broke the connection ({type(error).__name__})"
    return TaktlineError(
        ErrorCode.GATEWAY_UNREACHABLE,
        f"the gateway at {url} {what}",
        "check the URL and that the gateway runs: GET /healthz",
    )


def _timeout(answer_s: float) -> httpx.Timeout:
    return httpx.Timeout(answer_s, connect=CONNECT_TIMEOUT_S)
