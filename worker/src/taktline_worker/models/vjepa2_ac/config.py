"""What a V-JEPA 2-AC checkpoint is: its architecture, read from tensor shapes, and the sidecar that states the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from taktline_worker.checkpoint import refuse
from taktline_worker.shapes import Shapes, count_layers, linear, norm, shown

# Facts of the published model that no tensor shape tells.
BLOCK_NORM_EPS = 1e-6
LATENT_NORM_EPS = 1e-5
ACTION_WIDTH = 7
POSE_WIDTH = 7
TUBELET = 2
PUBLISHED_IMAGE_SIZE = 256
PUBLISHED_CONTROL_PERIOD_S = 0.25
"""DROID at 4 frames a second, the rate at which the predictor was trained."""
PUBLISHED_HEADS = {1408: 22, 1024: 16}
"""Width of a published tower -> its heads."""


class SidecarArchitecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What tensor shapes leave open; needed for towers of other widths than the published ones."""

    image_size: int = PUBLISHED_IMAGE_SIZE
    encoder_heads: int | None = None
    predictor_heads: int | None = None


class Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`taktline.json` of a planner's folder; every field may be left out.

    Attributes:
        description: one sentence, for people.
        control_period_ms: time between two planned actions; EngineOptions.control_period_ms overrides it.
    """

    description: str = ""
    control_period_ms: float | None = None
    architecture: SidecarArchitecture = SidecarArchitecture()


@dataclass(frozen=True, slots=True)
class VJepa2Architecture:
    """Every dimension of both towers."""

    image_size: int
    patch_size: int
    encoder_width: int
    encoder_depth: int
    encoder_heads: int
    encoder_mlp: int
    width: int
    depth: int
    heads: int
    mlp: int

    @property
    def grid(self) -> int:
        """Patches along one side of a frame."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Patches of one frame."""
        return self.grid**2

    @property
    def frame_tokens(self) -> int:
        """Tokens of one frame in the predictor: action, state, patches."""
        return self.tokens + 2

    @property
    def head_dim(self) -> int:
        """Width of one predictor head."""
        return self.width // self.heads

    @property
    def encoder_head_dim(self) -> int:
        """Width of one encoder head."""
        return self.encoder_width // self.encoder_heads


def read_architecture(encoder: Shapes, predictor: Shapes, stated: SidecarArchitecture) -> VJepa2Architecture:
    """The architecture that the shapes of both towers describe (canonical names), every one of them checked.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where a tensor is missing, superfluous or misshapen, where the heads are
            neither published nor stated, or where the stated image size is no multiple of the patch.
    """
    try:
        encoder_width, _, _, patch, _ = encoder["patch_embed.proj.weight"]
        width = predictor["predictor_embed.weight"][0]
        architecture = VJepa2Architecture(
            image_size=stated.image_size,
            patch_size=patch,
            encoder_width=encoder_width,
            encoder_depth=count_layers(encoder, "blocks."),
            encoder_heads=_heads("encoder_heads", encoder_width, stated.encoder_heads),
            encoder_mlp=encoder["blocks.0.mlp.fc1.weight"][0],
            width=width,
            depth=count_layers(predictor, "predictor_blocks."),
            heads=_heads("predictor_heads", width, stated.predictor_heads),
            mlp=predictor["predictor_blocks.0.mlp.fc1.weight"][0],
        )
    except (KeyError, IndexError, ValueError) as error:
        raise refuse(f"a tensor is missing or misshapen: {error}", "use a complete V-JEPA 2-AC checkpoint") from error
    if architecture.image_size < patch or architecture.image_size % patch:
        raise refuse(
            f"image_size {architecture.image_size} is no multiple of the patch of {patch} pixels",
            "correct architecture.image_size in taktline.json",
        )
    _check("encoder", encoder, expected_encoder_shapes(architecture))
    _check("predictor", predictor, expected_predictor_shapes(architecture))
    return architecture


def expected_encoder_shapes(a: VJepa2Architecture) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every encoder tensor."""
    shapes = norm("norm", a.encoder_width)
    shapes["patch_embed.proj.weight"] = (a.encoder_width, 3, TUBELET, a.patch_size, a.patch_size)
    shapes["patch_embed.proj.bias"] = (a.encoder_width,)
    for index in range(a.encoder_depth):
        shapes |= _block(f"blocks.{index}", a.encoder_width, a.encoder_mlp)
    return shapes


def expected_predictor_shapes(a: VJepa2Architecture) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every predictor tensor; the extrinsics encoder is stored and never used."""
    shapes = norm("predictor_norm", a.width)
    for name, rows, columns in (
        ("predictor_embed", a.width, a.encoder_width),
        ("predictor_proj", a.encoder_width, a.width),
        ("action_encoder", a.width, ACTION_WIDTH),
        ("state_encoder", a.width, POSE_WIDTH),
        ("extrinsics_encoder", a.width, POSE_WIDTH - 1),
    ):
        shapes |= linear(name, rows, columns)
    for index in range(a.depth):
        shapes |= _block(f"predictor_blocks.{index}", a.width, a.mlp)
    return shapes


def _block(prefix: str, width: int, mlp: int) -> dict[str, tuple[int, ...]]:
    return (
        norm(f"{prefix}.norm1", width)
        | linear(f"{prefix}.attn.qkv", 3 * width, width)
        | linear(f"{prefix}.attn.proj", width, width)
        | norm(f"{prefix}.norm2", width)
        | linear(f"{prefix}.mlp.fc1", mlp, width)
        | linear(f"{prefix}.mlp.fc2", width, mlp)
    )


def _heads(name: str, width: int, stated: int | None) -> int:
    heads = PUBLISHED_HEADS.get(width) if stated is None else stated
    if heads is None:
        raise refuse(
            f"a tower of width {width} is none of the published ones, and nothing states its heads",
            f"state architecture.{name} in taktline.json",
        )
    if heads < 1 or width % heads:
        raise refuse(f"{heads} heads do not divide the width {width}", f"correct architecture.{name} in taktline.json")
    return heads


def _check(tower: str, shapes: Shapes, expected: Shapes) -> None:
    missing = sorted(expected.keys() - shapes.keys())
    superfluous = sorted(shapes.keys() - expected.keys())
    if missing or superfluous:
        raise refuse(
            f"the {tower} lacks {shown(missing)} and has the unknown {shown(superfluous)}",
            "use a complete V-JEPA 2-AC checkpoint",
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise refuse(
                f"{tower} tensor {name!r} has shape {tuple(shapes[name])}, expected {shape}"
                f" ({math.prod(shape)} numbers)",
                "use a checkpoint of one training run, unmixed",
            )
