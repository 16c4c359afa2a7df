"""Deadlines inferred from a client's rhythm: the cases that decide, and properties."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from taktline_gateway.compat.deadlines import (
    UNKNOWN_CHUNK_MS,
    chunk_duration_ms,
    inferred_budget_ms,
    request_period_ms,
)
from taktline_gateway.compat.observations import ClientInput
from taktline_gateway.compat.service import Conversation
from taktline_protocol.deployment import ClientMapping
from taktline_protocol.messages import PolicyInfo

LIMIT_MS = 600_000.0


def every(period_s, count, start=100.0):
    return [start + period_s * i for i in range(count)]


def test_period_is_the_median_interval():
    assert request_period_ms(every(0.2, 5), 1000.0) == pytest.approx(200.0)
    jittery = [0.0, 0.2, 0.4, 0.9, 1.1, 1.3]
    assert request_period_ms(jittery, 1000.0) == pytest.approx(200.0)


@pytest.mark.parametrize("arrivals", [[], [5.0], [*every(0.2, 5), 130.0]])
def test_first_request_and_first_after_a_pause_have_no_period(arrivals):
    assert request_period_ms(arrivals, 1000.0) is None


def test_rhythm_from_before_a_pause_is_forgotten():
    assert request_period_ms([*every(0.2, 5), *every(0.5, 3, start=200.0)], 1000.0) == pytest.approx(500.0)


def test_chunk_lasts_at_the_configured_rate_else_at_the_checkpoints():
    assert chunk_duration_ms(50, 0.02, 0.0) == pytest.approx(1000.0)
    assert chunk_duration_ms(50, 0.02, 10.0) == pytest.approx(5000.0)
    assert chunk_duration_ms(0, 0.0, 0.0) == UNKNOWN_CHUNK_MS


def test_robot_that_replans_early_has_the_rest_of_its_chunk():
    # 50 actions at 50 Hz last 1 s; asking every 200 ms leaves 40 of them.
    assert inferred_budget_ms(200.0, 1000.0, 100.0, 20.0, LIMIT_MS) == 800.0


def test_robot_that_runs_its_chunk_to_the_end_gets_the_control_budget():
    assert inferred_budget_ms(1050.0, 1000.0, 100.0, 20.0, LIMIT_MS) == 100.0
    assert inferred_budget_ms(1050.0, 1000.0, 0.0, 20.0, LIMIT_MS) == 1000.0


def test_robot_without_a_rhythm_gets_a_chunk():
    assert inferred_budget_ms(None, 1000.0, 100.0, 20.0, LIMIT_MS) == 1000.0


def test_a_guess_never_makes_a_slow_policy_unusable():
    assert inferred_budget_ms(1050.0, 1000.0, 100.0, 4000.0, LIMIT_MS) == 8000.0


times = st.floats(0, 1e6)


@given(st.none() | times, st.floats(1, 1e6), times, times)
def test_bounds(period_ms, chunk_ms, control_ms, alone_ms):
    budget = inferred_budget_ms(period_ms, chunk_ms, control_ms, alone_ms, LIMIT_MS)
    assert 0 < budget <= LIMIT_MS
    assert budget >= min(LIMIT_MS, control_ms, chunk_ms) or control_ms == 0


@given(times, times, st.floats(1, 1e6), times, times)
def test_asking_more_often_never_shortens_the_budget(period, other, chunk_ms, control_ms, alone_ms):
    fast, slow = sorted((period, other))
    budgets = [inferred_budget_ms(p, chunk_ms, control_ms, alone_ms, LIMIT_MS) for p in (fast, slow)]
    assert budgets[0] >= budgets[1]


@given(st.lists(st.floats(0, 1e5), max_size=12), st.floats(1, 1e6))
def test_period_of_any_arrivals_is_one_of_their_spans(arrivals, chunk_ms):
    arrivals.sort()
    period = request_period_ms(arrivals, chunk_ms)
    assert period is None or 0 <= period <= 1e3 * (arrivals[-1] - arrivals[0]) + 1e-6


class Service:
    """Answers with chunks of as many actions as the test says, and notes the budgets."""

    def __init__(self) -> None:
        self.limits = SimpleNamespace(budget_ms=LIMIT_MS)
        self.told = PolicyInfo(policy="p", family="f", revision="r", ready=True, horizon=50, dt_s=0.02)
        self.budgets: list[float] = []
        self.rows, self.plan = 50, None

    def info(self, policy):
        return self.told

    def mapping(self, policy, protocol):
        return self.mapped

    mapped = ClientMapping()

    async def submit(self, caller, policy, observation, *, checked=False):
        self.budgets.append(observation.budget_ms)
        return SimpleNamespace(actions=SimpleNamespace(shape=(self.rows, 7)), plan=self.plan)


async def test_after_a_shorter_chunk_the_buffer_runs_dry_sooner():
    service = Service()
    conversation = Conversation(service, SimpleNamespace(robot_id="arm", session_id="s", protocol="openpi"), "p")
    sent = ClientInput({}, [0.0], "go")
    for rows in (25, 50, 60, 50):
        service.rows = rows
        await conversation.act(sent)
    assert service.budgets[0] == pytest.approx(1000.0)  # without a rhythm: a chunk
    assert service.budgets[1] == pytest.approx(500.0, abs=50)
    assert service.budgets[2] == pytest.approx(1000.0, abs=50)
    assert service.budgets[3] == pytest.approx(1000.0, abs=50), "never more than the policy's chunk"
    service.rows = 25
    await conversation.act(sent)
    conversation.begin_episode()
    await conversation.act(sent)
    assert service.budgets[-1] == pytest.approx(1000.0), "a new episode begins without a chunk"
    service.rows, service.plan = 2, object()
    await conversation.act(sent)
    await conversation.act(sent)
    assert service.budgets[-1] == pytest.approx(1000.0, abs=50), "a planner says nothing of it"
