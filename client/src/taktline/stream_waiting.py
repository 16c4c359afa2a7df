"""An observation that waits for its answer on a stream."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from taktline_protocol.messages import ActionChunk, Observation

from taktline.encoding import NamedFrame
from taktline.stream_link import Link, Timeout


@dataclasses.dataclass(eq=False)
class Waiting:
    """An observation that has no answer yet.

    Attributes:
        stamped: as it was last sent, with what was left of its budget then.
        answer: the chunk, and the part of the round trip that was spent outside the gateway, in ms.
        link: the connection over which it was last sent, or over which its answer will come.
        sending: it is about to be sent; whoever finds one more reason to send it leaves it at that.
        pending_on: the connection whose welcome said that the gateway still has it.
    """

    observation: Observation
    stamped: Observation
    frames: Mapping[str, NamedFrame]
    answer: asyncio.Future[tuple[ActionChunk, float]]
    link: Link | None = None
    sends: int = 0
    sent_at: float = 0.0
    sending: bool = False
    pending_on: Link | None = None

    @property
    def seq(self) -> int:
        """Its number in the session."""
        return self.observation.seq

    @property
    def answered(self) -> bool:
        """Whether something came: an answer, or word that there is none."""
        answer = self.answer
        return answer.done() and not answer.cancelled() and not isinstance(answer.exception(), Timeout)

    def give_up(self) -> None:
        """No answer comes in time."""
        if not self.answer.done():
            self.answer.set_exception(Timeout())

    def fail(self, error: Exception) -> None:
        """Says why no answer comes, where none has come."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def done(self) -> None:
        """Nobody waits any more: what else was said of it need not be heard."""
        if self.answer.done() and not self.answer.cancelled():
            self.answer.exception()

    def left_s(self, now: float) -> float:
        """What is left of the budget, s."""
        asked = self.observation.sent_at
        return self.observation.budget_ms / 1e3 - (now - (now if asked is None else asked))
