"""The servers that the gateway is measured against: each answers every observation with a constant chunk at once.

    python -m benchmarks.gateway.bare_servers openpi|fastapi|ray --port PORT

`openpi` does what openpi's own policy server does per frame, written from its wire protocol, as that server is not on
the package index: one asyncio process on `websockets`, msgpack unpacked into arrays on the loop, the result packed.
`fastapi` is a route that decodes the same body with msgspec. `ray` is Ray Serve with `@serve.batch(32, 20 ms)` behind
its own HTTP proxy; it runs in an environment of its own, so nothing of this repository is imported here.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import msgspec
import numpy as np

HORIZON, WIDTH = 50, 7
ACTIONS = np.zeros((HORIZON, WIDTH), np.float32)


def pack(value: object) -> bytes:
    """A result in openpi's layout."""
    return msgspec.msgpack.encode(value, enc_hook=_array)


def _array(array: np.ndarray) -> dict[bytes, object]:  # type: ignore[type-arg]
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def unpack(frame: bytes) -> object:
    """A frame with its arrays as views, the way openpi's packer lays them out."""

    def array_of(value: object) -> object:
        if isinstance(value, dict):
            if b"__ndarray__" in value:
                return np.ndarray(value[b"shape"], np.dtype(value[b"dtype"]), buffer=value[b"data"])
            return {key: array_of(element) for key, element in value.items()}
        return value

    return array_of(msgspec.msgpack.decode(frame))


def serve_openpi(port: int) -> None:
    """openpi's protocol: metadata, then one result for each observation."""
    from websockets.asyncio.server import ServerConnection, serve

    async def converse(connection: ServerConnection) -> None:
        await connection.send(pack({}))
        previous_ms = None
        async for frame in connection:
            began = time.monotonic()
            unpack(frame if isinstance(frame, bytes) else b"\x80")
            result = {"actions": ACTIONS, "server_timing": {"infer_ms": 0.0}, "policy_timing": {"infer_ms": 0.0}}
            if previous_ms is not None:
                result["server_timing"] = {"infer_ms": 0.0, "prev_total_ms": previous_ms}
            await connection.send(pack(result))
            previous_ms = 1e3 * (time.monotonic() - began)

    async def run() -> None:
        async with serve(converse, "127.0.0.1", port, compression=None, max_size=None) as server:
            await server.serve_forever()

    asyncio.run(run())


def serve_fastapi(port: int) -> None:
    """A bare route: the body is decoded and a constant chunk encoded."""
    import uvicorn
    from fastapi import FastAPI, Request, Response

    app = FastAPI()

    async def act(request: Request) -> Response:
        unpack(await request.body())
        return Response(pack({"actions": ACTIONS}), media_type="application/msgpack")

    # FastAPI reads the types of a route's parameters, which here are names of this function only.
    act.__annotations__ = {"request": Request, "return": Response}
    app.post("/act")(act)

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def serve_ray(port: int) -> None:
    """Ray Serve's dynamic batching, one replica."""
    import ray
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    @serve.deployment(num_replicas=1, max_ongoing_requests=100)
    class Policy:
        @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.02)
        async def infer(self, bodies: list[bytes]) -> list[bytes]:
            answers = []
            for body in bodies:
                unpack(body)
                answers.append(pack({"actions": ACTIONS}))
            return answers

        async def __call__(self, request: Request) -> Response:
            return Response(await self.infer(await request.body()), media_type="application/msgpack")

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Policy.bind(), route_prefix="/act")
    print("ready", flush=True)
    while True:
        time.sleep(3600)


def main() -> None:
    """Serves until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", choices=["openpi", "fastapi", "ray"])
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    {"openpi": serve_openpi, "fastapi": serve_fastapi, "ray": serve_ray}[arguments.server](arguments.port)


if __name__ == "__main__":
    main()
