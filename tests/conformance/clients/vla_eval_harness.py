"""The published vla-eval harness's own connection, unmodified. Runs in that package's environment; prints JSON."""

import asyncio
import json
import sys

import numpy as np
from vla_eval.connection import Connection
from vla_eval.protocol.numpy_codec import set_image_format


def observation(text="go", state_key="states"):
    rng = np.random.default_rng(0)
    return {
        "images": {
            "agentview": rng.integers(0, 255, (64, 64, 3), dtype=np.uint8),
            "wrist": np.full((64, 64, 3), 40, np.uint8),
        },
        "task_description": text,
        state_key: np.arange(8, dtype=np.float32),
    }


def listed(action):
    assert list(action) == ["actions"], action
    assert action["actions"].ndim == 1
    return action["actions"].tolist()


async def episode(url, image_format, steps):
    set_image_format(image_format)
    async with Connection(url) as connection:
        await connection.start_episode({"task": {"name": "reach"}})
        actions = [listed(await connection.act(observation())) for _ in range(int(steps))]
        await connection.end_episode({"metrics": {"success": True}})
        await connection.start_episode({"task": {"name": "reach again"}})
        again = listed(await connection.act(observation("other words", "state")))
        return {"server": connection.server_info, "actions": actions, "again": again}


async def errors(url):
    async with Connection(url) as connection:
        await connection.start_episode({})
        said = []
        bad = observation()
        del bad["images"]["wrist"]
        for wrong in (bad, observation("fail"), observation("item-error"), observation("")):
            try:
                listed(await connection.act(wrong))
                said.append(None)
            except RuntimeError as error:
                said.append(str(error))
        return {"said": said, "after": listed(await connection.act(observation("fine")))}


async def live(url, count):
    """Real-time mode: observations are pushed without waiting, actions come by callback."""
    got = []
    connection = Connection(url)
    await connection.connect()
    connection.on_action(lambda action: got.append(listed(action)))
    await connection.start_episode({})
    async with connection.listening():
        for _ in range(int(count)):
            await connection.send_observation(observation("slow 50"))
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        for _ in range(200):  # on a busy machine, what is still on its way
            if len(got) > 10:
                break
            await asyncio.sleep(0.1)
    await connection.close()
    return got


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    print(json.dumps(asyncio.run(globals()[scenario](*arguments))))
