"""The Planner deployment: the worker's gRPC port on one side, the WorldModel replicas on the other."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import ray
import torch
from ray.exceptions import RayActorError
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig

from taktline_worker import logs
from taktline_worker.lifecycle import ServeOptions
from taktline_worker.models.vjepa2_ac.adapter import Deployed, check_deployment
from taktline_worker.models.vjepa2_ac.planner import PlannerAdapter
from taktline_worker.models.vjepa2_ac.processor import PlannerRow
from taktline_worker.planning.round_times import RoundTimes
from taktline_worker.planning.search import Plan
from taktline_worker.planning.shards import RoundSpan, ScoredRound, ShardCall, ShardReply, drive
from taktline_worker.server import Worker

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0
"""Loading and capturing on all replicas."""
STALL_S = 300.0
"""How long a call may take where no row of the plan has a deadline: only a lost machine is slower."""
FINISH_S = 5.0
"""How long the answer of a plan may take whose deadline has come: no round is scored for it."""
_POLL_S = 0.1
_SPANS = 1000


class ServeScorers:
    """The WorldModel replicas behind their handle (`planning.shards.Scorers`), for one plan.

    A call whose replica is lost goes to the next one; Serve starts a new replica by itself meanwhile. Where none comes
    back in time, the plan is an error.

    Args:
        problems: reference of the plan's problems in the object store.
        until: instant of `clock` after which an answer is of no use.
    """

    def __init__(
        self, handle: Any, size: int, problems: Any, until: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.size = size
        self._handle = handle
        self._problems = [problems]
        self._until = until
        self._clock = clock

    def score(self, calls: Sequence[ShardCall], until: float | None) -> list[ShardReply]:
        """See `Scorers`: the handle deals the calls out in turn, one to each replica."""
        ends = self._until if until is None else min(until, self._until)
        responses = [self._handle.score.remote(call, self._problems) for call in calls]
        return [
            await_reply(
                response, partial(self._handle.score.remote, call, self._problems), lambda: ends - self._clock()
            )
            for call, response in zip(calls, responses, strict=True)
        ]

    def finish(self, plan: str, rounds: Sequence[ScoredRound]) -> list[Plan]:
        """See `Scorers`; it takes a moment, which a plan that ends at its deadline is given besides."""
        call = partial(self._handle.finish.remote, plan, rounds, self._problems)
        until = max(self._until, self._clock() + FINISH_S)
        found: list[Plan] = await_reply(call(), call, lambda: until - self._clock())
        return found


def await_reply(response: Any, again: Callable[[], Any], left_s: Callable[[], float]) -> Any:
    """The value of a handle's response; where its replica is lost, of another one's.

    Args:
        left_s: seconds until an answer is of no use; infinite waits `STALL_S` for each replica.

    Raises:
        TaktlineError: DEADLINE_EXPIRED or WORKER_UNAVAILABLE where nobody answered in time.
    """
    while True:
        left = left_s()
        try:
            return response.result(timeout_s=max(0.0, min(left, STALL_S)))
        except RayActorError as error:
            logger.error("a plan lost a world model; its shard goes to another one", extra={"cause": str(error)[:300]})
            response = again()
        except TimeoutError as error:
            response.cancel()
            if math.isinf(left):
                raise TaktlineError(
                    ErrorCode.WORKER_UNAVAILABLE,
                    f"no world model answered a shard of the plan within {STALL_S:g} s",
                    "read the log of the WorldModel deployment; check that its replicas have a device each",
                ) from error
            raise TaktlineError(
                ErrorCode.DEADLINE_EXPIRED,
                "no world model answered a shard of the plan before the hand-off deadline",
                "send a larger budget, or see whether replicas of the WorldModel deployment were lost",
            ) from error


class RayPlannerAdapter(PlannerAdapter):
    """The planner's request path with its world models behind a handle.

    Attributes:
        spans: the newest rounds' times, for `Planner.report`.
    """

    def __init__(self, deployed: Deployed, handle: Any, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            deployed.processor,
            deployed.device.type,
            deployed.config.engine.precision,
            deployed.control_period_s,
            RoundTimes(deployed.micro_batch, size),
            clock,
        )
        self._handle = handle
        self._size = size
        self.spans: deque[RoundSpan] = deque(maxlen=_SPANS)

    def plans(self, rows: Sequence[PlannerRow], deadlines: Sequence[float | None]) -> list[Plan | TaktlineError]:
        """See `PlannerAdapter`: latents enter the object store once, then rounds move energies alone."""
        until = max(math.inf if row.expires_at is None else row.expires_at for row in rows)
        encode = partial(self._handle.encode.remote, list(rows), list(deadlines))
        problems = await_reply(encode(), encode, lambda: until - self._clock())
        scorers = ServeScorers(self._handle, self._size, ray.put(problems), until, self._clock)
        return drive(scorers, uuid.uuid4().hex, problems, self._clock, self.spans.append)


class Planner:
    """One replica, which serves the gateway's batches on `listen` once all world models are ready.

    Args:
        world_models: handle of the WorldModel deployment.
        config: the worker's engine.json, as bytes.
        replicas: of the WorldModel deployment.
        serve: how the worker's port listens.
    """

    def __init__(self, world_models: Any, config: bytes, replicas: int, serve: ServeOptions, log_level: str) -> None:
        logs.configure(log_level)
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        self._handle = world_models

        def start() -> tuple[RayPlannerAdapter, Worker, list[str]]:
            decoded = msgspec.json.decode(config, type=EngineConfig)
            adapter = RayPlannerAdapter(
                check_deployment(decoded, torch.device(decoded.engine.device)), world_models, replicas
            )
            pids = wait_for_all(world_models, replicas)
            worker = Worker(decoded, serve, lambda _: adapter)
            worker.start()
            return adapter, worker, pids

        # Serve runs constructors on an event loop, and handles wait on threads only.
        with ThreadPoolExecutor(1) as thread:
            self._adapter, self._worker, pids = thread.submit(start).result()
        logger.info("planner serves", extra={"port": self._worker.port, "world_models": pids})

    def report(self) -> dict[str, Any]:
        """Port of the gRPC service, and the newest rounds as (seconds, slowest scorer's seconds, scorers)."""
        spans = [(span.seconds, span.scoring_s, span.scorers) for span in self._adapter.spans]
        return {"port": self._worker.port, "rounds": spans}

    def __del__(self) -> None:
        """Serve's hook for an orderly end: what runs is finished, within the grace of the options."""
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.drain(threading.Event())


def wait_for_all(handle: Any, replicas: int, timeout_s: float = START_TIMEOUT_S) -> list[str]:
    """Waits until so many different replicas have answered; returns their processes.

    Raises:
        TaktlineError: CONFIG_INVALID where they did not come in time.
    """
    ends, seen = time.monotonic() + timeout_s, set[str]()
    while len(seen) < replicas:
        left = ends - time.monotonic()
        if left <= 0:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"{len(seen)} of {replicas} world models were ready after {timeout_s:g} s",
                "give the cluster as many devices as engine.parallel.search, or lower it",
            )
        responses = [handle.who.remote() for _ in range(replicas)]
        for response in responses:
            try:
                seen.add(response.result(timeout_s=max(0.0, left)))
            except (RayActorError, TimeoutError) as error:
                logger.warning("a world model is not there yet", extra={"cause": str(error)[:300]})
        time.sleep(_POLL_S if len(seen) < replicas else 0.0)
    return sorted(seen)
