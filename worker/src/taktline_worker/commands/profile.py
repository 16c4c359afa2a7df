"""`taktline profile POLICY`: where the time of a batch goes, and how near each phase is to what the machine can do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taktline_worker.commands.options import (
    BatchesOption,
    DeviceOption,
    HorizonOption,
    JsonOption,
    LimitOption,
    PolicyArgument,
    PrecisionOption,
    PromptOption,
    QuantisationOption,
    RunsOption,
    StatisticsOption,
    StepsOption,
    ViewsOption,
    open_profile,
    progress,
    read_batches,
)

if TYPE_CHECKING:
    from taktline_worker.profiling.report import BatchRow


def profile(
    policy: PolicyArgument,
    batches: BatchesOption = "1,2,4,8",
    device: DeviceOption = "auto",
    precision: PrecisionOption = "",
    quantisation: QuantisationOption = "",
    views: ViewsOption = 0,
    prompt_tokens: PromptOption = 0,
    steps: StepsOption = 0,
    horizon: HorizonOption = 0,
    statistics: StatisticsOption = "",
    runs: RunsOption = 50,
    limit_s: LimitOption = 5.0,
    out: Annotated[Path, typer.Option("--out", help="Folder for profile.json, profile.png and profile.svg.")] = Path(
        "taktline-profile"
    ),
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw the two figures (needs matplotlib).")] = True,
    as_json: JsonOption = False,
) -> None:
    """Measure each phase of a policy by batch size, against the roofline of this machine.

    Pixels are decoded, prompts tokenised and everything lies on the device. On a GPU each phase is replayed as a graph
    of its own, timed by CUDA events.
    """
    sizes = read_batches(batches)
    with progress() as say:
        say(f"loading {policy}")
        subject = open_profile(
            policy, sizes, device, precision, views, prompt_tokens, steps, horizon, quantisation, statistics
        )
        from taktline_worker.profiling import report

        rows = report.profile(subject, sorted(set(sizes)), say, runs=runs, limit_s=limit_s)
    written = _write(rows, out, plot=plot)
    if as_json:
        typer.echo((out / "profile.json").read_text(), nl=False)
        return
    _print(rows)
    typer.echo(f"written: {', '.join(str(path) for path in written)}")


def _write(rows: Sequence[BatchRow], out: Path, *, plot: bool) -> list[Path]:
    import json
    from dataclasses import asdict

    out.mkdir(parents=True, exist_ok=True)
    path = out / "profile.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    if not plot:
        return [path]
    from taktline_worker.profiling.plot import draw

    return [path, *draw(rows, out)]


def _print(rows: Sequence[BatchRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    roofs = rows[0].details["roofs"]
    console = Console()
    console.print(rows[0].title, markup=False, highlight=False)
    console.print(
        f"roofs measured now: {roofs['flops_per_s'] / 1e12:.3g} TFLOP/s, {roofs['bytes_per_s'] / 1e9:.3g} GB/s",
        markup=False,
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, collapse_padding=True)  # 80 columns hold it
    for name in ("batch", "phase"):
        table.add_column(name, justify="right" if name == "batch" else "left")
    for name in ("ms", "share", "GFLOP", "MB", "TFLOP/s", "MFU", "FLOP/B", "of roof"):
        table.add_column(name, justify="right")
    for row in rows:
        for phase in row.phases:
            table.add_row(
                str(row.batch),
                phase.name,
                f"{phase.ms:.3f}",
                f"{100 * phase.share:.0f}%",
                f"{phase.gflop:.4g}",
                f"{phase.mbytes:.4g}",
                f"{phase.tflops:.3g}",
                f"{100 * phase.mfu:.1f}%",
                f"{phase.intensity:.0f}" if phase.intensity >= 100 else f"{phase.intensity:.3g}",
                f"{100 * phase.of_roof:.0f}%",
            )
        table.add_row(
            str(row.batch),
            "request",
            f"{row.median_ms:.3f}",
            "",
            "",
            "",
            "",
            "",
            "",
            f"{100 * row.floor_ms / row.median_ms:.0f}%",
            style="bold",
            end_section=True,
        )
    console.print(table)
