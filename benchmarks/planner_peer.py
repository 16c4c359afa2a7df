"""What a round takes by a straightforward PyTorch statement of the official algorithm, beside our own."""

from __future__ import annotations

import time
from typing import Any

import torch
from engine import say
from plain_vjepa2 import PlainPredictor, score
from planner_agreement import agreement
from planner_search import SETTINGS
from taktline_worker.models.vjepa2_ac.weights import CheckpointFile
from taktline_worker.planning.world import Scene
from torch import Tensor


class Peer:
    """The plain statement of one checkpoint, timed over a round of all candidates of one plan."""

    def __init__(self, checkpoint: CheckpointFile, scene: Scene, actions: Tensor) -> None:
        self._model = PlainPredictor(checkpoint.architecture, checkpoint.predictor, SETTINGS.horizon)
        self._scene, self._actions = scene, actions

    def rounds(self) -> dict[str, float]:
        """Seconds of a round in each precision."""
        found = {"fp32": self._timed("fp32")}
        torch.backends.cuda.matmul.allow_tf32 = True
        found["tf32"] = self._timed("tf32")
        torch.backends.cuda.matmul.allow_tf32 = False
        with torch.autocast("cuda", torch.bfloat16):
            found["bf16"] = self._timed("bf16 autocast")
        return found

    def agreement(self, sets: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Any]:
        """How its energies under bf16 autocast rank the candidates of each set, beside ours in fp32."""
        with torch.autocast("cuda", torch.bfloat16):
            return agreement({name: self._run(actions) for name, actions in sets.items()}, exact)

    def compiled_round(self) -> dict[str, float]:
        """Seconds of a round in bf16 with the blocks through torch.compile; they stay so."""
        for block in self._model.blocks:
            block.compile(dynamic=False)
        with torch.autocast("cuda", torch.bfloat16):
            self._run(self._actions)  # compiles for the shapes that are timed
            return {"bf16 compiled": self._timed("bf16 compiled", warm_up=False)}

    def _timed(self, name: str, warm_up: bool = True) -> float:
        if warm_up:
            self._run(self._actions[:16])  # kernels load
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._run(self._actions)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        say(f"peer {name}: {seconds:.2f} s a round")
        return seconds

    def _run(self, actions: Tensor) -> Tensor:
        return score(self._model, self._scene.latent, self._scene.goal, self._scene.pose, actions)
