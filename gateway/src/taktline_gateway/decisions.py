"""What a scheduler decides: which batches to send, whom to refuse and why, when to ask again."""

from __future__ import annotations

import dataclasses
from enum import Enum

from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.worker_state import Batch


class Refusal(Enum):
    """Why a ticket leaves without an answer from a worker."""

    UNREACHABLE = "unreachable"
    NO_WORKER = "no_worker"
    QUEUE_FULL = "queue_full"


@dataclasses.dataclass(slots=True)
class Refused:
    """A ticket that will not be served, with the prediction behind that decision.

    Attributes:
        completion: predicted instant at which a worker's answer would be there; None where no worker is known.
        retry_s: after how long a new observation has a chance.
    """

    ticket: Ticket
    reason: Refusal
    completion: float | None
    retry_s: float


@dataclasses.dataclass(slots=True)
class Plan:
    """What to do now, and when to ask again (None: at the next event).

    Attributes:
        silent: batches whose worker has just gone silent; offer their members to the others with `resubmit`.
        recalled: batches that waited behind those, and have left their worker; `requeue` their members.
        expired: tickets that wait on a worker behind a late batch, and whose deadlines have passed.
    """

    batches: tuple[Batch, ...]
    refused: tuple[Refused, ...]
    wake_at: float | None
    silent: tuple[Batch, ...] = ()
    recalled: tuple[Batch, ...] = ()
    expired: tuple[Refused, ...] = ()
