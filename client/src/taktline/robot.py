"""The robot's client for programs that wait: `Robot` blocks, over an `AsyncRobot` on a thread of its own."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType

from taktline_protocol.messages import Imagine, PolicyInfo, PolicyList, PriorityName, Rtc, Search

from taktline.access import Access
from taktline.async_robot import ANSWER_TIMEOUT_S, AsyncRobot, Transport
from taktline.chunk import Chunk
from taktline.clock import ClockEstimate
from taktline.loop_thread import LoopThread
from taktline.observing import Frame, State, as_state, copied
from taktline.robot_metrics import RobotMetrics

__all__ = ["ANSWER_TIMEOUT_S", "AsyncRobot", "Robot", "Transport", "list_policies"]


class Robot:
    """As `AsyncRobot`, blocking. The connection lives on a thread of its own, so that it is kept while the robot moves.

    `ask` starts an observation without waiting; several may be under way, and the newest wins. A robot that is dropped
    without `close` is closed when it is collected.
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
        """As of `AsyncRobot`."""
        self.policy = policy
        self.robot_id = robot_id
        self._loop = LoopThread.shared()
        self._robot = self._loop.call(
            lambda: AsyncRobot(
                url,
                policy,
                robot_id,
                session_id=session_id,
                answer_timeout_s=answer_timeout_s,
                api_key=api_key,
                access=access,
                transport=transport,
                jpeg_quality=jpeg_quality,
                fit_frames=fit_frames,
            )
        )
        _open.add(self)
        # The connection is kept by its own tasks; without a robot nobody is left to close it.
        self._dropped = weakref.finalize(self, self._loop.start_from_anywhere, self._robot.close)
        self._dropped.atexit = False

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
        rtc: Rtc | None = None,
        imagine: Imagine | None = None,
        priority: PriorityName = "production",
    ) -> Chunk:
        """Asks for the next action chunk and waits for it; arguments and errors as of `AsyncRobot.act`."""
        return self._loop.run(
            self._robot.act(
                images,
                state,
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
    ) -> Future[Chunk]:
        """As `act`, at once: the chunk comes as a future. Arrays are copied, so a camera's buffer may be used again.

        Raises:
            TaktlineError: `image_corrupt` or `state_invalid` where an array is no frame or the state no vector; all
                else comes by the future.
        """
        answer = self._loop.start(
            self._robot.act(
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
        answer.add_done_callback(self._answered)
        return answer

    def info(self, *, wait_s: float = 0.0) -> PolicyInfo:
        """What the policy reads and returns; as of `AsyncRobot.info`. Raises TaktlineError."""
        return self._loop.run(self._robot.info(wait_s=wait_s))

    def connect(self) -> None:
        """Opens the stream now, rather than with the first observation. Raises TaktlineError."""
        self._loop.run(self._robot.connect())

    @property
    def metrics(self) -> RobotMetrics:
        """What this client counted."""
        return self._robot.metrics

    @property
    def clock(self) -> ClockEstimate | None:
        """Gateway clock minus `time.monotonic()` here, and the bound of its error; None over HTTP, and at first."""
        return self._robot.clock

    def close(self) -> None:
        """Ends the session, as of `AsyncRobot.close`. In a forked child it does nothing: the session goes on."""
        _open.discard(self)
        self._dropped.detach()
        if not self._loop.forked:
            self._loop.run(self._robot.close())

    def _answered(self, answer: Future[Chunk]) -> None:
        """Known to each answer, so that the robot is kept, and its connection, while one is still to come."""

    def __enter__(self) -> Robot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_open: weakref.WeakSet[Robot] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Programs that end without closing their robots still say bye, so that the names are free for the next run."""
    for robot in list(_open):
        with contextlib.suppress(Exception):  # the process is ending; there is nobody left to tell
            robot._loop.start(robot._robot.close()).result(1.0)


def list_policies(url: str, access: Access | None = None) -> PolicyList:
    """The policies of a gateway that this caller may see. Raises TaktlineError."""
    from taktline.http_client import HttpClient

    async def listed() -> PolicyList:
        client = HttpClient(url, "", access or Access(), ANSWER_TIMEOUT_S, RobotMetrics())
        try:
            return await client.policies()
        finally:
            await client.close()

    return LoopThread.shared().run(listed())
