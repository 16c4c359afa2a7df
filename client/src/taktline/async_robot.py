"""The robot's client for asyncio: asks over the timed stream, or over HTTP where it must be."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, get_args

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.image_fit import pillow
from taktline_protocol.messages import ImageFit, Imagine, Observation, PolicyInfo, PriorityName, Rtc, Search

from taktline.access import Access
from taktline.address import gateway_url, unreachable
from taktline.chunk import Chunk, complete
from taktline.clock import ClockEstimate
from taktline.dropped import Connection, let_go
from taktline.encoding import FrameEncoder, NamedFrame
from taktline.observing import (
    LATE_S,
    Frame,
    Sender,
    State,
    as_state,
    check_asked,
    check_names,
    check_number,
    copied,
    restamped,
)
from taktline.ready import until_ready
from taktline.robot_metrics import RobotMetrics
from taktline.stream_client import StreamClient
from taktline.stream_errors import closed, closed_meanwhile, say_what_is_safe
from taktline.stream_link import NoStream, Timeout

if TYPE_CHECKING:
    from taktline.http_client import HttpClient

Transport = Literal["auto", "stream", "http"]
ANSWER_TIMEOUT_S = 30.0
RELEARN_S = 10.0
"""Between questions how frames are fitted for a revision that the gateway tells nothing of, such as a candidate."""
_logger = logging.getLogger("taktline")


class AsyncRobot:
    """One robot's session with one policy, for asyncio. Several `act` may run at once; the newest observation wins.

    One that is dropped without `close` (or `async with`) gives a ResourceWarning, and its connection ends all the same.

    Args:
        url: the gateway, e.g. "http://gateway:8080".
        policy: name of the PolicyDeployment.
        robot_id: name of this robot, unique in the fleet.
        session_id: names this process's session; drawn where None.
        answer_timeout_s: give up on an answer after so long; at the latest 5 s after its budget is spent.
        api_key: API key or token, where the gateway asks for one; TAKTLINE_API_KEY where None.
        access: key and certificates together; the environment's where None, see `taktline.access`.
        transport: `stream`; `http` for stateless requests; `auto` takes the stream, and HTTP where there is none at
            `url`, which is logged and shown in `metrics.fallback`.
        jpeg_quality: uint8 arrays are sent as JPEG of this quality (needs the extra `jpeg`); as raw pixels where None.
        fit_frames: uint8 arrays are brought to the policy's image size here, exactly as its worker would do it (needs
            the extra `fit`). With `jpeg_quality`, what is fitted is then compressed: near to what the worker makes of
            the JPEG of a whole frame, but not equal to the bit. Refused, before the first chunk, of policies that state
            no `image_fit`; where a later revision states none, or none is known of it, frames are sent whole.
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
        transport: Transport = "auto",
        jpeg_quality: int | None = None,
        fit_frames: bool = False,
    ) -> None:
        self.policy = policy
        self.robot_id = robot_id
        self.metrics = RobotMetrics(transport="http" if transport == "http" else "stream")
        # What cannot work is said here and not at the first observation.
        self._url = gateway_url(url)
        check_names(policy, robot_id, session_id)
        check_number("answer_timeout_s", answer_timeout_s, 1e-3)
        if transport not in get_args(Transport):
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID, f"the transport is {transport!r}", "use 'auto', 'stream' or 'http'"
            )
        self._access = Access.of(api_key, access)
        self._access.headers()
        self._timeout_s = answer_timeout_s
        self._wanted = transport
        self._sender = Sender(robot_id, session_id)
        self._encoder = FrameEncoder(jpeg_quality)
        if fit_frames:
            pillow()
        self._fits = fit_frames
        self._fit_of: dict[str, ImageFit | None] = {}
        """Revision -> how frames are fitted for it, as far as the gateway has told."""
        self._answering: str | None = None
        """The revision that answered last."""
        self._learning: asyncio.Task[None] | None = None
        self._learn_at = -math.inf
        self._sent_whole: set[str] = set()
        """Revisions of which it was said that their frames are."""
        self._stream: StreamClient | None = None
        self._http: HttpClient | None = None
        self._turn = asyncio.Lock()
        self._closed = False
        self._open: list[Connection] = []
        weakref.finalize(self, let_go, robot_id, self._open).atexit = False

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
        rtc: Rtc | None = None,
        imagine: Imagine | None = None,
        priority: PriorityName = "production",
    ) -> Chunk:
        """Asks for the next action chunk. Cancelling the task takes a queued observation out of the queue.

        Args:
            images: camera name -> JPEG/PNG bytes or uint8 RGB array (H, W, 3).
            state: (D,) in robot units.
            instruction: the task in words.
            budget_ms: time left until the action buffer runs dry, at the moment of this call.
            captured_at: when the cameras were read, on `time.monotonic()`; now where None.
            actuate_ms: the robot's own L_actuate.
            seed: fixes the sampler's noise.
            search: of planners: what this request changes of the deployment's search.
            rtc: for policies with real-time chunking: the unexecuted rest of the last chunk.
            imagine: for world-action models: the imagined video is wanted with the actions (`Chunk.imagined`).
            priority: class of traffic.

        Raises:
            TaktlineError: every failure, with its code; `gateway_unreachable` where no gateway answered.
        """
        asked_at = time.monotonic()
        self._check_usable()
        self.metrics.observations += 1
        try:
            async with self._turn:  # numbered in the order of asking, however long each one's frames take
                if self._fits and not self._fit_of and self._answering is None:
                    check_asked(instruction, budget_ms, priority)
                    await self._learn_first_fit(asked_at + budget_ms / 1e3 + LATE_S)
                frames = await self._encoder.encode_async(images)
                observation = self._sender.observe(
                    {camera: frame.image for camera, frame in frames.items()},
                    state,
                    instruction,
                    budget_ms,
                    spent_s=time.monotonic() - asked_at,
                    captured_at=asked_at if captured_at is None else captured_at,
                    actuate_ms=actuate_ms,
                    seed=seed,
                    search=search,
                    rtc=rtc,
                    imagine=imagine,
                    priority=priority,
                )
            chunk = await self._ask(observation, frames)
        except TaktlineError as error:
            if self._closed and error.code is ErrorCode.GATEWAY_UNREACHABLE:
                error = closed_meanwhile()
            say_what_is_safe(error, budget_ms, asked_at, self._timeout_s)
            self.metrics.errors[error.code.value] += 1
            raise error from error.__cause__
        if self._fits:
            self._follow(chunk)
        self.metrics.chunks += 1
        self.metrics.late += chunk.margin_ms < 0
        self.metrics.margins_ms.append(chunk.margin_ms)
        return chunk

    def ask(
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
        rtc: Rtc | None = None,
        imagine: Imagine | None = None,
        priority: PriorityName = "production",
    ) -> asyncio.Task[Chunk]:
        """As `act`, as a task. Arrays are copied, so a camera's buffer may be used again."""
        return asyncio.get_running_loop().create_task(
            self.act(
                copied(images),
                as_state(state),
                instruction,
                budget_ms,
                captured_at=time.monotonic() if captured_at is None else captured_at,
                actuate_ms=actuate_ms,
                seed=seed,
                search=search,
                rtc=rtc,
                imagine=imagine,
                priority=priority,
            )
        )

    async def info(self, *, wait_s: float = 0.0) -> PolicyInfo:
        """What the policy reads and returns.

        Until its first worker is ready a policy has no sizes to tell: they are 0 or empty.

        Args:
            wait_s: waits so long for a worker to be ready, and for the gateway itself where it cannot be reached yet,
                which is logged; without, the answer is what is known at once.

        Raises:
            TaktlineError: `worker_unavailable` where none was ready within `wait_s`, `gateway_unreachable` where none
                answered.
        """

        async def ask() -> PolicyInfo:
            self._check_usable()
            return await self._over_http().info()

        return await (until_ready(ask, self._url, self.policy, self.robot_id, wait_s) if wait_s else ask())

    async def connect(self) -> None:
        """Opens the stream now, rather than with the first observation. Raises TaktlineError."""
        self._check_usable()
        stream = self._over_stream()
        if stream is not None:
            try:
                await stream.connect(self._timeout_s)
            except NoStream as error:
                self._fall_back(error)

    @property
    def clock(self) -> ClockEstimate | None:
        """Gateway clock minus `time.monotonic()` here, and the bound of its error; None over HTTP, and at first."""
        return None if self._stream is None else self._stream.clock.estimate(time.monotonic())

    async def close(self) -> None:
        """Ends the session; the robot id is free at once, over HTTP after 5 s."""
        self._closed = True
        if self._learning is not None:
            self._learning.cancel()
        if self._stream is not None:
            await self._stream.close()
        if self._http is not None:
            await self._http.close()
        self._open.clear()

    async def __aenter__(self) -> AsyncRobot:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_usable(self) -> None:
        """Raises TaktlineError `cancelled` after `close`, `config_invalid` on another event loop than before."""
        if self._closed:
            raise closed()
        if any(loop is not asyncio.get_running_loop() for loop, _ in self._open):
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                "this robot's connection belongs to another event loop, such as that of an earlier asyncio.run",
                "make an AsyncRobot on each event loop, or one taktline.Robot, which has a loop of its own",
            )

    async def _ask(self, observation: Observation, frames: Mapping[str, NamedFrame]) -> Chunk:
        stream = self._over_stream()
        if stream is not None:
            try:
                answer, sent, round_trip_ms, outside_ms = await stream.ask(observation, frames, self._timeout_s)
            except NoStream as error:
                self._fall_back(error)
                observation = restamped(observation)
            else:
                chunk, _ = complete(answer, sent, round_trip_ms)
                self._note(round_trip_ms, outside_ms)
                return chunk
        answer, sent, round_trip_ms = await self._over_http().ask(observation)
        chunk, unseen_ms = complete(answer, sent, round_trip_ms)
        self._note(round_trip_ms, unseen_ms)
        return chunk

    async def _learn_first_fit(self, until: float) -> None:
        """How the policy fits frames. Raises TaktlineError where it says no rule, or nothing answers until then."""
        try:
            info = await asyncio.wait_for(self._learn_fit(), until - time.monotonic())
        except Timeout as error:
            raise unreachable(self._url, "did not answer in time") from error
        if info is not None and info.image_fit is None:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"frames for {self.policy!r} cannot be fitted on the robot: this {info.family} resizes them otherwise"
                " than in whole 8-bit pixels",
                "leave fit_frames out: the worker fits them",
            )
        self._encoder.fit = None if info is None else info.image_fit

    async def _learn_fit(self) -> PolicyInfo | None:
        """Enters how the policy of now fits frames; None where no worker has told yet: none looks at a frame either."""
        info = await self.info()
        if not info.cameras and not info.optional_cameras:
            return None
        self._fit_of[info.revision] = info.image_fit
        return info

    def _follow(self, chunk: Chunk) -> None:
        """Fits the next frames for the revision that answers; they are sent whole until its rule is known."""
        if chunk.degraded is not None and chunk.degraded.policy:
            return  # only what fits frames alike stands in for the policy
        self._answering = chunk.revision
        self._encoder.fit = self._fit_of.get(chunk.revision)
        if chunk.revision in self._fit_of or time.monotonic() < self._learn_at:
            return
        if self._learning is None or self._learning.done():
            self._learning = asyncio.get_running_loop().create_task(self._learn_later())

    async def _learn_later(self) -> None:
        """After a rollout or for a candidate, beside the observations: those wait for nothing."""
        try:
            await self._learn_fit()
        except TaktlineError as error:
            _logger.debug("how frames are fitted was not told: %s", error)
        self._learn_at = time.monotonic() + RELEARN_S
        revision = self._answering
        if revision is None:
            return
        self._encoder.fit = self._fit_of.get(revision)
        if self._encoder.fit is None and revision not in self._sent_whole:
            self._sent_whole.add(revision)
            why = (
                "resizes them otherwise than in whole 8-bit pixels" if revision in self._fit_of else "tells no rule yet"
            )
            _logger.warning("robot %s sends whole frames: revision %r %s", self.robot_id, revision, why)

    def _note(self, round_trip_ms: float, outside_ms: float) -> None:
        self.metrics.round_trips_ms.append(round_trip_ms)
        self._sender.note_network(outside_ms)

    def _over_stream(self) -> StreamClient | None:
        if self._wanted == "http" or self.metrics.fallback:
            return None
        if self._stream is None:
            self._stream = StreamClient(
                self._url, self.policy, self.robot_id, self._sender.session_id, self._access, self.metrics
            )
            self._open.append((asyncio.get_running_loop(), self._stream.close))
        return self._stream

    def _over_http(self) -> HttpClient:
        if self._http is None:
            from taktline.http_client import HttpClient

            self._http = HttpClient(self._url, self.policy, self._access, self._timeout_s, self.metrics)
            self._open.append((asyncio.get_running_loop(), self._http.close))
        return self._http

    def _fall_back(self, error: NoStream) -> None:
        if self.metrics.connects:  # the gateway speaks streams: what answers for it now, a proxy it may be, will pass
            raise unreachable(self._url, "cannot be reached", error) from error
        if self._wanted == "stream":
            raise TaktlineError(
                ErrorCode.GATEWAY_UNREACHABLE,
                f"there is no stream: {error}",
                "check that the URL is a Taktline gateway and that proxies let WebSockets through,"
                " or use transport='auto' or 'http'",
            ) from error
        if not self.metrics.fallback:
            self.metrics.fallback = str(error)
            self.metrics.transport = "http"
            _logger.warning("robot %s speaks HTTP: there is no stream: %s", self.robot_id, error)
