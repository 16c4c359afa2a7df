"""The two figures of a profile: where the time of a batch goes, and how near each phase is to the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from taktline_worker.profiling.figure import empty_figure
from taktline_worker.profiling.report import BatchRow, PhaseRow

# Told apart by colour-blind readers and on grey paper too: each has its own marker.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v")


def draw(rows: Sequence[BatchRow], folder: Path) -> list[Path]:
    """Writes `profile.png` and `profile.svg` into `folder`; returns their paths.

    Raises:
        TaktlineError: CONFIG_INVALID where matplotlib is not installed.
    """
    figure = empty_figure(13, 5.2)
    names = [phase.name for phase in rows[0].phases]
    bars, roofline = figure.subplots(1, 2)
    _draw_shares(bars, rows, names)
    _draw_roofline(roofline, rows, names)
    figure.suptitle(rows[0].title, fontsize=11)
    paths = [folder / "profile.png", folder / "profile.svg"]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def _draw_shares(axes: object, rows: Sequence[BatchRow], names: Sequence[str]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    places = range(len(rows))
    below = [0.0] * len(rows)
    for index, name in enumerate(names):
        shares = [100.0 * _phase(row, name).share for row in rows]
        axes.bar(places, shares, 0.68, bottom=below, label=name, color=_COLOURS[index % len(_COLOURS)])
        for place, share, start, row in zip(places, shares, below, rows, strict=True):
            if share >= 7.0:
                text = f"{_phase(row, name).ms:.3g} ms"
                axes.text(place, start + share / 2, text, ha="center", va="center", color="white", fontsize=8)
        below = [start + share for start, share in zip(below, shares, strict=True)]
    labels = [f"{row.batch}\n{row.median_ms:.3g} ms\n{row.t_amort_ms:.3g} ms/obs" for row in rows]
    axes.set_xticks(list(places), labels, fontsize=8)
    axes.set_xlabel("batch: T_sync, T_amort")
    axes.set_ylabel("share of the phases' time (%)")
    axes.set_ylim(0, 100)
    axes.set_title("Where the time goes", fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(names), fontsize=8, frameon=False)


def _draw_roofline(axes: object, rows: Sequence[BatchRow], names: Sequence[str]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    roofs = rows[0].details["roofs"]
    unit, name_of_unit = (1e12, "TFLOP/s") if roofs["flops_per_s"] >= 1e12 else (1e9, "GFLOP/s")
    peak, bandwidth = roofs["flops_per_s"] / unit, roofs["bytes_per_s"] / unit
    points = [phase for row in rows for phase in row.phases]
    ridge = peak / bandwidth
    low = min([ridge, *(point.intensity for point in points)]) / 2.5
    high = max([ridge, *(point.intensity for point in points)]) * 2.5
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color="black", linewidth=1.4)
    axes.annotate(
        f"{peak:.3g} {name_of_unit}", (high, peak), xytext=(-4, 4), textcoords="offset points", ha="right", fontsize=8
    )
    axes.annotate(
        f"{roofs['bytes_per_s'] / 1e9:,.0f} GB/s",
        ((low * ridge) ** 0.5, (low * ridge) ** 0.5 * bandwidth),
        xytext=(8, -10),
        textcoords="offset points",
        fontsize=8,
    )
    for index, name in enumerate(names):
        track = [(row.batch, _phase(row, name)) for row in rows]
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        x, y = [phase.intensity for _, phase in track], [1e12 / unit * phase.tflops for _, phase in track]
        axes.plot(x, y, marker=marker, color=colour, label=name, linewidth=0.9, markersize=5)
        for at in sorted({0, len(track) - 1}):
            # Below and above by turns, as the tracks of two phases often meet.
            beside = (4, 6 if index % 2 else -11)
            label = f"B={track[at][0]}"
            axes.annotate(label, (x[at], y[at]), xytext=beside, textcoords="offset points", fontsize=7, color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(1e12 / unit * point.tflops for point in points) / 2.0, peak * 1.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_xlabel("operations a byte that must move (FLOP/B)")
    axes.set_ylabel(name_of_unit)
    axes.set_title("Roofline, ceilings measured in the same run", fontsize=10)
    axes.grid(visible=True, which="major", linewidth=0.3)
    axes.legend(loc="lower right", fontsize=8)


def _phase(row: BatchRow, name: str) -> PhaseRow:
    return next(phase for phase in row.phases if phase.name == name)
