"""Published openpi configurations by name: what their weights were trained with and no file of the folder says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")

Platform = Literal["aloha", "droid", "libero"]

# What a robot's own camera is called -> the slot it fills. ALOHA's cam_low is ignored by openpi too.
_CAMERAS: dict[Platform, dict[str, str]] = {
    "aloha": {"cam_high": SLOTS[0], "cam_left_wrist": SLOTS[1], "cam_right_wrist": SLOTS[2]},
    "droid": {"exterior_image_1_left": SLOTS[0], "wrist_image_left": SLOTS[1]},
    "libero": {"image": SLOTS[0], "wrist_image": SLOTS[1]},
}
# ALOHA's adapter masks wrists that are not sent; the other two need both of theirs.
_OPTIONAL: dict[Platform, tuple[str, ...]] = {"aloha": SLOTS[1:], "droid": (), "libero": ()}
_STATE_DIM: dict[Platform, int] = {"aloha": 14, "droid": 8, "libero": 8}
_ACTION_DIM: dict[Platform, int] = {"aloha": 14, "droid": 8, "libero": 7}

_ALOHA_DELTA = (True,) * 6 + (False,) + (True,) * 6 + (False,)
_DROID_DELTA = (True,) * 7 + (False,)
_LIBERO_DELTA = (True,) * 6 + (False,)


@dataclass(frozen=True, slots=True)
class Preset:
    """One configuration.

    Attributes:
        horizon: actions in a chunk; it is not part of the weights.
        prompt_tokens: token budget.
        relative_mask: action dimensions that are offsets from the state.
        state_in_prompt: π0.5 only.
        adapt_to_pi: ALOHA's joint signs and gripper linkage.
    """

    family: Literal["pi0", "pi05"]
    platform: Platform
    horizon: int
    prompt_tokens: int
    relative_mask: tuple[bool, ...] = ()
    state_in_prompt: bool = True
    adapt_to_pi: bool = False

    @property
    def cameras(self) -> dict[str, str]:
        """Robot camera name -> slot."""
        return dict(_CAMERAS[self.platform])

    @property
    def optional_slots(self) -> tuple[str, ...]:
        """Slots that are masked when the robot does not send them."""
        return _OPTIONAL[self.platform]

    @property
    def state_dim(self) -> int:
        """Length of the robot's state."""
        return _STATE_DIM[self.platform]

    @property
    def action_dim(self) -> int:
        """Length of one action in robot units."""
        return _ACTION_DIM[self.platform]


def _aloha(family: Literal["pi0", "pi05"], prompt_tokens: int) -> Preset:
    return Preset(family, "aloha", 50, prompt_tokens, _ALOHA_DELTA, adapt_to_pi=True)


PRESETS: dict[str, Preset] = {
    "pi0_aloha": _aloha("pi0", 48),
    "pi0_aloha_towel": _aloha("pi0", 48),
    "pi0_aloha_tupperware": _aloha("pi0", 48),
    "pi0_aloha_pen_uncap": _aloha("pi0", 48),
    "pi05_aloha": _aloha("pi05", 200),
    "pi05_aloha_pen_uncap": _aloha("pi05", 200),
    "pi0_aloha_sim": Preset("pi0", "aloha", 50, 48, adapt_to_pi=True),
    "pi0_droid": Preset("pi0", "droid", 10, 48),
    "pi05_droid": Preset("pi05", "droid", 15, 200),
    "pi05_droid_finetune": Preset("pi05", "droid", 16, 200),
    "pi05_full_droid_finetune": Preset("pi05", "droid", 16, 200, _DROID_DELTA),
    "pi05_droid_jointpos_polaris": Preset("pi05", "droid", 15, 200, _DROID_DELTA),
    "pi0_droid_jointpos_polaris": Preset("pi0", "droid", 10, 100, _DROID_DELTA),
    "pi0_libero": Preset("pi0", "libero", 50, 48, _LIBERO_DELTA),
    "pi05_libero": Preset("pi05", "libero", 10, 200, state_in_prompt=False),
}
