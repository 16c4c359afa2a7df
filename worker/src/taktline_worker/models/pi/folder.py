"""A π0 or π0.5 checkpoint folder, opened and checked without reading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from taktline_worker.checkpoint import TensorFiles, read_json, read_sidecar, refuse
from taktline_worker.models.pi import lerobot, openpi
from taktline_worker.models.pi.config import (
    ArchitectureHints,
    Family,
    Layout,
    PiArchitecture,
    PiConventions,
    read_architecture,
)
from taktline_worker.models.pi.keys import canonical_names, family_of
from taktline_worker.models.pi.sidecar import Sidecar
from taktline_worker.models.pi.tokenizer import Tokenizer, load_tokenizer

# Pieces that a tokenizer may have beyond the embedding: image and location markers that no prompt encodes to.
_SPARE_PIECES = 64


@dataclass(frozen=True, slots=True)
class PiFolder:
    """What a folder says, every contradiction already refused.

    Attributes:
        names: stored tensor name -> canonical name, for the tensors that inference reads.
    """

    path: Path
    layout: Layout
    architecture: PiArchitecture
    conventions: PiConventions
    tokenizer: Tokenizer
    sidecar: Sidecar
    files: TensorFiles
    names: dict[str, str]

    @property
    def family(self) -> Family:
        """`pi0` or `pi05`."""
        return self.architecture.family


def detect_layout(path: Path) -> Layout:
    """LeRobot's or openpi's folder layout, told apart by files that only one of them has.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where the folder looks like neither.
    """
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if "type" in config or (path / "policy_preprocessor.json").is_file():
        return "lerobot"
    if (path / "assets").is_dir() or (path / openpi.STATISTICS_FILE).is_file():
        return "openpi"
    raise refuse(
        f"{path} has neither LeRobot's config.json with a type nor openpi's assets/<asset>/{openpi.STATISTICS_FILE}",
        "normalisation statistics belong to a checkpoint: copy the whole folder",
    )


def open_folder(path: Path, statistics: str = "") -> PiFolder:
    """Reads everything but the weights.

    Args:
        statistics: openpi asset id; LeRobot folders have one set and refuse a name.

    Raises:
        TaktlineError: CHECKPOINT_INVALID or CONFIG_INVALID with the reason and the next step.
    """
    sidecar = read_sidecar(path, Sidecar, "docs/checkpoints.md")
    files = TensorFiles(path)
    names = canonical_names(files.shapes)
    shapes = {target: files.shapes[stored] for stored, target in names.items()}
    family: Family = "pi05" if family_of(shapes) == "pi05" else "pi0"
    hints = ArchitectureHints(
        vision_heads=sidecar.architecture.vision_heads,
        head_dim=sidecar.architecture.head_dim,
        heads=sidecar.architecture.heads,
    )
    architecture = read_architecture(family, shapes, hints)
    layout = detect_layout(path)
    tokenizer_name = ""
    if layout == "lerobot":
        if statistics:
            raise refuse(f"model.statistics names {statistics!r}, LeRobot folders hold one set", "remove the name")
        conventions, tokenizer_name = lerobot.read_conventions(path, family, architecture, sidecar)
    else:
        conventions = openpi.read_conventions(path, family, architecture, sidecar, statistics)
    tokenizer = load_tokenizer(path, tokenizer_name, prefer_json=layout == "lerobot")
    if tokenizer.pieces > architecture.vocabulary + _SPARE_PIECES:
        raise refuse(
            f"{tokenizer.path} has {tokenizer.pieces} pieces, the embedding {architecture.vocabulary} rows",
            "use the tokenizer that the checkpoint was trained with",
        )
    return PiFolder(path, layout, architecture, conventions, tokenizer, sidecar, files, names)
