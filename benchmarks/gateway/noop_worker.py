"""A worker process that does nothing: real gRPC and batch port, health, Info, a constant chunk for every observation.

python -m benchmarks.gateway.noop_worker --listen HOST:PORT [--t-sync 1:0.5,...] [--paced]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import time
from typing import Any

import grpc
import numpy as np
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_protocol.batch_frames import VERSION
from taktline_protocol.rpc import SERVER_OPTIONS, to_tensor
from taktline_worker.batch_port import BatchListener, listen

HORIZON, WIDTH = 50, 7
CAMERAS = ("front", "wrist")
STATE_DIM = 8
SIGMA = 0.03
"""Log-normal spread of a paced batch, as `times.TAIL_SIGMA`."""


class NoopWorker(worker_pb2_grpc.WorkerServicer):
    """Answers at once, or after `before_ms` and then `work_ms` of its engine where a load is to be set.

    `paced`: each batch takes what `t_sync` says of its size, with a spread. `rtc`: observations may carry a tail.
    As a real worker it tells what of a batch its engine needed and what the batch waited for it, so that the next one
    is sent ahead.
    """

    def __init__(
        self,
        policy: str,
        t_sync: list[tuple[int, float]],
        work_ms: float,
        before_ms: float,
        *,
        paced: bool = False,
        rtc: str = "",
    ) -> None:
        self._policy = policy
        self._paced, self._rtc = paced, rtc
        self._spread = random.Random(1)
        self._t_sync = t_sync
        self._work_ms = work_ms
        self._before_ms = before_ms
        self._actions = to_tensor(np.zeros((HORIZON, WIDTH), np.float32))
        self._engine = asyncio.Lock()
        self.count = self.behind = 0
        self.batches: BatchListener | None = None

    async def Info(self, request: Any, context: Any) -> Any:
        """What the gateway must know."""
        return worker_pb2.InfoResponse(
            policy=self._policy,
            family="noop",
            revision="r1",
            precision="fp32",
            device="cpu",
            cameras=CAMERAS,
            state_dim=STATE_DIM,
            action_dim=WIDTH,
            horizon=HORIZON,
            dt_s=0.02,
            rtc=self._rtc,
            t_sync=[worker_pb2.BucketTime(batch=size, median_ms=ms, p99_ms=2 * ms) for size, ms in self._t_sync],
            batch_port=self.batches.port if self.batches is not None else 0,
            batch_token=self.batches.token if self.batches is not None else b"",
            batch_version=VERSION if self.batches is not None else 0,
        )

    async def Infer(self, request: Any, context: Any) -> Any:
        """One batch."""
        began = time.monotonic()
        if self._before_ms:
            await asyncio.sleep(self._before_ms / 1e3)
        ready = turn = time.monotonic()
        self.count += 1
        self.behind += self._engine.locked()
        work_ms = self._work_ms
        if self._paced:
            fitting = (ms for size, ms in self._t_sync if size >= len(request.items))
            work_ms = next(fitting, self._t_sync[-1][1]) * math.exp(self._spread.gauss(0.0, SIGMA))
        if work_ms:
            async with self._engine:
                turn = time.monotonic()
                await asyncio.sleep(work_ms / 1e3)
        ended = time.monotonic()
        results = [worker_pb2.InferResult(request_id=item.request_id, actions=self._actions) for item in request.items]
        return worker_pb2.InferResponse(
            results=results,
            preprocess_ms=1e3 * (ready - began),
            waited_ms=1e3 * (turn - ready),
            engine_ms=1e3 * (ended - turn),
            total_ms=1e3 * (time.monotonic() - began),
            bucket=len(results),
            revision="r1",
        )


async def serve(arguments: argparse.Namespace) -> None:
    """Serves until SIGTERM."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    times = [(int(size), float(ms)) for size, _, ms in (pair.partition(":") for pair in arguments.t_sync.split(","))]
    worker = NoopWorker(
        arguments.policy, times, arguments.work_ms, arguments.before_ms, paced=arguments.paced, rtc=arguments.rtc
    )
    if not arguments.grpc_only:
        host = arguments.listen.rpartition(":")[0]
        worker.batches = await listen(host, lambda request, frames, context: worker.Infer(request, context))
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    server.add_insecure_port(arguments.listen)
    await server.start()
    await status.set("", health_pb2.HealthCheckResponse.SERVING)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    print(json.dumps({"batches": worker.count, "behind": worker.behind}), flush=True)
    await status.enter_graceful_shutdown()
    await server.stop(5)
    if worker.batches is not None:
        await worker.batches.close(5)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--policy", default="noop")
    parser.add_argument("--t-sync", default="1:0.4,2:0.5,4:0.7,8:1.2,16:2.2")
    parser.add_argument("--work-ms", type=float, default=0.0, help="how long the engine takes for each batch")
    parser.add_argument("--before-ms", type=float, default=0.0, help="how long each batch takes before it needs that")
    parser.add_argument("--paced", action="store_true", help="each batch takes what --t-sync says of its size")
    parser.add_argument("--rtc", default="", choices=("", "guided"), help="take observations with a tail")
    parser.add_argument("--grpc-only", action="store_true", help="open no batch port")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
