"""Who is who: one live session per robot id, and the order of its observations."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from taktline_protocol import ErrorCode, TaktlineError

SESSION_LIVE_S = 5.0
"""A session that sent nothing for so long has ended; its robot id is free again."""


@dataclasses.dataclass(slots=True)
class _Session:
    session_id: str
    seq: int
    seen_at: float


class Robots:
    """The live sessions by robot id. Sessions without an id (empty) are not checked for conflicts."""

    def __init__(self, live_s: float = SESSION_LIVE_S) -> None:
        self._live_s = live_s
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def arrive(self, robot_id: str, session_id: str, seq: int, now: float) -> None:
        """Notes an observation of a robot.

        Raises:
            TaktlineError: `robot_conflict` where another session of this robot id is live; `superseded` where this
                session has already sent a newer observation.
        """
        self.forget(now)
        session = self._sessions.get(robot_id)
        if session is not None and session.session_id and session_id != session.session_id:
            free_in = self._live_s - (now - session.seen_at)
            raise TaktlineError(
                ErrorCode.ROBOT_CONFLICT,
                f"robot id {robot_id!r} is in use by another session",
                f"give each robot its own id; after a restart the id is free {self._live_s:g} s after the last request",
                retry_after_ms=1e3 * free_in,
            )
        if session is not None and session.session_id and seq < session.seq:
            raise TaktlineError(
                ErrorCode.SUPERSEDED,
                f"observation {seq} of robot {robot_id!r} came after its observation {session.seq}",
                "use the chunk of the newer observation; seq must grow within a session",
            )
        if session is None:
            self._sessions[robot_id] = _Session(session_id, seq, now)
        else:
            session.session_id, session.seq, session.seen_at = session_id, seq, now
            self._sessions.move_to_end(robot_id)

    def touch(self, robot_id: str, now: float) -> None:
        """Keeps a session live: its robot just got an answer."""
        session = self._sessions.get(robot_id)
        if session is not None:
            session.seen_at = now
            self._sessions.move_to_end(robot_id)

    def leave(self, robot_id: str, session_id: str) -> None:
        """Frees a robot id whose connection closed, so that its next connection need not wait."""
        session = self._sessions.get(robot_id)
        if session is not None and session.session_id == session_id:
            del self._sessions[robot_id]

    def forget(self, now: float) -> None:
        """Drops the sessions that have ended by `now`."""
        while self._sessions:
            robot_id, session = next(iter(self._sessions.items()))
            if now - session.seen_at < self._live_s:
                break
            del self._sessions[robot_id]
