"""One Cosmos3 policy on one process or on a mesh of them: what rank 0 sends, what the others do with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor

from taktline_worker.models.cosmos3 import mesh as policy_mesh
from taktline_worker.models.cosmos3 import vae, video
from taktline_worker.models.cosmos3.graphs import GraphRunner
from taktline_worker.models.cosmos3.orders import receive, send, tensors_of
from taktline_worker.models.cosmos3.ranks import Member, PolicyRanks
from taktline_worker.models.cosmos3.request import PolicyOutcome, PolicyRequest
from taktline_worker.models.cosmos3.runner import Inputs
from taktline_worker.models.cosmos3.vae_tiles import decode_tiled, gather_to_first, grid_of
from taktline_worker.models.cosmos3.vae_weights import VaeWeights
from taktline_worker.planning.mesh import Mesh as Control

RETRY_MS = 5_000.0
"""When a robot whose request was lost with a rank may try again: a group takes longer to load, another worker less."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A row's outcome, and its frames uint8 (T, H, W, 3) where they were asked for."""

    outcome: PolicyOutcome
    frames: NDArray[np.uint8] | None = None


class PolicyGroup:
    """Runs batches on all ranks; this process is rank 0.

    Args:
        member: makes this rank's runner for a mesh.
        decoder: the VAE with its decoder; None where no video is served.
        ranks: the other processes; None = there are none.
    """

    def __init__(self, member: Member, decoder: VaeWeights | None, ranks: PolicyRanks | None = None) -> None:
        self._member = member
        self._decoder = decoder
        self.ranks = ranks
        self._control: Control | None = None
        self.runner: GraphRunner = member(policy_mesh.OneRank() if ranks is None else ranks.joined.mesh)
        if ranks is not None:
            self._control = ranks.joined.control

    def run(self, requests: Sequence[PolicyRequest]) -> list[Solved]:
        """Outcomes of a batch.

        Raises:
            TaktlineError: WORKER_UNAVAILABLE while a lost group loads again, WORKER_FAILED where this batch lost it.
        """
        if self.ranks is None:
            return self._run(requests)
        self._follow_group(self.ranks)
        try:
            found = self._run(requests)
            if self.ranks.sound():
                return found
            cause = "a rank ended during the request"
        except RuntimeError as error:  # what torch.distributed raises for a closed connection or a timeout
            if self.ranks.sound() and not _is_of_the_mesh(error):
                raise
            cause = str(error)[:300]
        self.ranks.lost()
        self._control = None
        raise TaktlineError(
            ErrorCode.WORKER_FAILED,
            f"a rank of the policy was lost while this request was computed: {cause}",
            "send a new observation; the group is being started again",
            retry_after_ms=RETRY_MS,
        )

    def close(self) -> None:
        """Lets the other ranks go."""
        if self.ranks is not None:
            self.ranks.close()

    def _follow_group(self, ranks: PolicyRanks) -> None:
        """Takes over a group that was started again, with a runner of its own: the old one's mesh is gone."""
        joined = ranks.take()
        if joined is None:
            raise TaktlineError(
                ErrorCode.WORKER_UNAVAILABLE,
                "a rank of the policy was lost, and a new group of ranks is being loaded",
                "send the observation to another worker, or again when the group is back",
                retry_after_ms=RETRY_MS,
            )
        if joined.control is not self._control:
            self.runner = self._member(joined.mesh)
            self._control = joined.control

    def _run(self, requests: Sequence[PolicyRequest]) -> list[Solved]:
        inputs = _on(self.runner.device, self.runner.prepare(requests))
        imagined = tuple(row for row, request in enumerate(requests) if request.imagine)
        if self._control is not None:
            send(self._control, inputs, imagined)
        result = self.runner.solve(inputs)
        outcomes = self.runner.outcomes(requests, inputs, result)
        frames = _decode(self.runner, self._decoder, inputs, result, imagined)
        return [Solved(outcome, frames.get(row)) for row, outcome in enumerate(outcomes)]


def follow(runner: GraphRunner, decoder: VaeWeights | None, control: Control) -> None:
    """Runs on every rank but 0: solves as ordered, returns on `orders.dismiss`."""
    while (order := receive(control, runner.device)) is not None:
        inputs, imagined = order
        _decode(runner, decoder, inputs, runner.solve(inputs), imagined)


def _is_of_the_mesh(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it, rather than the network's own computation."""
    return isinstance(error, torch.distributed.DistError) or any(
        word in str(error).lower() for word in ("gloo", "nccl", "connection", "process group", "peer")
    )


def _on(device: torch.device, inputs: Inputs) -> Inputs:
    """The same with fp32 tensors on `device`, as all ranks take them."""
    moved = {name: tensor.to(device, torch.float32).contiguous() for name, tensor in tensors_of(inputs).items()}
    return Inputs(
        conditional=inputs.conditional,
        unconditional=inputs.unconditional,
        clean=moved["clean"],
        state=moved.get("state"),
        video=moved["video"],
        actions=moved["actions"],
        imagine=inputs.imagine,
    )


def _decode(
    runner: GraphRunner, decoder: VaeWeights | None, inputs: Inputs, result: Tensor, rows: tuple[int, ...]
) -> dict[int, NDArray[np.uint8]]:
    """Frames by row on rank 0; the other ranks decode their tiles and get none."""
    if decoder is None or not rows:
        return {}
    place = runner.mesh.place
    size = place.branches * place.ranks
    height, width = inputs.clean.shape[-2:]
    down, across = grid_of(size)
    found: dict[int, NDArray[np.uint8]] = {}
    futures, _ = runner.unpack(result)
    for row in rows:
        latents = torch.cat((inputs.clean[row, :, None].to(futures), futures[row]), dim=1)[None]
        frames: Tensor | None
        if size > 1 and down <= height and across <= width:
            frames = decode_tiled(decoder, latents, place.rank, size, gather_to_first())
        else:
            frames = vae.decode(decoder, latents) if place.rank == 0 else None
        if frames is not None:
            found[row] = video.to_pixels(frames[0])
    return found
