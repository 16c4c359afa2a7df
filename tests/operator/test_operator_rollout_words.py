"""What `taktline rollout` says: whole sentences that name the revision and the next step."""

from __future__ import annotations

from typing import Any

import pytest
from taktline_operator import judgement, rollout_command
from taktline_operator.spec import Rollout
from taktline_protocol.errors import TaktlineError
from taktline_protocol.measurements import Trial

Json = dict[str, Any]


def live(phase: str, **status: Any) -> Json:
    rollout = {"phase": phase, "candidate": "d914eb3703", "since": "2026-03-01T08:00:00Z"}
    return {
        "metadata": {"name": "reach", "namespace": "line-1"},
        "spec": {"rollout": {"strategy": "Progressive"}},
        "status": {"rollout": rollout, "currentRevision": "a", "candidateRevision": "b", "readyReplicas": 1} | status,
    }


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("pause", "candidate b is held where it is; go on with: taktline rollout resume reach -n line-1"),
        ("resume", "candidate b goes on"),
        ("promote", "all robots move to candidate b as soon as it has enough workers"),
        ("abort", "candidate b is taken back"),
        ("retry", "the candidate that was taken back is tried again"),
    ],
)
def test_each_word_says_what_it_brings_about(word: str, sentence: str) -> None:
    assert rollout_command.said(word, live("Shadow")) == f"reach: {sentence}"


def test_a_word_that_changes_nothing_as_the_spec_is_refused_is_not_said_to() -> None:
    accepted = {"type": "Accepted", "status": "False", "reason": "InvalidSpec", "message": "pool cpu: too little"}
    with pytest.raises(TaktlineError, match="stands still: pool cpu: too little"):
        rollout_command.said("abort", live("Shifting", conditions=[accepted]))


def test_a_candidate_without_a_name_is_called_by_its_hash() -> None:
    assert "candidate d914eb3703 goes on" in rollout_command.said("resume", live("Shadow", candidateRevision=""))


@pytest.mark.parametrize(("ready", "words"), [(0, "0 workers"), (1, "1 worker"), (2, "2 workers")])
def test_workers_are_counted_in_words(ready: int, words: str) -> None:
    assert f"serves     a, {words} ready" in rollout_command.describe(live("Shadow", readyReplicas=ready))


def test_the_status_quotes_what_keeps_a_worker_from_coming_up() -> None:
    fault = "pod/reach-line-x: container worker ended with exit code 2: no model.safetensors"
    conditions = [{"type": "Degraded", "status": "True", "reason": "CrashLoopBackOff", "message": fault}]
    assert f"  fault      {fault}" in rollout_command.describe(live("Starting", conditions=conditions)).splitlines()
    assert "fault" not in rollout_command.describe(live("Starting", conditions=[conditions[0] | {"status": "False"}]))


def test_the_status_of_one_that_was_taken_back_says_how_to_try_again() -> None:
    said = rollout_command.describe(live("RolledBack")).splitlines()
    assert said[-1].endswith("correct the spec, or: taktline rollout retry reach -n line-1")


def test_a_trial_that_nobody_takes_part_in_asks_for_robots() -> None:
    """A trial that waits looks the same whether robots are slow or absent, and only people can tell which."""
    found = judgement.of_shadow(Trial(id="b", step="shadow", seconds=60.0), Rollout(), 0.99, 0.0)
    assert (found.kind, found.message.endswith("none of 200 so far: do robots ask?")) == ("wait", True)
    step = judgement.of_step(Trial(id="b", step="step-0-5", seconds=60.0), Rollout(), 0.99, 0.0)
    assert step.message.endswith("so far: do robots ask?")
