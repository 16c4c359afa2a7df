"""Messages of the wire that several tests start from."""

from __future__ import annotations

import numpy as np
from taktline_protocol.messages import ActionChunk, Array, PolicyInfo, Timings
from taktline_protocol.stream import StreamLimits, Welcome

CHUNK = ActionChunk(
    request_id="r",
    policy="p",
    revision="v",
    robot_id="arm",
    seq=7,
    actions=Array.from_numpy(np.arange(6, dtype="<f4").reshape(3, 2)),
    dt_s=0.05,
    captured_at=1.5,
    valid_until=1.65,
    timings=Timings(observe_ms=1.0, transfer_ms=2.0, queue_ms=3.0, inference_ms=4.0, actuate_ms=5.0),
    margin_ms=100.0,
    batch_size=2,
    worker="w",
)
WELCOME = Welcome(
    version=1,
    token=b"t" * 16,
    resumed=False,
    held={},
    pending=(),
    limits=StreamLimits(**dict.fromkeys(StreamLimits.__struct_fields__, 2**24)),
    policy=PolicyInfo(policy="p", family="f", revision="r", ready=True),
    sent_at=0.0,
)
