"""What is queued with a candidate whose workers cannot run it: who has it then, before and after a promotion."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from taktline_gateway.canary import WATCH_S, Canary, CandidateTrack, candidate_route
from taktline_gateway.pending import ClientGone, Pending
from taktline_protocol.deployment import Candidate, Route, Target

TARGETS = (Target(address="127.0.0.1:1"),)


class Queue:
    """A lane with one worker that takes nothing: what is submitted stays until it is taken out."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.queued: list[Pending] = []
        self.submitted = 0
        self.worker = "busy"

    def levels(self) -> SimpleNamespace:
        return SimpleNamespace(states={("default", self.worker): 1})

    def submit(self, request_id, observation, deadline, principal) -> Pending:
        pending = Pending(robot="arm", seq=1, deadline=deadline, arrived_at=0.0, request_id=request_id)
        self.submitted += 1
        self.queued.append(pending)
        return pending

    def leave(self, pending: Pending) -> None:
        self.queued.remove(pending)
        pending.result.set_exception(ClientGone())


@pytest.fixture
async def trial():
    """A trial with an observation queued at the candidate; `stable` may be replaced."""
    route = Route(
        policy="p", targets=TARGETS, candidate=Candidate(id="c", step="s", revision="r2", targets=TARGETS, weight=100.0)
    )
    serving = Queue(msgspec.structs.replace(route, candidate=None))
    tried = Queue(candidate_route(route))
    made = SimpleNamespace(serving=serving, tried=tried, stable=serving)
    made.canary = Canary(route, tried, lambda: made.stable)
    await asyncio.sleep(0)  # the first look
    made.pending = CandidateTrack(made.canary).submit("r", None, 1e9)
    yield made
    await made.canary.close()


async def test_a_candidate_that_cannot_run_it_gives_it_to_the_serving_revision(trial):
    trial.tried.worker = "resting"
    await asyncio.sleep(3 * WATCH_S)
    assert (trial.tried.queued, len(trial.serving.queued)) == ([], 1)
    assert not trial.pending.result.done()


async def test_a_candidate_that_was_promoted_keeps_what_is_queued_with_it(trial):
    """Taken back into the same lane, it was taken back again at the next look, and its robot got no answer at all."""
    trial.stable, trial.tried.worker = trial.tried, "resting"
    await asyncio.sleep(4 * WATCH_S)
    assert (len(trial.tried.queued), trial.tried.submitted, trial.serving.submitted) == (1, 1, 0)
    assert not trial.pending.result.done()
