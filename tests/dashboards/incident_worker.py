"""A real gRPC worker process without a model, whose speed a file decides: the incident run makes it slow and fast.

It says at start what T_sync it has and keeps to it, times the factor in --speed-file (1 where the file is absent).
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_protocol.rpc import SERVER_OPTIONS, to_tensor


class IncidentWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.engine = asyncio.Lock()

    def factor(self) -> float:
        file = self.options.speed_file
        return float(file.read_text() or 1) if file.exists() else 1.0

    async def Info(self, request, context):
        times = [
            worker_pb2.BucketTime(batch=size, median_ms=self.options.t_ms, p99_ms=1.2 * self.options.t_ms)
            for size in range(1, self.options.max_batch + 1)
        ]
        return worker_pb2.InfoResponse(
            policy=self.options.policy,
            family="scripted",
            revision=self.options.revision,
            precision="fp32",
            device="cpu",
            cameras=["front"],
            state_dim=2,
            action_dim=2,
            horizon=4,
            dt_s=0.05,
            t_sync=times,
        )

    async def Infer(self, request, context):
        began = time.monotonic()
        async with self.engine:
            await asyncio.sleep(self.options.t_ms * self.factor() / 1e3)
        actions = to_tensor(np.full((4, 2), self.options.action, dtype=np.float32))
        results = [worker_pb2.InferResult(request_id=item.request_id, actions=actions) for item in request.items]
        total = 1e3 * (time.monotonic() - began)
        return worker_pb2.InferResponse(
            results=results,
            engine_ms=total,
            total_ms=total,
            bucket=len(request.items),
            revision=self.options.revision,
        )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--revision", default="r1")
    parser.add_argument("--t-ms", type=float, default=10.0)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--action", type=float, default=0.0, help="of all dimensions at all times")
    parser.add_argument("--speed-file", type=Path, required=True)
    options = parser.parse_args()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(IncidentWorker(options), server)
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    server.add_insecure_port(options.listen)
    await server.start()
    await status.set("", health_pb2.HealthCheckResponse.SERVING)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(1)


if __name__ == "__main__":
    asyncio.run(main())
