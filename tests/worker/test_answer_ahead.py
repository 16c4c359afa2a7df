"""The response that is put together at a batch's end is the message that the generated classes make."""

from __future__ import annotations

import numpy as np
import pytest
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2
from taktline_worker.answer_ahead import AnswerAhead
from taktline_worker.engine import BatchResult

SHAPE = (5, 3)


def result(*outcomes, bucket=4, waited_ms=0.25):
    return BatchResult(outcomes, bucket, 1.5, 12.25, 0.125, waited_ms)


def actions(seed: int, shape=SHAPE, dtype="<f4"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("waited_ms", [0.0, 3.5])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_it_is_the_same_message(rows, waited_ms):
    names = [f"request-{row}-" + "x" * row for row in range(rows)]
    outcomes = [actions(row) for row in range(rows)]
    outcomes[0] = np.asfortranarray(outcomes[0])  # laid out in another order
    made = AnswerAhead(names, SHAPE, "r1").serialised(result(*outcomes, waited_ms=waited_ms), 14.0)
    expected = worker_pb2.InferResponse(
        results=[
            worker_pb2.InferResult(
                request_id=name, actions=worker_pb2.Tensor(dtype="float32", shape=SHAPE, data=outcome.tobytes())
            )
            for name, outcome in zip(names, outcomes, strict=True)
        ],
        preprocess_ms=1.5,
        engine_ms=12.25,
        postprocess_ms=0.125,
        total_ms=14.0,
        waited_ms=waited_ms,
        bucket=4,
        revision="r1",
    )
    got = worker_pb2.InferResponse.FromString(made)
    assert got == expected
    assert got.HasField("waited_ms")


@pytest.mark.parametrize(
    "other",
    [
        TaktlineError(ErrorCode.STATE_INVALID, "m", "n"),
        actions(1, (4, 3)),
        actions(1, dtype="<f8"),
        actions(1, (15,)),
    ],
)
def test_another_outcome_is_left_to_the_usual_way(other):
    assert AnswerAhead(["a", "b"], SHAPE, "r").serialised(result(actions(0), other), 1.0) is None


def test_a_bucket_that_a_byte_does_not_hold_is_left_to_the_usual_way():
    assert AnswerAhead(["a"], SHAPE, "r").serialised(result(actions(0), bucket=128), 1.0) is None
    whole = AnswerAhead(["a"], SHAPE, "r").serialised(result(actions(0), bucket=127), 1.0)
    assert worker_pb2.InferResponse.FromString(whole).bucket == 127
