"""Reading a V-JEPA 2-AC file (torch or safetensors, either key prefix) and packing it for inference."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from taktline_worker.checkpoint import corrupt, refuse
from taktline_worker.models.vjepa2_ac.config import SidecarArchitecture, VJepa2Architecture, read_architecture

_PREFIXES = ("module.", "backbone.")
_SUFFIXES = (".pt", ".pth", ".pth.tar", ".safetensors")
_DROPPED = {"pos_embed"}
"""Entries of an encoder with rotary positions that nothing reads."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Storage and matmul dtype of each part.

    Attributes:
        encoder: runs on two frames a plan, a thousandth of the work.
        predictor: its matrix products and the cached keys and values.
        residual: the stream between the predictor's blocks.
    """

    encoder: torch.dtype
    predictor: torch.dtype
    residual: torch.dtype


FP32 = Precision(torch.float32, torch.float32, torch.float32)
BF16 = Precision(torch.float32, torch.bfloat16, torch.float32)
"""Rounded matrix products, exact everything else: late rounds must rank energies that lie close together."""
FP64 = Precision(torch.float64, torch.float64, torch.float64)
"""For checking the others; never served."""


@dataclass(frozen=True, slots=True)
class Block:
    """One pre-norm transformer block of width W and MLP width F; norms are in the residual's or a wider dtype."""

    norm1_weight: Tensor  # (W,)
    norm1_bias: Tensor
    qkv_weight: Tensor  # (3W, W): query, key, value rows, each head-major
    qkv_bias: Tensor
    out_weight: Tensor  # (W, W)
    out_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    fc1_weight: Tensor  # (F, W)
    fc1_bias: Tensor
    fc2_weight: Tensor  # (W, F)
    fc2_bias: Tensor


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """The image encoder. Both temporal taps of the patch see the same frame, so they are stored as their sum."""

    patch_weight: Tensor  # (W, 3 * patch * patch), columns in (channel, row, column) order
    patch_bias: Tensor
    blocks: tuple[Block, ...]
    norm_weight: Tensor
    norm_bias: Tensor


@dataclass(frozen=True, slots=True)
class PredictorWeights:
    """The action-conditioned predictor. Poses are absolute metres, so their embedding is never rounded to bf16."""

    embed_weight: Tensor  # (W, D)
    embed_bias: Tensor
    action_weight: Tensor  # (W, 7) fp32
    action_bias: Tensor
    state_weight: Tensor  # (W, 7) fp32
    state_bias: Tensor
    blocks: tuple[Block, ...]
    norm_weight: Tensor
    norm_bias: Tensor
    out_weight: Tensor  # (D, W)
    out_bias: Tensor


@dataclass(frozen=True, slots=True)
class VJepa2Weights:
    """All that planning reads, on one device."""

    encoder: EncoderWeights
    predictor: PredictorWeights
    precision: Precision


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """The two towers of one file under canonical names; tensors may still lie in a mapped file."""

    path: Path
    encoder: Mapping[str, Tensor]
    predictor: Mapping[str, Tensor]
    architecture: VJepa2Architecture


def find_file(folder: Path) -> Path:
    """The one weights file of `folder`.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where there is none or more than one.
    """
    if not folder.is_dir():
        raise refuse(f"{folder} is no folder", "set model.source to the folder that holds the checkpoint file")
    found = sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(_SUFFIXES))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise refuse(
            f"{folder} must hold one checkpoint file ({', '.join(_SUFFIXES)}), it holds {names}",
            "leave one file in the folder, e.g. vjepa2-ac-vitg.pt",
        )
    return found[0]


def open_checkpoint(path: Path, stated: SidecarArchitecture) -> CheckpointFile:
    """Reads the towers of a published or trainer's file; other entries (optimiser, target encoder) are left alone.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where the file is corrupt, is not such a checkpoint, or does not fit.
    """
    towers = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    encoder = {name: tensor for name, tensor in _cleaned(path, towers["encoder"]) if name not in _DROPPED}
    predictor = dict(_cleaned(path, towers["predictor"]))
    architecture = read_architecture(_shapes(encoder), _shapes(predictor), stated)
    for tower in (encoder, predictor):
        for name, tensor in tower.items():
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                raise refuse(
                    f"tensor {name!r} in {path} holds NaN, infinity or no floating-point numbers",
                    "the training run diverged or the file is damaged: use another checkpoint",
                )
    return CheckpointFile(path, encoder, predictor, architecture)


def pack_weights(checkpoint: CheckpointFile, precision: Precision, device: torch.device) -> VJepa2Weights:
    """Copies the weights to `device` in the layout of `modules`; nothing refers to the file afterwards."""
    encoder, predictor = checkpoint.encoder, checkpoint.predictor
    tap_sum = encoder["patch_embed.proj.weight"].to(_wide(precision.encoder)).sum(dim=2).flatten(1)

    def of_encoder(tensor: Tensor) -> Tensor:
        return _place(tensor, precision.encoder, device)

    def of_predictor(tensor: Tensor) -> Tensor:
        return _place(tensor, precision.predictor, device)

    def exact(tensor: Tensor) -> Tensor:
        return _place(tensor, _wide(precision.predictor), device)

    a = checkpoint.architecture
    return VJepa2Weights(
        encoder=EncoderWeights(
            patch_weight=of_encoder(tap_sum),
            patch_bias=of_encoder(encoder["patch_embed.proj.bias"]),
            blocks=tuple(
                _block(encoder, f"blocks.{index}", precision.encoder, device) for index in range(a.encoder_depth)
            ),
            norm_weight=_place(encoder["norm.weight"], _wide(precision.encoder), device),
            norm_bias=_place(encoder["norm.bias"], _wide(precision.encoder), device),
        ),
        predictor=PredictorWeights(
            embed_weight=of_predictor(predictor["predictor_embed.weight"]),
            embed_bias=of_predictor(predictor["predictor_embed.bias"]),
            action_weight=exact(predictor["action_encoder.weight"]),
            action_bias=exact(predictor["action_encoder.bias"]),
            state_weight=exact(predictor["state_encoder.weight"]),
            state_bias=exact(predictor["state_encoder.bias"]),
            blocks=tuple(
                _block(predictor, f"predictor_blocks.{index}", precision.predictor, device) for index in range(a.depth)
            ),
            norm_weight=exact(predictor["predictor_norm.weight"]),
            norm_bias=exact(predictor["predictor_norm.bias"]),
            out_weight=of_predictor(predictor["predictor_proj.weight"]),
            out_bias=of_predictor(predictor["predictor_proj.bias"]),
        ),
        precision=precision,
    )


def _block(tower: Mapping[str, Tensor], prefix: str, dtype: torch.dtype, device: torch.device) -> Block:
    def norm(name: str) -> Tensor:
        return _place(tower[f"{prefix}.{name}"], _wide(dtype), device)

    def matrix(name: str) -> Tensor:
        return _place(tower[f"{prefix}.{name}"], dtype, device)

    return Block(
        norm1_weight=norm("norm1.weight"),
        norm1_bias=norm("norm1.bias"),
        qkv_weight=matrix("attn.qkv.weight"),
        qkv_bias=matrix("attn.qkv.bias"),
        out_weight=matrix("attn.proj.weight"),
        out_bias=matrix("attn.proj.bias"),
        norm2_weight=norm("norm2.weight"),
        norm2_bias=norm("norm2.bias"),
        fc1_weight=matrix("mlp.fc1.weight"),
        fc1_bias=matrix("mlp.fc1.bias"),
        fc2_weight=matrix("mlp.fc2.weight"),
        fc2_bias=matrix("mlp.fc2.bias"),
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _place(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A copy even where nothing changes: tensors of a mapped file are unaligned, and kernels round by alignment.
    return tensor.to(device=device, dtype=dtype, copy=True).contiguous()


def _shapes(tower: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tower.items()}


def _cleaned(path: Path, tower: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    seen: set[str] = set()
    for stored, tensor in tower.items():
        name = stored
        for prefix in _PREFIXES:
            name = name.replace(prefix, "")
        if name in seen:
            raise refuse(f"{path} holds {name!r} under two prefixes", "save one copy of each tensor")
        seen.add(name)
        yield name, tensor


def _read_torch(path: Path) -> dict[str, Mapping[str, Tensor]]:
    try:
        # Files of the old, unzipped format cannot be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refuse(
            f"{path} cannot be read as tensors only: {reason}",
            "fetch the file again; a file with other Python objects is not opened, re-save its tensors",
        ) from error
    towers = {name: content.get(name) for name in ("encoder", "predictor")} if isinstance(content, dict) else {}
    for name in ("encoder", "predictor"):
        tower = towers.get(name)
        if not isinstance(tower, dict) or not all(isinstance(value, Tensor) for value in tower.values()):
            raise refuse(f"{path} has no entry {name!r} of tensors", "use an action-conditioned V-JEPA 2 checkpoint")
    return {name: tower for name, tower in towers.items() if tower is not None}


def _read_safetensors(path: Path) -> dict[str, Mapping[str, Tensor]]:
    towers: dict[str, dict[str, Tensor]] = {"encoder": {}, "predictor": {}}
    try:
        with safe_open(path, framework="pt", device="cpu") as stream:
            for stored in stream.keys():  # noqa: SIM118 (no mapping)
                tower, _, name = stored.partition(".")
                if tower in towers:
                    towers[tower][name] = stream.get_tensor(stored)
    except SafetensorError as error:
        raise corrupt(path, str(error)) from error
    except OSError as error:
        raise refuse(f"{path} cannot be read: {error}", "let the worker read it") from error
    return dict(towers)
