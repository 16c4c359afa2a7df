"""An empty figure of matplotlib, which is installed only where somebody wants figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taktline_protocol import ErrorCode, TaktlineError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def empty_figure(width_in: float, height_in: float) -> Figure:
    """A figure of that many inches that needs no display.

    Raises:
        TaktlineError: CONFIG_INVALID where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "the plot needs matplotlib, which is not installed",
            "install taktline-worker[plot], or give --no-plot",
        ) from error
    return Figure(figsize=(width_in, height_in), layout="constrained")
