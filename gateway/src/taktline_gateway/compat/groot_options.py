"""What GR00T's clients may ask for in `options`: real-time chunking, in GR00T's own words. Pure functions.

GR00T's server takes options and ignores them; forks and open proposals of its repository (NVIDIA/Isaac-GR00T#320) read
these. One that cannot be obeyed is refused: a robot that believes it is heard moves as if it were.
"""

from __future__ import annotations

from typing import Any

from taktline_protocol import Array, ErrorCode, TaktlineError
from taktline_protocol.messages import Rtc

from taktline_gateway.compat.wire_arrays import shown

OVERLAP, FROZEN, HORIZON = "rtc_overlap_steps", "rtc_frozen_steps", "action_horizon"
_OTHERS = {
    "rtc_ramp_rate": "it is the checkpoint's own; leave it out",
    "denoising_steps": "they are the deployment's own; leave them out",
}


def check_no_options(options: Any) -> None:
    """Raises TaktlineError `invalid_body` where a reset carries options: none is known."""
    if options is not None and not (isinstance(options, dict) and not options):
        raise _refused("a reset has no options here", "leave them out")


def rtc_of(options: Any, last: Array | None) -> Rtc | None:
    """What a request asks for of real-time chunking; None where it asks for nothing.

    The tail is the end of the robot's last chunk, `rtc_overlap_steps` actions long; the first `rtc_frozen_steps` of it
    will have been executed when the new chunk is there. Without a last chunk (the first one, and after a reset) there
    is no tail, and the chunk begins anew.

    Args:
        options: as the client sent them.
        last: float (H, D), the chunk that this robot got last, in robot units.

    Raises:
        TaktlineError: `invalid_body` for an option that is not known, `rtc_invalid` for steps that cannot be.
    """
    if options is None:
        return None
    if not isinstance(options, dict):
        raise _refused("options are no map", "send a map, or none")
    if not options:
        return None
    for name in options:
        if name not in (OVERLAP, FROZEN, HORIZON):
            raise _refused(
                f"option {shown(name, 64)!r} cannot be obeyed here",
                _OTHERS.get(name, f"{OVERLAP}, {FROZEN} and {HORIZON} are known"),
            )
    counts = {name: value for name, value in options.items() if value is not None}
    if any(type(value) is not int or value < 0 for value in counts.values()) or OVERLAP not in counts:
        raise _rtc_invalid(f"{OVERLAP} and {FROZEN} are numbers of actions, and the first is needed")
    overlap, frozen = counts[OVERLAP], counts.get(FROZEN)
    if last is None or overlap == 0:
        return None
    horizon = last.shape[0]
    if counts.get(HORIZON, horizon) != horizon or overlap > horizon or (frozen or 0) > overlap:
        raise _rtc_invalid(
            f"{FROZEN} {frozen} <= {OVERLAP} {overlap} <= {HORIZON} {counts.get(HORIZON, horizon)} must hold,"
            f" and the last chunk had {horizon} actions"
        )
    rows = last.to_numpy()[horizon - overlap :]
    return Rtc(tail=Array.from_numpy(rows), delay=frozen, prefix_end=overlap)


def _refused(message: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.INVALID_BODY, message, next_step)


def _rtc_invalid(message: str) -> TaktlineError:
    return TaktlineError(ErrorCode.RTC_INVALID, message, "see GR00T's options in docs/compat.md")
