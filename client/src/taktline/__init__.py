"""Taktline's robot side: ask a policy for action chunks before the buffer runs dry.

>>> robot = Robot("http://gateway:8080", policy="demo-reach", robot_id="arm-1")
>>> chunk = robot.act(images={"scene": frame}, state=joints, instruction="reach the red block", budget_ms=200)
>>> chunk.actions.shape, chunk.margin_ms
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taktline_protocol import ErrorCode, TaktlineError
    from taktline_protocol.messages import Imagine, Rtc, Search

    from taktline.access import Access
    from taktline.action_buffer import ActionBuffer
    from taktline.async_robot import AsyncRobot
    from taktline.chunk import Chunk
    from taktline.planning import PlannedStep, plan_and_move
    from taktline.player import Player
    from taktline.robot import Robot
    from taktline.robot_metrics import RobotMetrics

__all__ = [
    "Access",
    "ActionBuffer",
    "AsyncRobot",
    "Chunk",
    "ErrorCode",
    "Imagine",
    "PlannedStep",
    "Player",
    "Robot",
    "RobotMetrics",
    "Rtc",
    "Search",
    "TaktlineError",
    "plan_and_move",
]

_HOMES = {
    "Access": "taktline.access",
    "ActionBuffer": "taktline.action_buffer",
    "AsyncRobot": "taktline.async_robot",
    "Chunk": "taktline.chunk",
    "ErrorCode": "taktline_protocol",
    "Imagine": "taktline_protocol.messages",
    "PlannedStep": "taktline.planning",
    "Player": "taktline.player",
    "Robot": "taktline.robot",
    "RobotMetrics": "taktline.robot_metrics",
    "Rtc": "taktline_protocol.messages",
    "Search": "taktline_protocol.messages",
    "TaktlineError": "taktline_protocol",
    "plan_and_move": "taktline.planning",
}


def __getattr__(name: str) -> Any:
    """Loads a public name on first use, so that `taktline --help` loads neither numpy nor an HTTP client."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)
