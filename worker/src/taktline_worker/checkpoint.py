"""Reading a checkpoint folder: tensors, JSON files and digests, with every failure a typed refusal."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from taktline_protocol import ErrorCode, TaktlineError

SIDECAR_FILE = "taktline.json"
_HASH_BLOCK = 1 << 22
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HEADER_LIMIT = 100_000_000

SidecarT = TypeVar("SidecarT", bound=msgspec.Struct)

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def refuse(message: str, next_step: str) -> TaktlineError:
    """The error of a checkpoint that cannot be served as it is."""
    return TaktlineError(ErrorCode.CHECKPOINT_INVALID, message, next_step)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where the file is absent, is no JSON, or holds no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise refuse(f"{path} does not exist", f"add {path.name} to the checkpoint folder") from None
    except (UnicodeDecodeError, json.JSONDecodeError, OSError) as error:
        raise refuse(f"{path} cannot be read as JSON: {error}", f"replace {path.name} by an intact copy") from error
    if not isinstance(value, dict):
        raise refuse(f"{path} holds no JSON object", f"replace {path.name} by an intact copy")
    return value


def read_sidecar(folder: Path, kind: type[SidecarT], page: str) -> SidecarT:
    """The folder's `taktline.json` as `kind`, an empty one where there is none; `page` documents its fields.

    Raises:
        TaktlineError: CONFIG_INVALID where the file is there and does not fit.
    """
    path = folder / SIDECAR_FILE
    if not path.is_file():
        return kind()
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, f"{path} does not fit: {error}", f"see {page} for its fields"
        ) from error


def file_sha256(path: Path) -> str:
    """Hex SHA-256 digest of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def verify_digests(folder: Path, expected: Mapping[str, str]) -> None:
    """Compares files of `folder` with their expected hex SHA-256 digests.

    Raises:
        TaktlineError: CHECKPOINT_INVALID naming the first file that is absent, outside the folder, or different.
    """
    for name, digest in expected.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise refuse(f"sha256 names {name!r}, which lies outside {folder}", "name files inside the folder")
        if not path.is_file():
            raise refuse(f"sha256 names {name!r}, which is not in {folder}", "correct the name or add the file")
        actual = file_sha256(path)
        if actual != digest.lower():
            raise refuse(
                f"{path} has sha256 {actual}, expected {digest}",
                "fetch the checkpoint again, or correct model.sha256 if the new file is intended",
            )


class TensorFiles:
    """The tensors of one folder, in one safetensors file or several listed by an index; read lazily.

    Args:
        stem: how the file is called without its endings; diffusers writes `diffusion_pytorch_model`.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where a file is absent, corrupt, or a name occurs twice.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.paths = _weight_paths(folder, f"{stem}.safetensors", f"{stem}.safetensors.index.json")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._file_of: dict[str, Path] = {}
        for path in self.paths:
            for name, (shape, dtype) in _read_header(path).items():
                if name in self._file_of:
                    raise refuse(
                        f"tensor {name!r} is in {self._file_of[name]} and in {path}", "remove one of the files"
                    )
                self.shapes[name] = shape
                self.dtypes[name] = dtype
                self._file_of[name] = path

    def read(self, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (new name, tensor) for each `names` entry (stored name -> new name), file by file, on the CPU.

        Raises:
            TaktlineError: CHECKPOINT_INVALID where a tensor cannot be read or holds NaN or infinity.
        """
        for path in self.paths:
            wanted = [name for name in names if self._file_of[name] == path]
            if not wanted:
                continue
            try:
                with safe_open(path, framework="pt", device="cpu") as stream:
                    for name in wanted:
                        tensor = stream.get_tensor(name)
                        if not bool(torch.isfinite(tensor).all()):
                            raise refuse(
                                f"tensor {name!r} in {path} holds NaN or infinity",
                                "the training run diverged or the file is damaged: use another checkpoint",
                            )
                        yield names[name], tensor
            except SafetensorError as error:
                raise corrupt(path, str(error)) from error


def read_small_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a small safetensors file, such as normalisation statistics.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where the file is absent or corrupt.
    """
    if not path.is_file():
        raise refuse(f"statistics file {path} does not exist", "copy it from the training run's checkpoint")
    _read_header(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as stream:
            return {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise corrupt(path, str(error)) from error


def _weight_paths(folder: Path, file: str, index: str) -> list[Path]:
    advice = f"set model.source to the folder that holds {file}"
    if file != "model.safetensors":  # diffusers' files lie in folders of the checkpoint
        advice = f"complete the checkpoint: {file}, or the parts that an index lists, belongs into {folder.name}/"
    if not folder.is_dir():
        raise refuse(f"{folder} is no folder", advice)
    single = folder / file
    if single.is_file():
        return [single]
    if (folder / index).is_file():
        names = sorted(set(read_json(folder / index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise refuse(f"{folder / index} lists files that are absent: {missing}", "complete the checkpoint")
        return [folder / name for name in names]
    raise refuse(f"{folder} holds no {file}", advice)


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, dtype) from a safetensors header, checked against the file's length."""
    size = path.stat().st_size
    if size < 8:
        raise corrupt(path, f"it has {size} bytes")
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, _HEADER_LIMIT):
                raise corrupt(path, f"its header claims {length} bytes")
            header = json.loads(stream.read(length))
        entries = {name: value for name, value in header.items() if name != "__metadata__"}
        end = max((value["data_offsets"][1] for value in entries.values()), default=0)
        if end + 8 + length != size:
            raise corrupt(path, f"it has {size} bytes, its header describes {end + 8 + length}")
        found = {}
        for name, value in entries.items():
            if value["dtype"] not in _DTYPES:
                raise refuse(
                    f"tensor {name!r} in {path} has dtype {value['dtype']}",
                    f"store weights as one of {', '.join(_DTYPES)}",
                )
            found[name] = (tuple(int(n) for n in value["shape"]), _DTYPES[value["dtype"]])
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise corrupt(path, f"unreadable header ({type(error).__name__})") from error
    return found


def corrupt(path: Path, reason: str) -> TaktlineError:
    """The refusal of a file of weights that is damaged, or that was never fetched."""
    with path.open("rb") as stream:
        start = stream.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        return refuse(
            f"{path} is a pointer of git-lfs: the weights themselves were not fetched",
            f"run `git lfs pull` in {path.parent}",
        )
    return refuse(f"{path} is no intact safetensors file: {reason}", "fetch the file again")
