"""The action buffer and the loop around it, on a simulated clock: rows, deadlines, hand-offs, ensembles, refusals."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline import ActionBuffer, Chunk, ErrorCode, Player, TaktlineError
from taktline_protocol.messages import Degraded, Timings

DT_S = 0.05


def chunk(rows, dt_s=DT_S) -> Chunk:
    actions = np.asarray(rows, dtype=np.float32).reshape(len(rows), -1)
    times = Timings(observe_ms=0.0, transfer_ms=0.0, queue_ms=0.0, inference_ms=1.0, actuate_ms=0.0)
    return Chunk(actions, dt_s, 0.0, len(rows) * dt_s, times, 1.0, 1, "p", "r", "w", 1, "id")


def executed(buffer: ActionBuffer, steps: int) -> list[float | None]:
    return [None if row is None else float(row[0]) for row in (buffer.next_action() for _ in range(steps))]


@pytest.fixture
def buffer() -> ActionBuffer:
    return ActionBuffer(DT_S)


def test_a_chunk_that_was_waited_for_begins_at_its_first_row(buffer):
    mark = buffer.mark()
    assert executed(buffer, 3) == [None] * 3
    assert buffer.add(chunk([1, 2, 3]), mark)
    assert buffer.rows_left == 3
    assert buffer.left_ms == pytest.approx(150.0)
    assert executed(buffer, 4) == [1, 2, 3, None]
    assert buffer.dry_events == 1


def test_rows_that_were_due_while_a_chunk_was_made_are_dropped(buffer):
    buffer.add(chunk([1, 2, 3, 4, 5]), buffer.mark())
    executed(buffer, 1)
    mark = buffer.mark()
    assert executed(buffer, 2) == [2, 3]
    buffer.add(chunk([12, 13, 14, 15, 16]), mark)
    assert executed(buffer, 3) == [14, 15, 16]
    assert buffer.expected_delay == 2
    assert buffer.largest_seam == pytest.approx(10.0)


def test_the_seam_of_an_ensemble_is_the_jump_of_its_mean():
    buffer = ActionBuffer(DT_S, ensemble=0.0)
    buffer.add(chunk([0] * 8), buffer.mark())
    executed(buffer, 2)
    buffer.add(chunk([10] * 8), buffer.mark())
    assert executed(buffer, 1) == [5]
    assert buffer.largest_seam == pytest.approx(5.0)


def test_a_chunk_that_comes_when_all_its_rows_are_past_changes_nothing(buffer):
    buffer.add(chunk(range(10)), buffer.mark())
    mark = buffer.mark()
    executed(buffer, 3)
    assert not buffer.add(chunk([7, 8, 9]), mark)
    assert buffer.late_chunks == 1
    assert executed(buffer, 1) == [3]


def test_an_answer_that_was_overtaken_is_not_taken(buffer):
    buffer.add(chunk(range(10)), buffer.mark())
    older = buffer.mark()
    executed(buffer, 1)
    newer = buffer.mark()
    assert buffer.add(chunk(range(100, 110)), newer)
    assert not buffer.add(chunk(range(50, 60)), older)
    assert executed(buffer, 1) == [100]


def test_a_camera_that_gives_no_frame_once_ends_the_loop_before_the_first_chunk_only():
    now, answers = [0.0], []

    def ask(images, *_, **__) -> Future:
        if images["front"] is None:
            raise TaktlineError(
                ErrorCode.IMAGE_CORRUPT, "the image of camera 'front' is object of shape ()", "pass RGB"
            )
        answers.append(Future())
        return answers[-1]

    player = Player(ask, DT_S, clock=lambda: now[0])
    with pytest.raises(TaktlineError, match="front"):
        player.observe({"front": None}, [0.0], "go")
    now[0] += 1.0
    player.observe({"front": b"frame"}, [0.0], "go")
    answers[0].set_result(chunk([1, 2, 3]))
    assert player.next_action()[0] == 1
    player.observe({"front": None}, [0.0], "go")
    assert player.next_action()[0] == 2
    assert player.errors == {"image_corrupt": 2}
    assert not player.wants_observation()
    now[0] += 1.0
    assert player.wants_observation()


def test_a_state_that_is_none_is_raised_in_the_middle_of_a_loop_too():
    answer: Future = Future()
    answer.set_result(chunk([1, 2, 3]))
    wrong = []

    def ask(*_, **__) -> Future:
        if wrong:
            raise TaktlineError(ErrorCode.STATE_INVALID, "the state is None", "pass a flat vector")
        return answer

    player = Player(ask, DT_S)
    player.observe({}, [0.0], "go")
    player.next_action()
    wrong.append(True)
    with pytest.raises(TaktlineError, match="the state is None"):
        player.observe({}, None, "go")


def test_what_is_asked_in_one_episode_is_not_executed_in_the_next(buffer):
    mark = buffer.mark()
    buffer.reset()
    assert not buffer.add(chunk([1, 2]), mark)
    assert executed(buffer, 1) == [None]


def test_the_delay_is_the_median_of_what_hand_offs_really_took(buffer):
    assert buffer.expected_delay is None
    buffer.add(chunk(range(100)), buffer.mark())
    for delay in (30, 2, 3, 2, 2):
        mark = buffer.mark()
        executed(buffer, delay)
        buffer.add(chunk(range(100)), mark)
    assert buffer.expected_delay == 2, "one slow start does not inflate it"


def test_rtc_sends_the_rows_not_executed_yet(buffer):
    assert buffer.rtc() is None
    buffer.add(chunk([[1, 10], [2, 20], [3, 30]]), buffer.mark())
    executed(buffer, 1)
    rtc = buffer.rtc(execution_horizon=2)
    assert rtc.tail.to_numpy().tolist() == [[2, 20], [3, 30]]
    assert (rtc.delay, rtc.execution_horizon) == (None, 2)
    mark = buffer.mark()
    executed(buffer, 1)
    buffer.add(chunk([[2, 0], [3, 0], [4, 0], [5, 0]]), mark)
    assert buffer.rtc().tail.to_numpy()[:, 0].tolist() == [3, 4, 5]
    assert buffer.rtc().delay == 1


def test_beyond_a_shorter_chunk_the_older_one_goes_on(buffer):
    buffer.add(chunk(range(10)), buffer.mark())
    assert executed(buffer, 2) == [0, 1]
    buffer.add(chunk([102, 103, 104]), buffer.mark())
    assert buffer.rows_left == 8
    assert buffer.rtc().tail.to_numpy()[:, 0].tolist() == [102, 103, 104, 5, 6, 7, 8, 9]
    assert executed(buffer, 4) == [102, 103, 104, 5]
    assert buffer.rtc().tail.to_numpy()[:, 0].tolist() == [6, 7, 8, 9]
    buffer.add(chunk(range(206, 210)), buffer.mark())
    assert executed(buffer, 5) == [206, 207, 208, 209, None], "one that reaches as far leaves nothing of it"


def test_one_shorter_chunk_does_not_run_a_buffer_dry_that_had_more():
    """Every second chunk has 10 rows and takes 8 steps: alone it would leave 2 for the 8 that the next one takes."""
    loop = Loop(replan_rows=10)
    asked_at: list[float] = []
    for _ in range(200):
        for index, future in enumerate(loop.robot.futures):
            if not future.done() and loop.now - asked_at[index] >= 8 * DT_S - 1e-9:
                future.set_result(shorter(range(10)) if index % 2 else chunk(range(50)))
        loop.tick()
        asked_at += [loop.now - DT_S] * (len(loop.robot.asked) - len(asked_at))
    assert len(asked_at) > 10
    assert loop.player.metrics()["dry_events"] == 0


def test_the_tail_of_an_ensemble_lasts_as_long_as_its_longest_chunk():
    buffer = ActionBuffer(DT_S, ensemble=0.1)
    buffer.add(chunk(range(10)), buffer.mark())
    executed(buffer, 2)
    buffer.add(chunk([102, 103]), buffer.mark())
    assert buffer.rtc().tail.to_numpy()[:, 0].tolist() == [102, 103, 4, 5, 6, 7, 8, 9]
    executed(buffer, 3)
    assert buffer.rtc().tail.to_numpy()[:, 0].tolist() == [5, 6, 7, 8, 9], "what has ended is no tail"


def test_temporal_ensembling_weighs_the_oldest_most():
    buffer = ActionBuffer(DT_S, ensemble=0.5)
    buffer.add(chunk([0, 0, 0, 0]), buffer.mark())
    executed(buffer, 1)
    buffer.add(chunk([3, 3, 3, 3]), buffer.mark())
    executed(buffer, 1)
    buffer.add(chunk([9, 9, 9, 9]), buffer.mark())
    weights = np.exp(-0.5 * np.arange(3))
    expected = (weights * [0, 3, 9]).sum() / weights.sum()
    assert executed(buffer, 4) == [
        pytest.approx(expected),
        pytest.approx(expected),
        pytest.approx((weights[:2] * [3, 9]).sum() / weights[:2].sum()),
        9,
    ]


def test_a_chunk_that_was_overtaken_counts_in_an_ensemble_by_its_age():
    buffer = ActionBuffer(DT_S, ensemble=1.0)
    buffer.add(chunk([0] * 30), buffer.mark())
    executed(buffer, 1)
    older = buffer.mark()
    executed(buffer, 1)
    newer = buffer.mark()
    executed(buffer, 1)
    buffer.add(chunk([20] * 30), newer)
    buffer.add(chunk([10] * 30), older)
    weights = np.exp(-np.arange(3.0))
    assert executed(buffer, 1) == [pytest.approx((weights * [0, 10, 20]).sum() / weights.sum())]


def test_a_chunk_begins_at_the_row_due_when_the_cameras_were_read(buffer):
    buffer.add(chunk(range(20)), buffer.mark())
    executed(buffer, 8)
    mark = buffer.mark(ago=5)
    rtc = buffer.rtc(ago=5)
    assert rtc.tail.to_numpy()[:, 0].tolist() == list(range(3, 20)), "what was due then comes first"
    executed(buffer, 2)
    buffer.add(chunk(range(103, 123)), mark)
    assert executed(buffer, 2) == [110, 111], "row 7: 5 steps old when asked for, and 2 more"
    assert (buffer.expected_delay, buffer.expected_wait) == (7, 2)
    assert buffer.rtc(ago=5).tail.to_numpy()[:, 0].tolist() == [7, 8, 9, *range(110, 123)]
    assert buffer.rtc(ago=5).delay == 7


def test_a_tail_is_never_longer_than_a_chunk_and_begins_where_the_robot_last_set_off(buffer):
    mark = buffer.mark()
    executed(buffer, 4)
    buffer.add(chunk(range(6)), mark)
    executed(buffer, 2)
    assert buffer.mark(ago=5).step == 4, "what was seen before it moved is what was seen at the first step"
    assert buffer.rtc(ago=5).tail.to_numpy()[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    executed(buffer, 4)
    assert buffer.mark(ago=3).standing
    assert buffer.rtc(ago=3) is None


def test_a_standstill_makes_no_frame_younger_that_was_read_before_it(buffer):
    buffer.add(chunk(range(6)), buffer.mark())
    assert executed(buffer, 8) == [0, 1, 2, 3, 4, 5, None, None]
    mark = buffer.mark(ago=4)
    assert (mark.standing, mark.moved) == (True, 2)
    executed(buffer, 3)
    buffer.add(chunk(range(10, 16)), mark)
    assert executed(buffer, 5) == [12, 13, 14, 15, None], "two rows were executed since the cameras were read"
    assert not buffer.add(chunk(range(20, 26)), buffer.mark(ago=16)), "all of them were"
    assert buffer.late_chunks == 1
    executed(buffer, 300)
    assert buffer.mark(ago=350).moved >= 6, "though no row is kept for so long"
    assert buffer.mark(ago=290).moved == 0, "seen after it stopped"


def test_a_chunk_of_another_control_period_is_not_played_at_this_one():
    loop = Loop()
    loop.tick()
    loop.robot.futures[0].set_result(chunk([1, 2, 3], dt_s=2 * DT_S))
    with pytest.raises(TaktlineError, match=r"0\.1 s apart, and this loop's control period is 0\.05 s") as caught:
        loop.tick()
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert ActionBuffer(0.033).add(chunk([1], dt_s=1 / 30), ActionBuffer(0.033).mark()), "a period somebody rounded"


@pytest.mark.parametrize("options", [{}, {"ensemble": 0.01}])
def test_a_chunk_of_another_width_is_not_played(options):
    buffer = ActionBuffer(DT_S, **options)
    buffer.add(chunk([[1, 2, 3], [1, 2, 3], [1, 2, 3]]), buffer.mark())
    buffer.next_action()
    with pytest.raises(TaktlineError, match=r"'r' has 2 numbers, and those before it had 3") as caught:
        buffer.add(chunk([[1, 2], [1, 2], [1, 2]]), buffer.mark())
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert buffer.next_action().tolist() == [1, 2, 3], "what is there is still played"


@pytest.mark.parametrize("ensemble", [None, 0.01])
def test_an_action_is_the_callers_to_change(ensemble):
    """Scaled in place for a driver, it is still sent along as it came."""
    buffer = ActionBuffer(DT_S, ensemble=ensemble)
    for _ in range(2):
        buffer.add(chunk([1, 2, 3, 4, 5]), buffer.mark())
    buffer.next_action()[:] *= 100
    buffer.next_action()[:] *= 100
    assert buffer.rtc(ago=2).tail.to_numpy()[:, 0].tolist() == pytest.approx([1, 2, 3, 4, 5])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 8), st.integers(0, 4)), max_size=20))
def test_each_step_executes_the_row_that_was_meant_for_it(turns):
    """Chunks whose row for step s is s itself: whatever the lengths and delays, what is executed is the step."""
    buffer = ActionBuffer(DT_S)
    furthest = 0
    done: list[tuple[int, float]] = []

    def run(steps):
        for _ in range(steps):
            step, row = buffer.step, buffer.next_action()
            if row is not None:
                done.append((step, float(row[0])))

    for length, delay, pause in turns:
        mark = buffer.mark()
        run(delay)
        start = buffer.step if mark.standing else mark.step
        buffer.add(chunk(range(start, start + length)), mark)
        furthest = max(furthest, start + length)
        assert buffer.rows_left == max(0, furthest - buffer.step), "no chunk takes rows from another"
        run(pause)
    assert all(step == value for step, value in done)


# ----- the loop


class Robot:
    """Answers when told to."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.futures: list[Future] = []

    def ask(self, images, state, instruction, budget_ms, **more):
        self.asked.append({"budget_ms": budget_ms, **more})
        self.futures.append(Future())
        return self.futures[-1]


class Loop:
    """A control loop on a simulated clock."""

    def __init__(self, **options) -> None:
        self.now = 100.0
        self.robot = Robot()
        self.player = Player(self.robot.ask, DT_S, clock=lambda: self.now, **options)

    def tick(self) -> float | None:
        if self.player.wants_observation():
            self.player.observe({}, [0.0], "go")
        action = self.player.next_action()
        self.now += DT_S
        return None if action is None else float(action[0])


def test_the_budget_is_the_time_until_the_buffer_runs_dry():
    loop = Loop(replan_rows=2, standing_budget_ms=700.0)
    assert loop.tick() is None
    assert loop.robot.asked[0]["budget_ms"] == 700.0
    assert loop.tick() is None
    assert len(loop.robot.asked) == 1, "one at a time"
    loop.robot.futures[0].set_result(chunk([1, 2, 3, 4, 5]))
    assert [loop.tick(), loop.tick()] == [1, 2]
    assert len(loop.robot.asked) == 1
    assert loop.tick() == 3
    # Asked before the third row was handed out: three rows, 50 ms each, were left.
    assert loop.robot.asked[1]["budget_ms"] == pytest.approx(150.0)
    assert loop.tick() == 4
    loop.robot.futures[1].set_result(chunk([13, 14, 15, 16, 17]))
    assert [loop.tick(), loop.tick(), loop.tick(), loop.tick()] == [15, 16, 17, None]
    assert loop.player.metrics()["dry_events"] == 1


def test_a_robot_that_stands_waits_for_a_policy_that_takes_longer():
    loop = Loop(standing_budget_ms=700.0)

    def ask(answer) -> float:
        """Asks while the buffer is empty, and answers; the budget that was asked with."""
        while loop.tick() is not None or not loop.robot.futures or loop.robot.futures[-1].done():
            pass
        if isinstance(answer, Chunk):
            loop.robot.futures[-1].set_result(answer)
        else:
            loop.robot.futures[-1].set_exception(TaktlineError(answer, "m", "n"))
        return loop.robot.asked[-1]["budget_ms"]

    late = ErrorCode.DEADLINE_UNREACHABLE
    assert [ask(late) for _ in range(6)] == [700.0, 1400.0, 2800.0, 5600.0, 10_000.0, 10_000.0]
    slow = chunk([1])
    slow = dataclasses.replace(slow, timings=msgspec.structs.replace(slow.timings, inference_ms=1500.0))
    assert ask(slow) == 10_000.0
    assert ask(chunk([1])) == 3000.0, "twice what the inference took"
    assert ask(ErrorCode.WORKER_FAILED) == 700.0, "this one took 1 ms"
    assert ask(late) == 700.0, "no word of the time it takes"
    assert ask(late) == 1400.0
    patient = Loop(standing_budget_ms=20_000.0)
    patient.tick()
    patient.robot.futures[0].set_exception(TaktlineError(late, "m", "n"))
    for _ in range(10):
        patient.tick()
    assert [asked["budget_ms"] for asked in patient.robot.asked] == [20_000.0, 20_000.0]


def test_the_row_being_executed_counts_towards_the_budget():
    loop = Loop()
    loop.tick()
    loop.robot.futures[0].set_result(chunk([1, 2, 3]))
    loop.tick()
    loop.now -= DT_S / 2  # in the middle of the first row's period
    assert loop.player.budget_ms(loop.now) == pytest.approx(1e3 * (2.5 * DT_S))


def test_a_refusal_with_a_hint_is_waited_for_and_the_buffer_goes_on():
    loop = Loop(replan_rows=1)
    loop.tick()
    loop.robot.futures[0].set_result(chunk([1, 2, 3, 4, 5, 6]))
    assert [loop.tick(), loop.tick()] == [1, 2]
    error = TaktlineError(ErrorCode.DEADLINE_UNREACHABLE, "m", "n", retry_after_ms=120.0)
    loop.robot.futures[1].set_exception(error)
    assert [loop.tick(), loop.tick()] == [3, 4]
    assert len(loop.robot.asked) == 2
    assert [loop.tick(), loop.tick()] == [5, 6]
    assert len(loop.robot.asked) == 3
    assert loop.player.errors == {"deadline_unreachable": 1}


def test_an_error_that_cannot_pass_is_raised():
    loop = Loop()
    loop.tick()
    loop.robot.futures[0].set_exception(TaktlineError(ErrorCode.CAMERA_MISSING, "m", "n"))
    with pytest.raises(TaktlineError, match="camera_missing"):
        loop.tick()


def test_several_in_flight_are_spaced_and_the_newest_wins():
    loop = Loop(replan_rows=2, in_flight=3)
    loop.tick()
    loop.robot.futures[0].set_result(chunk(range(1, 20)))
    for _ in range(7):
        loop.tick()
    assert len(loop.robot.asked) == 4, "at rows 2, 4 and 6"
    loop.robot.futures[3].set_result(chunk(range(300, 320)))
    loop.robot.futures[2].set_exception(TaktlineError(ErrorCode.SUPERSEDED, "m", "n"))
    assert loop.tick() >= 300
    assert loop.player.errors == {"superseded": 1}
    loop.robot.futures[1].set_result(chunk(range(100, 120)))
    assert loop.tick() >= 300


def test_rtc_travels_with_the_observation():
    loop = Loop(rtc=True, replan_rows=1)
    loop.tick()
    assert loop.robot.asked[0]["rtc"] is None
    loop.robot.futures[0].set_result(chunk([1, 2, 3]))
    loop.tick()
    loop.tick()
    assert loop.robot.asked[1]["rtc"].tail.to_numpy()[:, 0].tolist() == [2, 3]


def test_frames_that_are_some_periods_old_are_played_from_the_row_due_by_now():
    loop = Loop(rtc=True)
    loop.tick()
    loop.robot.futures[0].set_result(chunk(range(30)))
    for _ in range(8):
        action = loop.player.next_action()
        loop.now += DT_S
    assert action[0] == 7
    loop.player.observe({}, [0.0], "go", captured_at=loop.now - 5 * DT_S)
    asked = loop.robot.asked[-1]
    assert asked["captured_at"] == pytest.approx(loop.now - 5 * DT_S)
    assert asked["rtc"].tail.to_numpy()[0, 0] == 3
    loop.robot.futures[-1].set_result(chunk(range(103, 133)))
    assert loop.player.next_action()[0] == 108


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_delay_beyond_the_checkpoints_training_is_left_to_the_gateway(in_flight):
    """The network alone can make it so long; the loop goes on, and nothing is lost but one answer."""
    loop = Loop(rtc=True, replan_rows=4, in_flight=in_flight)
    told = []
    for _ in range(120):
        for number, future in enumerate(loop.robot.futures):
            asked = loop.robot.asked[number]
            rtc = asked["rtc"]
            if future.done() or loop.now - asked["captured_at"] < 5 * DT_S:
                continue
            if rtc is not None and rtc.delay is not None and rtc.delay > 4:
                told.append(rtc.delay)
                future.set_exception(TaktlineError(ErrorCode.RTC_INVALID, "at most 4", "shorten the round trip"))
            else:
                future.set_result(chunk(range(50)))
        loop.tick()
    assert 1 <= len(told) <= in_flight
    assert loop.player.metrics()["dry_events"] == 0
    assert loop.robot.asked[-1]["rtc"].delay is None
    loop.robot.futures[-1].set_exception(TaktlineError(ErrorCode.RTC_INVALID, "no such tail", "n"))
    with pytest.raises(TaktlineError, match="no such tail"):
        loop.player.next_action()


@pytest.mark.parametrize("options", [{}, {"rtc": True}, {"ensemble": 0.01}, {"in_flight": 2}, {"replan_rows": 4}])
def test_after_a_pause_nothing_is_executed_that_was_seen_before_it(caplog, options):
    """What is left of a chunk, or comes of a question from before, is meant for a scene of half a minute ago."""
    loop = Loop(**options)
    loop.tick()
    loop.robot.futures[0].set_result(chunk(range(1, 9)))
    assert [loop.tick() for _ in range(5)] == [1, 2, 3, 4, 5]
    before = len(loop.robot.futures)
    assert before > 1, "an answer is under way"
    saw_at = loop.now
    loop.now += 30.0
    for future in loop.robot.futures[1:]:
        if not future.done():
            future.set_result(chunk(range(11, 19)))
    assert loop.player.wants_observation()
    loop.player.observe({}, [0.0], "go", captured_at=saw_at)
    assert len(loop.robot.futures) == before, "of frames from before it nothing is asked"
    assert loop.tick() is None
    assert len(loop.robot.futures) == before + 1
    loop.robot.futures[-1].set_result(chunk(range(21, 29)))
    assert [loop.tick() for _ in range(3)] == [21, 22, 23]
    assert sum("paused for 30" in record.message for record in caplog.records) == 1
    assert "executed since" not in caplog.text


def test_a_loop_that_is_always_slow_does_not_pause(caplog):
    """As of a simulator whose steps take longer than a whole chunk: it must move."""
    loop = Loop()
    moved = 0
    for _ in range(20):
        moved += loop.tick() is not None
        for future in loop.robot.futures:
            if not future.done():
                future.set_result(chunk(range(8)))
        loop.now += 2.0
    assert moved > 15
    assert sum("paused" in record.message for record in caplog.records) <= 1


def hinted(rows, at) -> Chunk:
    return dataclasses.replace(chunk(rows), next_observation_at=at)


@pytest.mark.parametrize("options", [{}, {"rtc": True}, {"ensemble": 0.01}, {"in_flight": 2}, {"replan_rows": 4}])
def test_a_camera_that_delivers_no_more_brings_the_robot_to_a_stand_until_it_does(caplog, options):
    """Its last picture is executed for one chunk, and not again and again because the buffer is empty then."""
    loop = Loop(**options)
    moved = []

    def run(steps, seen_at=None):
        for _ in range(steps):
            for future in loop.robot.futures:
                if not future.done():
                    future.set_result(chunk(range(8)))
            if loop.player.wants_observation():
                loop.player.observe({}, [0.0], "go", captured_at=loop.now if seen_at is None else seen_at)
            moved.append(loop.player.next_action() is not None)
            loop.now += DT_S

    run(30)
    assert all(moved[1:])
    frozen_at = loop.now
    begin = len(moved)
    run(600, seen_at=frozen_at)
    assert sum(moved[begin:]) <= 8 + 1, "a chunk, and the row of the step in which it was read"
    asked = len(loop.robot.asked)
    run(50, seen_at=frozen_at)
    assert len(loop.robot.asked) == asked, "nobody is asked what no answer could be used of"
    assert loop.player.metrics()["stale_frames"] > 50
    assert [record.message for record in caplog.records if "s old" in record.message] != []
    assert sum("s old" in record.message for record in caplog.records) == 1, "it is said once"
    begin = len(moved)
    run(30)
    assert all(moved[begin + 1 :]), "with the next new frame it goes on"


def test_the_gateways_wish_is_followed_where_the_buffer_allows():
    loop = Loop(replan_rows=1)
    loop.tick()
    loop.robot.futures[0].set_result(hinted(range(20), loop.now + 5.5 * DT_S))
    for _ in range(6):
        loop.tick()
    assert len(loop.robot.asked) == 1
    loop.tick()
    assert len(loop.robot.asked) == 2, "at the first tick after the wish"
    loop.robot.futures[1].set_result(hinted(range(20), loop.now + 60.0))
    loop.tick()
    loop.tick()
    assert len(loop.robot.asked) == 3, "a wish beyond the buffer's end is none"


def test_the_gateways_wish_may_be_ignored():
    loop = Loop(replan_rows=1, follow_hints=False)
    loop.tick()
    loop.robot.futures[0].set_result(hinted(range(20), loop.now + 5.5 * DT_S))
    loop.tick()
    loop.tick()
    assert len(loop.robot.asked) == 2


def test_reset_drops_what_was_asked():
    loop = Loop()
    loop.tick()
    loop.player.reset()
    assert loop.robot.futures[0].cancelled()
    loop.tick()
    assert len(loop.robot.asked) == 2
    loop.robot.futures[1].set_result(chunk([5]))
    assert loop.tick() == 5


def shorter(rows) -> Chunk:
    return dataclasses.replace(chunk(rows), degraded=Degraded(action_horizon=len(rows)))


@pytest.mark.parametrize("made", [shorter, chunk])
def test_of_a_chunk_that_was_made_shorter_the_next_is_asked_for_before_it_is_dry(made):
    """Replanning after 10 of 20 rows leaves 10; of 10 rows it would leave none."""
    loop = Loop(replan_rows=10)
    for answer in (chunk(range(20)), made(range(100, 110))):
        while len(loop.robot.futures) == 0 or loop.robot.futures[-1].done():
            loop.tick()
        for _ in range(2):
            loop.tick()
        loop.robot.futures[-1].set_result(answer)
    assert [entry["budget_ms"] for entry in loop.robot.asked] == [1000.0, pytest.approx(500.0)]
    while len(loop.robot.asked) == 2:
        loop.tick()
    left = loop.robot.asked[2]["budget_ms"] / (1e3 * DT_S)
    if made is shorter:
        assert loop.player.metrics()["dry_events"] == 0
        assert left == pytest.approx(7), "twice what a hand-off takes (3), and one"
    else:
        assert left == pytest.approx(20), "the standing budget: it is dry"


def test_a_shorter_chunk_that_lasts_long_enough_changes_nothing():
    asked = []
    for made in (shorter, chunk):
        loop = Loop(replan_rows=2)
        loop.tick()
        loop.robot.futures[0].set_result(made(range(10)))
        for _ in range(4):
            loop.tick()
        asked.append([entry["budget_ms"] for entry in loop.robot.asked])
    assert asked[0] == asked[1]
    assert len(asked[0]) == 2
