"""What a round takes by a straightforward PyTorch statement of the official algorithm, beside our own."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from engine import say
from planner_search import SETTINGS
from taktline_worker.models.vjepa2_ac.weights import CheckpointFile
from taktline_worker.planning.world import Scene
from torch import Tensor


def peer_rounds(checkpoint: CheckpointFile, scene: Scene, actions: Tensor, compiled: bool) -> dict[str, float]:
    """Seconds of one round of all candidates by the plain statement, in each precision."""
    from plain_vjepa2 import PlainPredictor, score

    model = PlainPredictor(checkpoint.architecture, checkpoint.predictor, SETTINGS.horizon)

    def timed(call: Callable[[], object]) -> float:
        score(model, scene.latent, scene.goal, scene.pose, actions[:16])  # kernels load
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def run() -> object:
        return score(model, scene.latent, scene.goal, scene.pose, actions)

    found = {}
    found["fp32"] = timed(run)
    say(f"peer fp32: {found['fp32']:.2f} s a round")
    torch.backends.cuda.matmul.allow_tf32 = True
    found["tf32"] = timed(run)
    torch.backends.cuda.matmul.allow_tf32 = False
    say(f"peer tf32: {found['tf32']:.2f} s a round")
    with torch.autocast("cuda", torch.bfloat16):
        found["bf16"] = timed(run)
        say(f"peer bf16 autocast: {found['bf16']:.2f} s a round")
        if compiled:
            for block in model.blocks:
                block.compile(dynamic=False)
            run()
            found["bf16 compiled"] = timed(run)
            say(f"peer bf16 compiled: {found['bf16 compiled']:.2f} s a round")
    return found
