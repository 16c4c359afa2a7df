"""A batch on its way to a worker, and what its response is to its members."""

from __future__ import annotations

import dataclasses

from taktline_protocol import worker_pb2
from taktline_protocol.messages import Array, CheaperLevel, ImaginedVideo, PlanReport, RtcReport

from taktline_gateway.degrade import degraded
from taktline_gateway.pending import Pending, Served
from taktline_gateway.tracing.requests import BatchTrace
from taktline_gateway.worker_link import WorkerLink
from taktline_gateway.worker_state import Batch


@dataclasses.dataclass(slots=True, eq=False)
class SentBatch:
    """One batch; `seconds` from sending to its answers, once they are given out."""

    link: WorkerLink
    batch: Batch
    members: list[Pending]
    sent_at: float
    level: CheaperLevel | None
    trace: BatchTrace
    seconds: float | None = None

    def revision(self, response: worker_pb2.InferResponse) -> str:
        """The model revision that made it."""
        return response.revision or self.link.revision

    def served(
        self,
        made: tuple[Array, PlanReport | None, RtcReport | None, ImaginedVideo | None],
        response: worker_pb2.InferResponse,
        returned_at: float,
        next_at: float | None,
        instead: str,
    ) -> Served:
        """What one member gets of it.

        Args:
            made: as `read_result` gives it.
            next_at: when its robot's next observation should arrive.
            instead: the policy that took it over from the one that was asked; empty where that is the same.
        """
        actions, plan, rtc, imagined = made
        return Served(
            actions=actions,
            revision=self.revision(response),
            worker=self.link.name,
            pool=self.link.target.pool,
            batch_size=len(self.members),
            sent_at=self.sent_at,
            returned_at=returned_at,
            inference_s=(response.total_ms - response.waited_ms) / 1e3,
            waited_s=response.waited_ms / 1e3,
            phases_ms=(response.preprocess_ms, response.engine_ms, response.postprocess_ms),
            plan=plan,
            rtc=rtc,
            imagined=imagined,
            next_at=next_at,
            degraded=degraded(self.level, instead),
        )


def rows_of(response: worker_pb2.InferResponse) -> int:
    """How many of its results are actions."""
    return sum(result.WhichOneof("outcome") == "actions" for result in response.results)
