"""The real-time loop of one robot before a scripted client: overlap, dry buffers, refusals."""

import time
from collections import deque

import numpy as np
import pytest
from taktline import Chunk
from taktline_demo.environment import ReachEnvironment
from taktline_demo.expert import expert_chunk
from taktline_demo.fleet.control_loop import ASK_AFTER_ROWS, STANDING_BUDGET_MS, ControlLoop
from taktline_demo.fleet.records import RobotReport
from taktline_demo.task import CONTROL_PERIOD_S, HORIZON
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.messages import Timings


class ExpertClient:
    """Answers as the expert would, after `delay_s`; `refusals` are raised first, one a request.

    With an `aim`, m, the arm is led there instead of to the block.
    """

    def __init__(self, environment, delay_s=0.0, refusals=(), aim=None):
        self.environment, self.delay_s, self.refusals, self.aim = environment, delay_s, deque(refusals), aim
        self.budgets = []

    def act(self, images, state, instruction, budget_ms, *, captured_at=None, seed=None):
        self.budgets.append(budget_ms)
        target = self.environment.target(self.environment.goal) if self.aim is None else self.aim
        if self.refusals:
            raise self.refusals.popleft()
        time.sleep(self.delay_s)
        return Chunk(
            actions=expert_chunk(state, target),
            dt_s=CONTROL_PERIOD_S,
            captured_at=captured_at,
            valid_until=captured_at + HORIZON * CONTROL_PERIOD_S,
            timings=Timings(
                observe_ms=1.0, transfer_ms=2.0, queue_ms=3.0, inference_ms=1000 * self.delay_s, actuate_ms=0.0
            ),
            margin_ms=budget_ms - 1000 * self.delay_s,
            seq=len(self.budgets),
            policy="scripted",
            revision="1",
            worker="",
            batch_size=1,
            request_id="r",
        )


@pytest.fixture
def workcell():
    environment = ReachEnvironment()
    environment.reset(0)
    environment.frames()  # opening the cameras takes longer than a control period
    yield environment
    environment.close()


def run(environment, client, seed=0):
    """One episode; before a client that takes no time on a simulated clock, which waits for what is asked."""
    report, now = RobotReport("arm-1"), [100.0]

    def sleep(seconds):
        loop._requester.submit(int).result()
        now[0] += seconds

    timed = {} if client.delay_s else {"clock": lambda: now[0], "sleep": sleep}
    loop = ControlLoop(environment, client, report, **timed)
    try:
        episode = loop.run_episode(seed)
    finally:
        loop.close()
    return report, episode


def refusal(code, retry_after_ms=None):
    return TaktlineError(code, "scripted", "none", retry_after_ms=retry_after_ms)


def test_it_asks_ahead_and_reaches_the_block(workcell):
    client = ExpertClient(workcell)
    report, episode = run(workcell, client)
    assert episode.success
    assert report.misses == 0
    assert report.requests == len(client.budgets) >= 2
    assert 0 < client.budgets[0] <= STANDING_BUDGET_MS
    # A moving robot's budget is what is left in its buffer.
    left_ms = 1000 * CONTROL_PERIOD_S * (HORIZON - ASK_AFTER_ROWS)
    assert all(0 < budget <= left_ms for budget in client.budgets[1:])
    assert [cycle.serial for cycle in report.cycles] == [True] + [False] * (len(report.cycles) - 1)
    assert all(cycle.rows >= ASK_AFTER_ROWS for cycle in report.cycles)
    assert all(cycle.env_ms == pytest.approx(1000 * CONTROL_PERIOD_S * cycle.rows) for cycle in report.cycles)


def test_a_slow_answer_runs_the_buffer_dry_and_is_counted(workcell):
    # More than the thirteen rows left when it asks; and no block is up there, so the episode lasts.
    client = ExpertClient(workcell, delay_s=1.6, aim=np.array([0.25, 0.0, 0.25]))
    report, episode = run(workcell, client)
    assert not episode.success
    assert report.misses >= 1
    # The chunk asked for while moving came when none of its rows was meant for now; the next one, asked for while
    # standing, took over from its first row.
    assert report.chunks[1].margin_ms < 0
    assert len(report.chunks) >= 3
    assert report.cycles[0].rows == HORIZON
    assert report.cycles[0].control_ms > report.cycles[0].env_ms + 1600


def test_a_refusal_is_counted_and_asked_again(workcell):
    refusals = [refusal(ErrorCode.DEADLINE_UNREACHABLE, 10.0), refusal(ErrorCode.OVERLOADED)]
    report, episode = run(workcell, ExpertClient(workcell, refusals=refusals))
    assert episode.success
    assert report.errors == {"deadline_unreachable": 1, "overloaded": 1}


def test_a_hopeless_refusal_ends_the_run(workcell):
    with pytest.raises(TaktlineError) as caught:
        run(workcell, ExpertClient(workcell, refusals=[refusal(ErrorCode.UNKNOWN_POLICY)]))
    assert caught.value.code is ErrorCode.UNKNOWN_POLICY


def test_first_cycle_includes_the_wait(workcell):
    report, _ = run(workcell, ExpertClient(workcell, delay_s=0.3))
    first = report.cycles[0]
    assert first.serial
    assert first.control_ms >= first.env_ms + 300
    assert first.efficiency < 1
