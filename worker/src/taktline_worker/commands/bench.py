"""`taktline bench engine POLICY`: the engine's throughput and latency by batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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

app = typer.Typer(help="Measure a part of the platform on this machine.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure a part of the platform on this machine."""


@app.command()
def engine(
    policy: PolicyArgument,
    batches: BatchesOption = "1,2,4,8,16,32",
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
    out: Annotated[Path | None, typer.Option("--out", help="File to write the rows to, as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Sweep a policy over batch sizes: T_sync (latency of a full batch), T_amort = T_sync / B, Q = B / T_sync.

    T_amort is a price, never a latency: every member of a batch waits for T_sync.
    """
    import json
    from dataclasses import asdict

    sizes = read_batches(batches)
    with progress() as say:
        say(f"loading {policy}")
        subject = open_profile(
            policy, sizes, device, precision, views, prompt_tokens, steps, horizon, quantisation, statistics
        )
        from taktline_worker.profiling import report

        rows = report.sweep(subject, sorted(set(sizes)), say, runs=runs, limit_s=limit_s)
    text = json.dumps([asdict(row) for row in rows], indent=1)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(rows[0].title, markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("batch", "T_sync ms", "p99 ms", "runs", "T_amort ms", "Q /s", "floor ms", "x floor"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.batch),
            f"{row.median_ms:.3f}",
            f"{row.p99_ms:.3f}",
            str(row.n),
            f"{row.t_amort_ms:.3f}",
            f"{row.q_per_s:.1f}",
            f"{row.floor_ms:.3f}",
            f"{row.median_ms / row.floor_ms:.2f}",
        )
    console.print(table)
