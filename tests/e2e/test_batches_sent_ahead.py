"""Two batches on one real worker: the next one is sent while one runs, and nobody gets another one's actions."""

from __future__ import annotations

import asyncio
import itertools
import time

import httpx
import numpy as np
from taktline_gateway.openapi import example_observation
from taktline_protocol.codecs import MediaType, decode_chunk

ROBOTS = 8
SEEDS = 4
LIMIT_S = 150.0


def test_the_next_batch_is_sent_while_one_runs_and_each_robot_gets_its_own_actions(running_stack):
    base = f"{running_stack.url}/v1/policies/{running_stack.policy}"
    example = example_observation(running_stack.info())
    seen = asyncio.Event()

    async def ask(client, robot, seq, seed):
        body = example | {"robot_id": f"ahead-{robot}", "session_id": "s", "seq": seq, "seed": seed}
        answer = await client.post(f"{base}/act", json=body | {"budget_ms": 120_000.0})
        assert answer.status_code == 200, answer.text
        return decode_chunk(answer.content, MediaType.JSON).actions.to_numpy()

    async def robot(client, number, alone, ends):
        """Asks again as soon as it has its answer, until two batches were seen on the worker."""
        seq = 0
        while not seen.is_set() and time.monotonic() < ends:
            seq, seed = seq + 1, (number + seq) % SEEDS
            assert np.allclose(await ask(client, number, seq, seed), alone[seed], atol=1e-4)

    async def watch(client, ends):
        """By the record of what was served: a look at the moment itself may come too late on a busy machine."""
        while not seen.is_set() and time.monotonic() < ends:
            await asyncio.sleep(0.5)
            trace = (await client.get(f"{base}/timeline")).json()
            batches = sorted(
                (event["ts"], event["ts"] + event["dur"])
                for event in trace["traceEvents"]
                if event.get("name", "").startswith("batch of ")
            )
            if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(batches)):
                seen.set()

    async def scene():
        limits = httpx.Limits(max_connections=2 * ROBOTS)
        async with httpx.AsyncClient(timeout=120.0, limits=limits) as client:
            alone = [await ask(client, "alone", seed + 1, seed) for seed in range(SEEDS)]
            assert np.abs(alone[0] - alone[1]).max() > 1e-3, "another one's actions would be noticed"
            ends = time.monotonic() + LIMIT_S
            await asyncio.gather(watch(client, ends), *(robot(client, number, alone, ends) for number in range(ROBOTS)))

    asyncio.run(scene())
    assert seen.is_set(), "no batch was sent ahead"
