"""The worker RPC carries an observation and its answer without loss."""

from __future__ import annotations

import numpy as np
import pytest
from taktline_protocol import Array, ErrorCode, Image, Observation, TaktlineError, worker_pb2
from taktline_protocol.messages import BucketTime
from taktline_protocol.rpc import (
    from_error,
    from_tensor,
    item_images,
    policy_info,
    to_bucket_times,
    to_error,
    to_item,
    to_tensor,
)


@pytest.mark.parametrize("state", [[0.1, -2.5], Array.from_numpy(np.array([0.1, -2.5], dtype=np.float32))])
@pytest.mark.parametrize("seed", [None, 0, 2**63 - 1])
def test_item_round_trip(state, seed):
    images = {"front": Image("raw", bytes(range(12)), (2, 2, 3)), "wrist": Image("jpeg", b"\xff\xd8")}
    sent = Observation(
        robot_id="arm", seq=7, captured_at=1.0, budget_ms=50.0, images=images, state=state, instruction="hé", seed=seed
    )
    item = worker_pb2.InferItem.FromString(to_item("id", sent, 12.5).SerializeToString())
    assert (item.request_id, item.robot_id, item.seq, item.instruction, item.budget_ms) == ("id", "arm", 7, "hé", 12.5)
    assert item.HasField("seed") is (seed is not None)
    assert not seed or item.seed == seed
    assert item_images(item) == images
    expected = state if isinstance(state, Array) else Array.from_numpy(np.array(state))
    assert from_tensor("state", item.state) == expected


def test_tensor_of_the_wrong_size_is_refused():
    tensor = to_tensor(np.zeros((2, 3), dtype=np.float32))
    tensor.data = tensor.data[:-1]
    with pytest.raises(TaktlineError) as caught:
        from_tensor("actions", tensor, ErrorCode.WORKER_FAILED)
    assert caught.value.code is ErrorCode.WORKER_FAILED


def test_error_keeps_its_code():
    error = TaktlineError(ErrorCode.IMAGE_CORRUPT, "m", "n")
    back = from_error(to_error(error))
    assert (back.code, back.message, back.next_step) == (error.code, "m", "n")
    assert from_error(worker_pb2.Error(code="odd", message="m")).code is ErrorCode.WORKER_FAILED


def test_info_orders_its_buckets():
    times = (BucketTime(batch=4, median_ms=3.0, p99_ms=4.0), BucketTime(batch=1, median_ms=1.0, p99_ms=2.0))
    info = policy_info(worker_pb2.InfoResponse(policy="p", cameras=["a"], t_sync=to_bucket_times(times)))
    assert [time.batch for time in info.t_sync] == [1, 4]
    assert info.cameras == ("a",)
