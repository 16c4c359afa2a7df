"""The text that a Cosmos3 policy reads: an instruction in the words of its training."""

from __future__ import annotations

import json
import math
from typing import Literal

from taktline_worker.models.cosmos3.request import RequestSettings

_RATIOS = {"1,1": 1.0, "4,3": 4 / 3, "3,4": 3 / 4, "16,9": 16 / 9, "9,16": 9 / 16}


def prompt_text(kind: Literal["json", "plain"], instruction: str, view_text: str, settings: RequestSettings) -> str:
    """The user's turn for an instruction that is not empty.

    Args:
        kind: `json`, the object of the released policies' training; `plain`, its sentences.
        view_text: what the picture shows.
    """
    return (_json if kind == "json" else _plain)(instruction.strip(), view_text, settings)


def _json(instruction: str, view_text: str, s: RequestSettings) -> str:
    height, width = s.padded
    seconds = s.frames / s.fps
    minutes, rest = divmod(round(seconds), 60)
    sentence = instruction if instruction.endswith((".", "!", "?")) else f"{instruction}."
    # The order of the keys and the separators are part of the prompt.
    return json.dumps(
        {
            "cinematography": {"framing": view_text},
            "actions": [{"time": f"0:00-{minutes}:{rest:02d}", "description": sentence}],
            "duration": f"{int(seconds)}s",
            "fps": float(s.fps),
            "resolution": {"H": height, "W": width},
            "aspect_ratio": _ratio(height, width),
        }
    )


def _plain(instruction: str, view_text: str, s: RequestSettings) -> str:
    height, width = s.padded
    text = _joined(instruction, view_text)
    text = _joined(text, f"The video is {int(s.frames / s.fps):.1f} seconds long and is of {s.fps:.0f} FPS.")
    return _joined(text, f"This video is of {height}x{width} resolution.")


def _joined(text: str, addition: str) -> str:
    return f"{text}{' ' if text.endswith('.') else '. '}{addition}"


def _ratio(height: int, width: int) -> str:
    """The name of the published shape of that size: the nearest ratio."""
    return min(_RATIOS, key=lambda name: math.fabs(_RATIOS[name] - width / height))
