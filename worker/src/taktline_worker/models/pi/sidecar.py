"""`taktline.json`: the optional file in a checkpoint folder that states what the published formats cannot say."""

from __future__ import annotations

import msgspec
from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.checkpoint import SIDECAR_FILE
from taktline_worker.models.pi.normalise import Mode


class SidecarArchitecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dimensions that tensor shapes leave open; each is checked against the shapes where they tell.

    Attributes:
        vision_heads: needed unless the vision tower is SigLIP So400m (width 1152, 16 heads).
        heads: query heads of both language towers.
        head_dim: size of one of them.
    """

    vision_heads: int | None = None
    heads: int | None = None
    head_dim: int | None = None


class Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every field may be left out.

    Attributes:
        description: one sentence, shown by `taktline checkpoint inspect`.
        control_period_ms: time between two action rows; EngineOptions.control_period_ms overrides it.
        preset: a published openpi configuration by name; only for openpi folders.
        optional_cameras: checkpoint keys that may be absent from an observation and are then masked.
        state_prompt_width: 32 for π0.5 checkpoints trained with LeRobot up to v0.4.4, which zero-padded the state
            before writing it into the prompt.
        legacy_letterbox: true for the letterbox of LeRobot up to v0.4.4; square cameras do not care.
        truncate_prompt: cut prompts over the token budget as the training codes do, instead of refusing them.
        allow_missing_statistics: serve a checkpoint without statistics in the model's own units.
        ignore_config_fields: fields of config.json that this release does not know and that do not matter.

        The rest describes openpi folders without a preset, or overrides one field of a preset:
        action_horizon, prompt_tokens, state_in_prompt, normalisation, state_dim, action_dim, relative_mask,
        adapt_to_pi, cameras (robot name -> slot; slots not named are masked).
    """

    description: str = ""
    control_period_ms: float | None = None
    architecture: SidecarArchitecture = SidecarArchitecture()
    preset: str | None = None
    optional_cameras: tuple[str, ...] = ()
    state_prompt_width: int = 0
    legacy_letterbox: bool = False
    truncate_prompt: bool = False
    allow_missing_statistics: bool = False
    ignore_config_fields: tuple[str, ...] = ()
    action_horizon: int | None = None
    prompt_tokens: int | None = None
    state_in_prompt: bool | None = None
    normalisation: Mode | None = None
    state_dim: int | None = None
    action_dim: int | None = None
    relative_mask: tuple[bool, ...] | None = None
    adapt_to_pi: bool | None = None
    cameras: dict[str, str] | None = None


OPENPI_FIELDS = (
    "preset",
    "action_horizon",
    "prompt_tokens",
    "state_in_prompt",
    "normalisation",
    "state_dim",
    "action_dim",
    "relative_mask",
    "adapt_to_pi",
    "cameras",
)
LEROBOT_FIELDS = (
    "state_prompt_width",
    "legacy_letterbox",
    "optional_cameras",
    "allow_missing_statistics",
    "ignore_config_fields",
)


def refuse_foreign_fields(sidecar: Sidecar, foreign: tuple[str, ...], layout: str) -> None:
    """Refuses fields that mean nothing in this layout: whoever wrote them expected an effect.

    Raises:
        TaktlineError: CONFIG_INVALID naming them.
    """
    empty = Sidecar()
    stated = [name for name in foreign if getattr(sidecar, name) != getattr(empty, name)]
    if stated:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"{SIDECAR_FILE} states {', '.join(stated)}, which a {layout} folder does not use",
            "remove them: the folder's own configuration decides",
        )
