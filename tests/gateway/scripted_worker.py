"""Scripted worker: a small real gRPC worker process for gateway tests, with a fixed T_sync and faults on command.

It is no model: it answers every item with a constant chunk after sleeping T_sync(bucket). What it does with a batch is
written in the instructions of the batch's members: `fail` (RPC error), `hang` (never answers), `exit` (the process
dies), `item-error` (a typed error for that item), `unavailable` (it will not look at that item),
`nan` (actions that are not finite), `slow MS` (takes longer), `close-batch-port` (for good).
Every batch it receives is appended to --record as one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from bisect import bisect_left
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_protocol.batch_frames import VERSION
from taktline_protocol.messages import ImageFit
from taktline_protocol.rpc import SERVER_OPTIONS, to_image_fit, to_tensor
from taktline_worker.batch_port import listen
from taktline_worker.tls import TlsFiles, server_context, server_credentials


def table(text):
    return [tuple(float(part) for part in pair.split(":")) for pair in text.split(",")]


def bucket_times(times):
    return [worker_pb2.BucketTime(batch=int(b), median_ms=ms, p99_ms=ms * 1.2) for b, ms in times]


def square(side):
    return ImageFit(height=int(side), width=int(side), filter="bilinear", letterbox=True)


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.times = table(arguments.t_sync)
        self.cheaper = {}
        for level in arguments.cheaper:
            numbers, _, times = level.partition("=")
            steps, _, horizon = numbers.partition("x")
            self.cheaper[int(steps), int(horizon or 0)] = table(times)
        self.engine = asyncio.Semaphore(arguments.replicas)
        self.in_flight = 0
        self.batches = None

    async def Info(self, request, context):
        return worker_pb2.InfoResponse(
            policy=self.arguments.policy,
            family="scripted",
            revision=self.arguments.revision,
            precision="fp32",
            device="cpu",
            cameras=["front", "wrist"],
            optional_cameras=["side"],
            state_dim=6,
            action_dim=6,
            horizon=10,
            dt_s=0.05,
            replicas=self.arguments.replicas,
            rtc=self.arguments.rtc,
            rtc_max_delay=self.arguments.rtc_max_delay,
            image_fit=to_image_fit(self.arguments.image_fit),
            t_sync=bucket_times(self.times),
            cheaper=[
                worker_pb2.CheaperLevel(solver_steps=steps, action_horizon=horizon, t_sync=bucket_times(times))
                for (steps, horizon), times in self.cheaper.items()
            ],
            batch_port=self.batches.port if self.batches else 0,
            batch_token=self.batches.token if self.batches else b"",
            batch_version=(self.arguments.batch_version or VERSION) if self.batches else 0,
        )

    async def over_the_batch_port(self, request, frames, context):
        if any(item.instruction == "close-batch-port" for item in request.items):
            self.closing = asyncio.create_task(self.batches.close(5))

        class Context:
            way = "batch"
            time_remaining = context.time_remaining
            is_active = context.is_active

            async def abort(self, code, details):
                context.abort(code, details)

        return await self.Infer(request, Context())

    async def Infer(self, request, context):
        began = time.monotonic()
        words = [item.instruction for item in request.items]
        if self.arguments.failing or {"exit", "hang", "fail"} & set(words):
            self.record(request, context)
            if "exit" in words:
                os._exit(9)
            if "hang" in words:
                await asyncio.sleep(3600)
            await context.abort(grpc.StatusCode.INTERNAL, "scripted failure")
        extra = max((float(word.split()[1]) for word in words if word.startswith("slow ")), default=0.0)
        level = (request.solver_steps, request.action_horizon)
        times = self.cheaper[level] if any(level) else self.times
        buckets = [int(b) for b, _ in times]
        bucket = min(bisect_left(buckets, len(words)), len(buckets) - 1)
        async with self.engine:  # through gRPC a call that nobody waits for is cancelled here by itself
            if getattr(context, "way", "grpc") == "batch" and not context.is_active():
                await context.abort(grpc.StatusCode.CANCELLED, "nobody waits for this batch")
            turn = time.monotonic()
            if all(0.0 < item.budget_ms < 1e3 * (turn - began) for item in request.items):
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too late for all of this batch")
            self.in_flight += 1
            self.record(request, context)
            await asyncio.sleep((times[bucket][1] + extra) / 1e3)
            self.in_flight -= 1
        results = []
        for item in request.items:
            result = worker_pb2.InferResult(request_id=item.request_id)
            if item.instruction == "item-error":
                result.error.code, result.error.message = "image_corrupt", "scripted: cannot decode"
                result.error.next_step = "send a whole image"
            elif item.instruction == "unavailable":
                result.error.code, result.error.message = "worker_unavailable", "scripted: another revision"
                result.error.next_step = "route the batch to a worker of that revision"
            else:
                rows = request.action_horizon or 10
                actions = np.full((rows, 6), float(item.seq) + self.arguments.offset, dtype=np.float32)
                if item.instruction == "nan":
                    actions[3, 2] = np.nan
                result.actions.CopyFrom(to_tensor(actions))
            results.append(result)
        ended = time.monotonic()
        return worker_pb2.InferResponse(
            results=results,
            engine_ms=1e3 * (ended - turn),
            waited_ms=1e3 * (turn - began),
            total_ms=1e3 * (ended - began),
            bucket=buckets[bucket],
            revision=self.arguments.revision,
        )

    def record(self, request, context) -> None:
        if self.arguments.record:
            line = {
                "worker": self.arguments.listen,
                "robots": [item.robot_id for item in request.items],
                "revision": request.revision,
                "solver_steps": request.solver_steps,
                "action_horizon": request.action_horizon,
                "seqs": [item.seq for item in request.items],
                "budgets_ms": [item.budget_ms for item in request.items],
                "seeds": [item.seed if item.HasField("seed") else None for item in request.items],
                "rpc_deadline_s": context.time_remaining(),
                "in_flight": self.in_flight,
                "way": getattr(context, "way", "grpc"),
                "delays": [item.rtc.delay if item.rtc.HasField("delay") else None for item in request.items],
            }
            with open(self.arguments.record, "a") as file:
                file.write(json.dumps(line) + "\n")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--policy", default="scripted")
    parser.add_argument("--revision", default="r1")
    parser.add_argument("--failing", type=int, default=0, help="1 fails every batch")
    parser.add_argument("--offset", type=float, default=0.0, help="added to every action")
    parser.add_argument("--replicas", type=int, default=1, help="batches that run at a time")
    parser.add_argument("--rtc", default="", help="guided or trained: observations with a tail are served")
    parser.add_argument("--rtc-max-delay", type=int, default=0)
    parser.add_argument("--image-fit", type=square, help="side of the images that frames may be fitted to")
    parser.add_argument("--t-sync", default="1:10,2:12,4:16,8:24")
    parser.add_argument("--cheaper", action="append", default=[], help="STEPS[xHORIZON]=TABLE of a cheaper level")
    parser.add_argument("--record")
    parser.add_argument("--grpc-only", type=int, default=0, help="1 opens no batch port")
    parser.add_argument("--batch-version", type=int, default=0, help="what its Info says of the batch port instead")
    for name in ("cert", "key", "client-ca"):
        parser.add_argument(f"--tls-{name}", type=Path)
    arguments = parser.parse_args()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker = ScriptedWorker(arguments)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    context = None
    if arguments.tls_cert is None:
        server.add_insecure_port(arguments.listen)
    else:
        files = TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca)
        server.add_secure_port(arguments.listen, server_credentials(files))
        context = server_context(files)
    if not arguments.grpc_only:
        host = arguments.listen.rpartition(":")[0]
        worker.batches = await listen(host, worker.over_the_batch_port, context=context)
    await server.start()
    await status.set("", health_pb2.HealthCheckResponse.SERVING)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await status.enter_graceful_shutdown()
    await server.stop(5)
    if worker.batches:
        await worker.batches.close(5)


if __name__ == "__main__":
    asyncio.run(main())
