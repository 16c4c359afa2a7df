"""A candidate beside the serving revision at a real gateway: mirroring, the split, the net, promotion, taking back."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter

import msgspec
import pytest
from taktline_protocol.measurements import GatewayMeasurements, Trial
from taktline_protocol.stream import Ack

from tests.gateway.conftest import Stack
from tests.gateway.stream_robot import StreamRobot
from tests.waiting import until

_numbers = itertools.count()


def candidate(*addresses: str, **fields) -> dict:
    targets = [{"address": address, "revision": "r2"} for address in addresses]
    return {
        "id": f"c{next(_numbers)}",
        "step": "s",
        "revision": "r2",
        "targets": targets,
        "tolerance": 0.01,
        "hold_s": 0,
        **fields,
    }


def measured(stack) -> GatewayMeasurements:
    return msgspec.json.decode(stack.http.get(f"{stack.url}/measurements").content, type=GatewayMeasurements)


def trial(stack) -> Trial | None:
    return measured(stack).policies[0].trial


def trial_up(stack, workers: int = 1, **fields) -> None:
    """Waits for the trial with these fields and its workers."""

    def found():
        now = trial(stack)
        return now is not None and now.workers == workers and all(getattr(now, k) == v for k, v in fields.items())

    until(found, f"the trial with {workers} workers and {fields}")


class Load:
    """Robots that ask all the time, each for itself; every answer is kept."""

    def __init__(self, stack, robots: int, **changes) -> None:
        self.stack = stack
        self.answers: list[tuple[str, int, str]] = []  # robot, status, revision or code
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(f"arm-{n}", changes)) for n in range(robots)]

    def _ask(self, robot: str, changes: dict) -> None:
        while not self._stop.is_set():
            status, body = self.stack.act(robot=robot, **changes)
            self.answers.append((robot, status, body.revision if status == 200 else f"{body.code}: {body.message}"))
            time.sleep(0.005)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def seen(self, count: int) -> None:
        """Waits for so many more answers."""
        wanted = len(self.answers) + count
        until(lambda: len(self.answers) >= wanted, f"{count} more answers")

    def failures(self) -> list:
        return [answer for answer in self.answers if answer[1] != 200]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """One gateway for all, with one worker of revision r1; a start costs seconds on a busy machine."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    made = Stack(tmp_path_factory.mktemp("trials"))
    made.serving = made.start_worker(revision="r1")
    made.write_routes(made.serving)
    made.start_gateway()
    made.wait_workers(1)
    yield made
    made.stop()


@pytest.fixture
def stack(gateway):
    """The gateway without any trial."""
    gateway.record.write_text("")
    yield gateway
    gateway.write_routes(gateway.serving)
    until(lambda: trial(gateway) is None, "the end of the trial")
    until(lambda: getattr(gateway.act()[1], "worker", "") == gateway.serving, "the first worker to serve again")
    for address in [address for address in gateway.workers if address != gateway.serving]:
        process = gateway.workers.pop(address)
        process.kill()
        process.wait()


@pytest.fixture
def serving(stack):
    """The address of the serving worker."""
    return stack.serving


def test_mirrored_observations_are_compared_and_their_answers_not_used(stack, serving):
    near, far = stack.start_worker(revision="r2", offset=0.005), stack.start_worker(revision="r2", offset=0.5)
    stack.write_routes(serving, candidate=candidate(near, mirror=100))
    trial_up(stack)
    answers = [stack.act() for _ in range(10)]
    assert {body.revision for _, body in answers} == {"r1"}
    until(lambda: trial(stack).shadow.compared == 10, "ten comparisons")
    found = trial(stack)
    assert (found.shadow.agreed, found.shadow.outcomes.on_time, found.candidate.total) == (10, 10, 0)
    assert found.shadow.distance_max == pytest.approx(0.005, rel=1e-3)
    # Another candidate begins with empty counts; beyond the tolerance it disagrees.
    stack.write_routes(serving, candidate=candidate(far, mirror=100, step="t"))
    trial_up(stack, step="t")
    for _ in range(5):
        stack.act()
    until(lambda: trial(stack).shadow.compared == 5, "five comparisons")
    assert trial(stack).shadow.agreed == 0
    assert trial(stack).shadow.ratio_max == pytest.approx(50, rel=1e-2)


def test_an_answer_that_was_made_cheaper_is_held_against_no_candidate(bare_stack):
    """Under load the serving revision gives shorter chunks; the candidate, which has time, must not fail for that."""
    stack = bare_stack
    serving = stack.start_worker(revision="r1", t_sync="1:1500", cheaper="0x4=1:20")
    stack.write_routes(
        serving,
        degrade={"min_action_horizon": 4},
        candidate=candidate(stack.start_worker(revision="r2", t_sync="1:20"), mirror=100),
    )
    stack.start_gateway()
    stack.wait_workers(1)
    trial_up(stack)
    for number in range(3):
        status, chunk = stack.act(budget_ms=1_300.0)
        assert (status, chunk.degraded.action_horizon) == (200, 4)
        until(lambda: trial(stack).shadow.outcomes.on_time == number + 1, "the candidate's answer")  # noqa: B023
    status, chunk = stack.act(budget_ms=10_000.0)
    assert (status, chunk.degraded) == (200, None)
    until(lambda: trial(stack).shadow.compared == 1, "the one comparison of like with like")
    found = trial(stack).shadow
    assert (found.agreed, found.reshaped, found.outcomes.on_time) == (1, 0, 4)


def test_a_candidate_that_fits_frames_otherwise_is_not_compared(bare_stack):
    """A robot may have fitted its frames to the serving revision: the candidate saw others than it would."""
    stack = bare_stack
    serving = stack.start_worker(revision="r1", image_fit=224)
    far = stack.start_worker(revision="r2", image_fit=112, offset=1.0)
    alike = candidate(stack.start_worker(revision="r2", image_fit=224), mirror=100)
    stack.write_routes(serving, candidate=candidate(far, mirror=100))
    stack.start_gateway()
    stack.wait_workers(1)
    trial_up(stack)
    for _ in range(3):
        assert stack.act()[0] == 200
    until(lambda: trial(stack).shadow.outcomes.on_time == 3, "the candidate's answers")
    assert trial(stack).shadow.compared == 0
    stack.write_routes(serving, candidate=alike)
    trial_up(stack, id=alike["id"])
    assert stack.act()[0] == 200
    until(lambda: trial(stack).shadow.compared == 1, "the comparison with one that fits alike")
    assert trial(stack).shadow.agreed == 1


def test_both_revisions_draw_the_same_noise_for_a_mirrored_observation(stack, serving):
    other = stack.start_worker(revision="r2")
    stack.write_routes(serving, candidate=candidate(other, mirror=100))
    trial_up(stack)
    stack.act()
    stack.act(seed=7)
    until(lambda: trial(stack).shadow.compared == 2, "two comparisons")
    seeds = {}
    for batch in stack.batches():
        for seq, seed in zip(batch["seqs"], batch["seeds"], strict=True):
            seeds.setdefault(seq, []).append(seed)
    assert [len(found) for found in seeds.values()] == [2, 2]
    assert all(first == second is not None for first, second in seeds.values())
    assert [7, 7] in seeds.values()


def test_robots_move_by_share_and_stay(stack, serving):
    other = stack.start_worker(revision="r2")
    with Load(stack, 8) as load:
        load.seen(40)
        first = candidate(other, step="a")
        stack.write_routes(serving, candidate=first)
        until(lambda: (now := trial(stack)) is not None and now.seconds > 2.1, "the fleet to be known")
        stack.write_routes(serving, candidate={**first, "weight": 25, "step": "b"})
        trial_up(stack, candidate_robots=2)
        load.seen(10)
        settled = len(load.answers)
        load.seen(200)
        by_robot = {}
        for robot, _, revision in load.answers[settled:]:
            by_robot.setdefault(robot, set()).add(revision)
        assert all(len(found) == 1 for found in by_robot.values())
        assert Counter(next(iter(found)) for found in by_robot.values()) == {"r1": 6, "r2": 2}
    assert load.failures() == []
    assert trial(stack).candidate.on_time > 0
    assert trial(stack).stable.on_time > 0


def test_nothing_is_lost_from_the_first_step_to_the_old_workers_end(stack):
    serving, other = stack.start_worker(revision="r1"), stack.start_worker(revision="r2")
    stack.write_routes(stack.serving, serving)
    stack.wait_workers(2)
    stack.write_routes(serving)
    until(lambda: stack.policy()["workers"] == 1, "one worker")
    first = candidate(other)
    with Load(stack, 6) as load:
        load.seen(30)
        for weight in (17, 50, 100):
            stack.write_routes(serving, candidate={**first, "weight": weight, "step": str(weight)})
            trial_up(stack, step=str(weight))
            share = -(-6 * weight // 100)
            until(lambda share=share: trial(stack).candidate_robots >= share, f"{weight} % of the robots")
            load.seen(60)
        stack.write_routes(targets=first["targets"])  # promoted: the candidate's workers are the policy's
        until(lambda: trial(stack) is None, "the end of the trial")
        load.seen(60)
        stack.workers[serving].terminate()
        stack.workers[serving].wait()
        load.seen(60)
    assert load.failures() == []
    assert {revision for _, _, revision in load.answers[-60:]} == {"r2"}


def test_in_a_full_window_the_newest_wins_on_the_candidate_too(bare_stack):
    """A stream asks whether its queued observation has left, and refuses the newer one where it has not."""
    stack = bare_stack
    serving, other = stack.start_worker(revision="r1"), stack.start_worker(revision="r2")
    stack.write_routes(serving, candidate=candidate(other, weight=100, step="all"))
    stack.start_gateway("--stream-window", "2")
    trial_up(stack)
    robot = StreamRobot(stack.url)
    first = robot.observe("slow 600")
    robot.until(Ack)
    queued = robot.observe()
    robot.until(Ack)  # now it is in the queue
    newest = robot.observe()
    answers = {answer.seq: answer for answer in (robot.answer() for _ in range(3))}
    assert answers[queued].code == "superseded"
    assert [answers[seq].revision for seq in (first, newest)] == ["r2", "r2"]
    robot.close()


def test_taking_back_loses_nothing(stack, serving):
    other = stack.start_worker(revision="r2", t_sync="1:40,2:40,4:40,8:40")
    with Load(stack, 6) as load:
        stack.write_routes(serving, candidate=candidate(other, weight=100))
        trial_up(stack, candidate_robots=6)
        load.seen(30)
        stack.write_routes(serving)
        stack.workers[other].terminate()  # at the same moment: what was on it is answered by the serving revision
        load.seen(60)
        until(lambda: trial(stack) is None, "the end of the trial")
        load.seen(60)
    assert load.failures() == []
    assert {revision for _, _, revision in load.answers[-60:]} == {"r1"}


@pytest.mark.parametrize("fault", ["fail", "hang-then-die", "gone"])
def test_a_candidate_that_fails_costs_time_but_no_answer(stack, serving, fault):
    other = stack.start_worker(revision="r2", failing="1" if fault == "fail" else "0")
    with Load(stack, 4) as load:
        stack.write_routes(serving, candidate=candidate(other, weight=100))
        trial_up(stack)
        load.seen(10)
        if fault == "gone":
            stack.workers[other].kill()
        elif fault == "hang-then-die":
            stack.workers[other].send_signal(19)  # SIGSTOP: connected and silent
            time.sleep(0.1)
            stack.workers[other].kill()
        load.seen(80)
        found = trial(stack)
    assert load.failures() == []
    if fault == "fail":
        assert found.candidate.failed > 0
    assert found.rescued > 0


def test_a_candidate_too_slow_for_a_deadline_is_counted_and_the_serving_revision_answers(stack, serving):
    other = stack.start_worker(revision="r2", t_sync="1:5000,2:5000")
    stack.write_routes(serving, candidate=candidate(other, weight=100))
    trial_up(stack)
    answers = [stack.act(budget_ms=2000.0) for _ in range(5)]
    assert [(status, body.revision) for status, body in answers] == [(200, "r1")] * 5
    found = trial(stack)
    assert found.rescued == found.candidate.missed == 5


def test_without_usable_workers_of_the_candidate_nobody_waits_for_it(stack, serving):
    stack.write_routes(serving, candidate=candidate("127.0.0.1:1", weight=100, mirror=100))
    until(lambda: trial(stack) is not None, "the trial")
    answers = [stack.act() for _ in range(5)]
    assert {(status, body.revision) for status, body in answers} == {(200, "r1")}
    assert trial(stack).shadow.outcomes.total == 0


def test_demand_is_counted_by_deadline_class_with_the_pools_measured_times(stack, serving):
    before = {demand.up_to_ms: demand.outcomes.on_time for demand in measured(stack).policies[0].demand}
    for budget_ms in (150.0, 150.0, 900.0, 20_000.0, 1.0):
        stack.act(budget_ms=budget_ms)
    policy = measured(stack).policies[0]
    found = {demand.up_to_ms: demand.outcomes.on_time for demand in policy.demand}
    refused = {demand.up_to_ms: demand.outcomes.refused for demand in policy.demand}
    assert {edge: found[edge] - before.get(edge, 0) for edge in (200, 1000, 0)} == {200: 2, 1000: 1, 0: 1}
    assert refused[20] >= 1
    (pool,) = policy.pools
    assert (pool.pool, pool.workers) == ("default", 1)
    assert [time_.batch for time_ in pool.t_sync] == [1, 2, 4, 8]
    assert pool.t_sync[0].median_ms > 9  # it sleeps for ten
    assert measured(stack).seconds > 0
