"""What several families check alike of an engine's options."""

from __future__ import annotations

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import ParallelOptions


def control_period_s(stated_ms: float | None, own_ms: float | None, example: str = "") -> float:
    """The time between two action rows: what the deployment states, else the checkpoint's sidecar.

    Args:
        stated_ms: of the engine's options.
        own_ms: of taktline.json.
        example: what is usual, for the next step, such as " (LIBERO: 50)".

    Raises:
        TaktlineError: CONFIG_INVALID where neither states it, or it is out of range.
    """
    period_ms = own_ms if stated_ms is None else stated_ms
    if period_ms is None:
        raise config_error(
            "the control period is not stated, and no published file of this family holds it",
            f"set spec.engine.controlPeriodMs, or control_period_ms in taktline.json{example}",
        )
    if not 0 < period_ms <= 60_000:
        raise config_error(f"the control period is {period_ms:g} ms", "set the time between two action rows")
    return period_ms / 1000.0


def check_replicas_only(parallel: ParallelOptions) -> None:
    """Raises CONFIG_INVALID where a family that fits one GPU is to be cut over several."""
    if parallel.tp != 1 or parallel.cfg != 1 or parallel.search != 1:
        raise config_error(
            "engine.parallel asks for more than dp", "this family fits one GPU: use dp, one replica a GPU"
        )


def config_error(message: str, next_step: str) -> TaktlineError:
    """An option that cannot be followed."""
    return TaktlineError(ErrorCode.CONFIG_INVALID, message, next_step)
