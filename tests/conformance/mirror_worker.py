"""Mirror worker: a real gRPC worker process for client tests whose actions say what it was given. It is no model.

Every action row holds, in this order: the state, the mean pixel value of each camera in the order of --cameras (-1
where absent; a PNG or JPEG counts as 1000 plus its first byte), and the length of the instruction; then zeros, and in
the last column the row's number. So a client can check that its images, state and text arrived under the right names.
With a tail the last but one column holds the number of the tail's first row, and the report says what was asked.
The instruction steers it: `slow MS` takes longer, `fail` fails the RPC, `item-error` is a typed error.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_protocol.rpc import SERVER_OPTIONS, to_tensor


def mean_pixel(item, camera: str) -> float:
    if camera not in item.images:
        return -1.0
    image = item.images[camera]
    if image.encoding != "raw":
        return 1000.0 + image.data[0]
    return float(np.frombuffer(image.data, np.uint8).mean())


class MirrorWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.cameras = arguments.cameras.split(",")

    async def Info(self, request, context):
        a = self.arguments
        return worker_pb2.InfoResponse(
            policy=a.policy,
            family="mirror",
            revision="m1",
            precision="fp32",
            device="cpu",
            cameras=self.cameras,
            optional_cameras=a.optional.split(",") if a.optional else [],
            state_dim=a.state_dim,
            action_dim=a.action_dim,
            horizon=a.horizon,
            dt_s=0.02,
            rtc=a.rtc,
            t_sync=[
                worker_pb2.BucketTime(batch=batch, median_ms=a.says_ms, p99_ms=2 * a.says_ms) for batch in (1, 2, 4, 8)
            ],
        )

    async def Infer(self, request, context):
        began = time.monotonic()
        results = []
        for item in request.items:
            words = item.instruction.split()
            if words[0] == "fail":
                await context.abort(grpc.StatusCode.INTERNAL, "scripted failure")
            if words[0] == "slow":
                await asyncio.sleep(float(words[1]) / 1e3)
            result = worker_pb2.InferResult(request_id=item.request_id)
            if words[0] == "item-error":
                result.error.code, result.error.message = "image_corrupt", "scripted: cannot decode"
                result.error.next_step = "send a whole image"
            else:
                result.actions.CopyFrom(to_tensor(self.actions(item)))
                if item.rtc.HasField("tail"):
                    asked = {"delay": item.rtc.delay, "prefix_end": item.rtc.prefix_end}
                    result.rtc.CopyFrom(worker_pb2.RtcApplied(mode="guided", schedule="exp", path="batched", **asked))
            results.append(result)
        total = 1e3 * (time.monotonic() - began)
        return worker_pb2.InferResponse(results=results, engine_ms=total, total_ms=total, bucket=1, revision="m1")

    def actions(self, item) -> np.ndarray:
        state = np.frombuffer(item.state.data, item.state.dtype)
        pixels = [mean_pixel(item, camera) for camera in self.cameras]
        row = [*state, *pixels, float(len(item.instruction))]
        row = (row + [0.0] * self.arguments.action_dim)[: self.arguments.action_dim]
        actions = np.tile(np.asarray(row, np.float32), (self.arguments.horizon, 1))
        actions[:, -1] = np.arange(self.arguments.horizon)
        if item.rtc.HasField("tail"):
            tail = item.rtc.tail
            actions[:, -2] = np.frombuffer(tail.data, tail.dtype).reshape(tuple(tail.shape))[0, -1]
        return actions


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--policy", default="mirror")
    parser.add_argument("--cameras", default="image,wrist_image")
    parser.add_argument("--optional", default="")
    parser.add_argument("--state-dim", type=int, default=8)
    parser.add_argument("--action-dim", type=int, default=16)
    parser.add_argument("--horizon", type=int, default=10)
    parser.add_argument("--rtc", default="", help="guided: observations may carry a tail")
    parser.add_argument("--says-ms", type=float, default=2.0, help="what it says that a batch takes")
    arguments = parser.parse_args()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(MirrorWorker(arguments), server)
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    server.add_insecure_port(arguments.listen)
    await server.start()
    await status.set("", health_pb2.HealthCheckResponse.SERVING)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(1)


if __name__ == "__main__":
    asyncio.run(main())
