"""Which of a robot's cameras is which of the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping

from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.models.pi.config import CameraSlot
from taktline_worker.observation import EncodedImage


class CameraNames:
    """Names that robots may use.

    Args:
        slots: the checkpoint's cameras in its order.
        cameras: robot camera name -> checkpoint key; empty takes the checkpoint's own names.

    Attributes:
        required: names of the cameras that must be sent; of several for one, that which is said.
        optional: of those that may be.

    Raises:
        TaktlineError: CONFIG_INVALID where `cameras` names a camera the checkpoint lacks, or leaves one out.
    """

    def __init__(self, slots: tuple[CameraSlot, ...], cameras: Mapping[str, str]) -> None:
        self._slots, self._slot_of = slots, _accepted_names(slots, cameras)
        shown: dict[str, str] = {}
        for name, slot in self._slot_of.items():
            shown.setdefault(slot.key, name)
        self.required = tuple(shown[s.key] for s in slots if s.required)
        self.optional = tuple(shown[s.key] for s in slots if s.key in shown and not s.required)

    def __contains__(self, name: str) -> bool:
        return name in self._slot_of

    def in_order(self, images: Mapping[str, EncodedImage]) -> list[tuple[str, EncodedImage]]:
        """(robot name, frame) in the checkpoint's camera order; absent optional cameras are left out.

        Raises:
            TaktlineError: CAMERA_MISSING or CAMERA_UNKNOWN.
        """
        by_slot: dict[str, tuple[str, EncodedImage]] = {}
        for name, image in images.items():
            slot = self._slot_of.get(name)
            if slot is None:
                raise TaktlineError(
                    ErrorCode.CAMERA_UNKNOWN,
                    f"the policy has no camera {name!r}",
                    f"send {', '.join((*self.required, *self.optional))}; model.cameras maps names",
                )
            if slot.key in by_slot:
                raise TaktlineError(
                    ErrorCode.CAMERA_UNKNOWN,
                    f"cameras {by_slot[slot.key][0]!r} and {name!r} are the same camera",
                    "send it once",
                )
            by_slot[slot.key] = (name, image)
        missing = [slot.key for slot in self._slots if slot.required and slot.key not in by_slot]
        if missing or not by_slot:
            raise TaktlineError(
                ErrorCode.CAMERA_MISSING,
                f"cameras are missing: {', '.join(missing) or 'all of them'}",
                f"send {', '.join(self.required or self.optional)}",
            )
        return [by_slot[slot.key] for slot in self._slots if slot.key in by_slot]


def _accepted_names(slots: tuple[CameraSlot, ...], cameras: Mapping[str, str]) -> dict[str, CameraSlot]:
    """Robot camera name -> slot."""
    own = {name: slot for slot in slots for name in slot.names}
    if not cameras:
        return own
    by_key = own | {slot.key: slot for slot in slots if slot.names}
    unknown = {robot: key for robot, key in cameras.items() if key not in by_key}
    if unknown:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"model.cameras maps to cameras that the checkpoint lacks: {unknown}",
            f"map to {', '.join(sorted(by_key))}",
        )
    mapped = {robot: by_key[key] for robot, key in cameras.items()}
    covered = [slot.key for slot in mapped.values()]
    left_out = [slot.key for slot in slots if slot.required and slot.key not in covered]
    if left_out or len(set(covered)) != len(covered):
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"model.cameras leaves out {left_out} or maps two names to one camera: {dict(cameras)}",
            "map one robot camera to each camera of the checkpoint; see optional_cameras in docs/checkpoints.md",
        )
    return mapped
