"""One observation that breaks the code that reads it: it gets an error of its own, its neighbours their chunks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.adapter import Description
from taktline_worker.engine import BatchDroppedError, Engine, Item

from tests.waiting import until

FAULTS = [ValueError("shapes differ"), KeyError("wrist"), MemoryError(), TypeError("None"), RuntimeError("torch")]


class Asked:
    """An observation that asks for nothing special and says what goes wrong with it."""

    def __init__(self, value: float, where: str, fault: Exception | None) -> None:
        self.value, self.where, self.fault = value, where, fault

    def __getattr__(self, name: str) -> None:
        return None


class Row:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Scripted:
    """An adapter whose observations say what goes wrong: `begin` or `result`, or a number to be answered with."""

    description = Description("scripted", "fp32", "cpu", (), (), 1, 1, 1, 0.1)
    fails: Exception | None = None
    drops = 0

    def begin(self, observation: Any, pool: Executor) -> Row:
        if observation.where == "begin":
            raise observation.fault
        return Row(observation.fault if observation.where == "result" else observation.value)

    def run(self, rows: list[Any], bucket: int) -> Any:
        if self.fails is not None:
            raise self.fails
        return list(rows)

    def finish(self, rows: list[Any], outputs: Any) -> list[Any]:
        return [np.full((1, 1), row, np.float32) for row in outputs][self.drops :]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(Scripted(), (1, 2, 4), decode_threads=1)  # type: ignore[arg-type]
    yield made
    made.close()


def item(value: float = 0.0, where: str = "", fault: Exception | None = None) -> Item:
    return Item(Asked(value, where, fault))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["begin", "result"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_any_exception_of_one_rows_preprocessing_stays_within_its_row(
    engine: Engine, where: str, fault: Exception
) -> None:
    outcomes = engine.infer([item(1.0), item(where=where, fault=fault), item(2.0)]).outcomes
    assert [float(outcome[0, 0]) for outcome in (outcomes[0], outcomes[2])] == [1.0, 2.0]  # type: ignore[index]
    error = outcomes[1]
    assert isinstance(error, TaktlineError)
    assert error.code is ErrorCode.INTERNAL
    assert type(fault).__name__ in error.message
    assert "log" in error.next_step


def test_an_error_with_a_code_keeps_it(engine: Engine) -> None:
    fault = TaktlineError(ErrorCode.IMAGE_CORRUPT, "no picture", "send one")
    outcomes = engine.infer([item(where="result", fault=fault), item(3.0)]).outcomes
    assert outcomes[0] is fault
    assert float(outcomes[1][0, 0]) == 3.0  # type: ignore[index]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_an_engine_that_fails_answers_every_row_and_serves_the_next_batch(engine: Engine, fault: Exception) -> None:
    engine.adapter.fails = fault  # type: ignore[attr-defined]
    outcomes = engine.infer([item(1.0), item(2.0)]).outcomes
    assert [outcome.code for outcome in outcomes] == [ErrorCode.WORKER_FAILED] * 2  # type: ignore[union-attr]
    engine.adapter.fails = None  # type: ignore[attr-defined]
    assert float(engine.infer([item(4.0)]).outcomes[0][0, 0]) == 4.0  # type: ignore[index]


def test_an_adapter_that_forgets_a_row_gives_nobody_anothers_actions(engine: Engine) -> None:
    engine.adapter.drops = 1  # type: ignore[attr-defined]
    outcomes = engine.infer([item(1.0), item(2.0)]).outcomes
    assert [outcome.code for outcome in outcomes] == [ErrorCode.WORKER_FAILED] * 2  # type: ignore[union-attr]


def test_the_wait_for_the_batch_before_is_told_apart_from_the_batchs_own_time(engine: Engine, monkeypatch: Any) -> None:
    began, go_on = threading.Event(), threading.Event()
    run = engine.adapter.run

    def held(rows: list[Any], bucket: int) -> Any:
        began.set()
        assert go_on.wait(30)
        return run(rows, bucket)

    monkeypatch.setattr(engine.adapter, "run", held)
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(engine.infer, [Item(Asked(1.0, "", None))])
        assert began.wait(30)
        monkeypatch.setattr(engine.adapter, "run", run)
        second = callers.submit(engine.infer, [Item(Asked(2.0, "", None))])
        while engine._lane._work_queue.empty():
            time.sleep(0.001)
        time.sleep(0.05)
        go_on.set()
        assert first.result(30).waited_ms < first.result(30).engine_ms
        assert second.result(30).waited_ms >= 50.0
        assert second.result(30).engine_ms < first.result(30).engine_ms


class Launched:
    """A batch on a device: it ends when it is told to, after `device_s` of its own."""

    def __init__(self, outputs: list[Any], device_s: float) -> None:
        self.ends, self.seconds = threading.Event(), device_s
        self.fault: Exception | None = None
        self._outputs = outputs

    def wait(self) -> list[Any]:
        assert self.ends.wait(30)
        if self.fault is not None:
            raise self.fault
        return self._outputs


class Launching(Scripted):
    """As `Scripted`, on a device that takes a batch while it runs another."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.threads: list[str] = []
        self.drafts: list[object] = []
        self.given: list[object] = []
        self.may_launch = threading.Event()
        self.may_launch.set()

    def run(self, rows: list[Any], bucket: int) -> Any:
        raise AssertionError("it was not launched")

    def draft(self, pending: list[Any]) -> Any:
        self.drafts.append(object())
        return self.drafts[-1]

    def launch(self, rows: list[Any], bucket: int, draft: Any = None) -> Launched:
        self.given.append(draft)
        self.threads.append(threading.current_thread().name)
        assert self.may_launch.wait(30)
        self.launched.append(Launched(list(rows), 0.01 * (1 + len(self.launched))))
        return self.launched[-1]


@pytest.fixture
def launching() -> Iterator[tuple[Engine, Launching]]:
    adapter = Launching()
    made = Engine(adapter, (1, 2), decode_threads=1)
    yield made, adapter
    made.close()


def test_a_batch_is_launched_while_the_one_before_it_runs(launching: tuple[Engine, Launching]) -> None:
    engine, adapter = launching
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(engine.infer, [Item(Asked(1.0, "", None))])
        until(lambda: len(adapter.launched) == 1, "launch 1")
        second = callers.submit(engine.infer, [Item(Asked(2.0, "", None)), Item(Asked(3.0, "", None))])
        until(lambda: len(adapter.launched) == 2, "launch 2")
        time.sleep(0.05)
        adapter.launched[0].ends.set()
        assert first.result(30).outcomes[0].item() == 1.0
        assert not second.done()
        adapter.launched[1].ends.set()
        result = second.result(30)
    assert [outcome.item() for outcome in result.outcomes] == [2.0, 3.0]
    assert (first.result().engine_ms, result.engine_ms) == (10.0, 20.0)  # the device's own
    assert result.waited_ms >= 30.0


def test_parts_of_a_large_batch_are_launched_together_and_count_their_waits_once(
    launching: tuple[Engine, Launching],
) -> None:
    engine, adapter = launching
    with ThreadPoolExecutor(1) as callers:
        job = callers.submit(engine.infer, [Item(Asked(float(value), "", None)) for value in range(5)])
        until(lambda: len(adapter.launched) == 3, "launch 3")
        for running in adapter.launched:
            time.sleep(0.03)
            running.ends.set()
        result = job.result(30)
    assert [outcome.item() for outcome in result.outcomes] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert result.engine_ms == pytest.approx(60.0)
    assert result.bucket == 2


def test_a_launched_batch_that_fails_answers_every_row_and_harms_no_other(launching: tuple[Engine, Launching]) -> None:
    engine, adapter = launching
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(engine.infer, [Item(Asked(1.0, "", None)), Item(Asked(2.0, "result", ValueError()))])
        until(lambda: len(adapter.launched) == 1, "launch 1")
        second = callers.submit(engine.infer, [Item(Asked(3.0, "", None))])
        until(lambda: len(adapter.launched) == 2, "launch 2")
        adapter.launched[0].fault = RuntimeError("an illegal address")
        for running in adapter.launched:
            running.ends.set()
        codes = [outcome.code for outcome in first.result(30).outcomes]
        assert codes == [ErrorCode.WORKER_FAILED, ErrorCode.INTERNAL]
        assert second.result(30).outcomes[0].item() == 3.0


def test_a_batch_that_is_alone_is_launched_by_its_own_thread(launching: tuple[Engine, Launching]) -> None:
    engine, adapter = launching
    with ThreadPoolExecutor(1, "caller") as callers:
        for value in range(3):
            job = callers.submit(engine.infer, [Item(Asked(float(value), "", None))])
            until(lambda: len(adapter.launched) > value, "its launch")  # noqa: B023
            adapter.launched[-1].ends.set()
            assert job.result(30).outcomes[0].item() == float(value)
    # Of the first nobody knows yet that it need not compute.
    assert [name.split("_")[0] for name in adapter.threads] == ["engine", "caller", "caller"]


def test_batches_that_ask_while_one_is_being_launched_follow_in_the_order_of_asking(
    launching: tuple[Engine, Launching],
) -> None:
    engine, adapter = launching
    with ThreadPoolExecutor(4, "caller") as callers:
        warm = callers.submit(engine.infer, [Item(Asked(9.0, "", None))])
        until(lambda: len(adapter.launched) == 1, "launch 1")
        adapter.launched[0].ends.set()
        warm.result(30)
        adapter.may_launch.clear()
        jobs = []
        for value in range(3):
            jobs.append(callers.submit(engine.infer, [Item(Asked(float(value), "", None))]))
            until(lambda: engine._asked == value + 1, "its turn")  # noqa: B023
        adapter.may_launch.set()
        for count in (2, 3, 4):
            until(lambda: len(adapter.launched) >= count, "the next launch")  # noqa: B023
            adapter.launched[count - 1].ends.set()
        assert [job.result(30).outcomes[0].item() for job in jobs] == [0.0, 1.0, 2.0]
    assert [running.wait()[0] for running in adapter.launched] == [9.0, 0.0, 1.0, 2.0]
    assert [name.split("_")[0] for name in adapter.threads] == ["engine", "caller", "engine", "engine"]
    assert engine._asked == 0


def test_a_draft_is_used_for_the_very_rows_that_it_was_made_for(launching: tuple[Engine, Launching]) -> None:
    """Not where one of them is refused or comes too late, and not for a batch that runs in parts."""
    engine, adapter = launching

    def run(*items: Item) -> None:
        with ThreadPoolExecutor(1) as callers:
            job = callers.submit(engine.infer, items)
            while not job.done():
                for running in list(adapter.launched):
                    running.ends.set()
                time.sleep(0.001)
            job.result()

    good = [Item(Asked(1.0, "", None)), Item(Asked(2.0, "", None))]
    run(*good)
    assert adapter.given == adapter.drafts
    run(good[0], Item(Asked(2.0, "result", ValueError())))
    run(good[0], Item(Asked(2.0, "", None), expires_at=time.monotonic() - 1.0))
    assert len(adapter.drafts) == 3
    assert adapter.given[1:] == [None, None]
    run(*good, good[0])
    assert len(adapter.drafts) == 3
    assert adapter.given[3:] == [None, None]


def test_closing_waits_for_a_batch_that_is_launched_by_its_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = Launching()
    closed = threading.Event()
    monkeypatch.setattr(adapter, "close", closed.set, raising=False)
    engine = Engine(adapter, (1, 2), decode_threads=1)
    with ThreadPoolExecutor(3) as callers:
        first = callers.submit(engine.infer, [Item(Asked(1.0, "", None))])
        until(lambda: adapter.launched, "a launch")
        adapter.launched[0].ends.set()
        first.result(30)
        adapter.may_launch.clear()
        second = callers.submit(engine.infer, [Item(Asked(2.0, "", None))])
        until(lambda: len(adapter.threads) == 2, "the second thread")
        assert not adapter.threads[1].startswith("engine")
        closing = callers.submit(engine.close)
        try:
            assert not closed.wait(0.2)
        finally:
            adapter.may_launch.set()
            until(lambda: len(adapter.launched) == 2, "launch 2")
            adapter.launched[1].ends.set()
        assert second.result(30).outcomes[0].item() == 2.0
        closing.result(30)
        assert closed.is_set()


def test_a_batch_may_be_begun_by_one_thread_and_ended_by_another(launching: tuple[Engine, Launching]) -> None:
    engine, adapter = launching
    assert not engine.launches_at_once, "nobody knows yet that it need not compute"
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(engine.infer, [Item(Asked(1.0, "", None))])
        until(lambda: len(adapter.launched) == 1, "launch 1")
        adapter.launched[0].ends.set()
        first.result(30)
        assert engine.launches_at_once
        rest = engine.begin([Item(Asked(2.0, "", None))])
        assert len(adapter.launched) == 2
        ended = callers.submit(rest)
        adapter.may_launch.clear()
        third = callers.submit(engine.infer, [Item(Asked(3.0, "", None))])
        until(lambda: engine._asked == 1, "its turn")
        assert not engine.launches_at_once, "another one is being launched"
        adapter.may_launch.set()
        until(lambda: len(adapter.launched) == 3, "launch 3")
        for running in adapter.launched:
            running.ends.set()
        assert ended.result(30).outcomes[0].item() == 2.0
        assert third.result(30).outcomes[0].item() == 3.0


@pytest.mark.parametrize("fails", [False, True])
def test_a_hung_engine_holds_up_nobody_who_must_not_wait(launching: tuple[Engine, Launching], fails: bool) -> None:
    engine, adapter = launching
    with ThreadPoolExecutor(4) as callers:
        first = callers.submit(engine.infer, [Item(Asked(1.0, "", None))])
        until(lambda: len(adapter.launched) == 1, "launch 1")
        assert engine.launches_at_once, "one more fits behind it"
        rest = engine.begin([Item(Asked(2.0, "", None))])
        assert not engine._asked
        assert not engine.launches_at_once, "a third would wait for the first"
        ended = callers.submit(rest)
        adapter.launched[0].ends.set()
        first.result(30)
        assert engine.launches_at_once
        if fails:
            adapter.launched[1].fault = RuntimeError("an illegal address")
        adapter.launched[1].ends.set()
        ended.result(30)
        late = Item(Asked(3.0, "", None), expires_at=time.monotonic() - 1.0)
        assert isinstance(engine.infer([late]).outcomes[0], TaktlineError)
        with pytest.raises(BatchDroppedError):
            engine.infer([Item(Asked(4.0, "", None))], cancelled=lambda: True)
    assert engine._uncollected == 0
