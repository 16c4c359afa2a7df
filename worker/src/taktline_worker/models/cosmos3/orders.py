"""What rank 0 of a Cosmos3 mesh tells the others: a batch that all of them solve, or that the group ends."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from taktline_worker.models.cosmos3.runner import Inputs
from taktline_worker.planning.mesh import Mesh as Control
from taktline_worker.planning.mesh import hear, tell


class _Head(msgspec.Struct, frozen=True):
    """One tensor that follows, fp32."""

    name: str
    shape: tuple[int, ...]


class _Order(msgspec.Struct, frozen=True):
    """A batch that every rank solves; without rows it is the end.

    Attributes:
        imagined: rows whose video is decoded after it.
    """

    conditional: tuple[tuple[int, ...], ...] = ()
    unconditional: tuple[tuple[int, ...], ...] = ()
    imagine: bool = False
    imagined: tuple[int, ...] = ()
    tensors: tuple[_Head, ...] = ()


def tensors_of(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors of a batch by name, those that it has."""
    named = {"clean": inputs.clean, "state": inputs.state, "video": inputs.video, "actions": inputs.actions}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def send(control: Control, inputs: Inputs, imagined: tuple[int, ...]) -> None:
    """From rank 0: the others solve `inputs`, fp32, and then decode the video of the rows `imagined`."""
    named = tensors_of(inputs)
    heads = tuple(_Head(name, tuple(tensor.shape)) for name, tensor in named.items())
    tell(control, _Order(inputs.conditional, inputs.unconditional, inputs.imagine, imagined, heads))
    for tensor in named.values():
        control.send(tensor)


def receive(control: Control, device: torch.device) -> tuple[Inputs, tuple[int, ...]] | None:
    """On the other ranks: what `send` was given, its tensors on `device`; None after `dismiss`."""
    order = hear(control, _Order)
    if not order.conditional:
        return None
    got = {head.name: control.send(torch.empty(head.shape, device=device)) for head in order.tensors}
    inputs = Inputs(
        conditional=order.conditional,
        unconditional=order.unconditional,
        clean=got["clean"],
        state=got.get("state"),
        video=got["video"],
        actions=got["actions"],
        imagine=order.imagine,
    )
    return inputs, order.imagined


def dismiss(control: Control) -> None:
    """From rank 0: lets the others return."""
    tell(control, _Order())
