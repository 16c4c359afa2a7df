"""`taktline checkpoint inspect DIR`: a checkpoint as a worker sees it, before any worker runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from taktline_worker.inspection import NormalisationReport, Report

app = typer.Typer(help="Look at policy checkpoints.", no_args_is_help=True)


@app.callback()
def checkpoint() -> None:
    """Look at policy checkpoints."""


@app.command()
def inspect(
    folder: Annotated[
        Path,
        typer.Argument(help="Checkpoint folder: LeRobot, openpi, GR00T, MiniCPM-Robot, Cosmos3 or V-JEPA 2-AC."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    statistics: Annotated[str, typer.Option(help="openpi asset id or GR00T tag, where there are several.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Do not read the weights: no digests, no NaN check.")] = False,
) -> None:
    """Print what FOLDER holds and every problem found; exit 1 when a worker would refuse it."""
    # torch loads only when the command runs.
    import msgspec

    from taktline_worker.inspection import inspect as inspect_folder

    report = inspect_folder(folder, statistics=statistics, read_weights=not quick)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print(report)
    if not report.usable:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True)
    for name, value in _lines(report):
        console.print(f"[bold]{name:<23}[/bold] ", end="")
        console.print(value, markup=False, highlight=False)
    for problem in report.problems:
        style = "bold red" if problem.severity == "error" else "yellow"
        code = f" {problem.code}" if problem.code else ""
        console.print(f"\n{problem.severity}{code}: {problem.message}", style=style, markup=False, highlight=False)
        console.print(f"  next: {problem.next_step}", markup=False, highlight=False)
    verdict = "a worker can serve this folder" if report.usable else "a worker refuses this folder"
    console.print(f"\n{verdict}", style="bold green" if report.usable else "bold red", markup=False)


def _lines(report: Report) -> list[tuple[str, str]]:
    lines = [("folder", report.path)]
    if report.facts:
        lines += [
            ("family", f"{report.family} ({report.layout} layout)"),
            *([("description", report.description)] if report.description else []),
            ("parameters", f"{report.parameters:,}"),
            *report.facts.items(),
            ("cameras", ", ".join(report.cameras) or "as the embodiment has them"),
            ("control period", f"{report.control_period_ms:g} ms" if report.control_period_ms else "not stated"),
        ]
    elif report.family:
        size = report.architecture
        lines += [
            ("family", f"{report.family} ({report.layout} layout)"),
            *([("description", report.description)] if report.description else []),
            ("parameters", f"{report.parameters:,}"),
            ("vision", f"{size['vision_layers']} layers, width {size['vision_width']}, {size['image_size']} px"),
            ("prefix", f"{size['depth']} layers, width {size['prefix_width']}, vocabulary {size['vocabulary']:,}"),
            (
                "expert",
                f"{size['depth']} layers, width {size['expert_width']}, {size['heads']} heads of {size['head_dim']}",
            ),
            ("cameras", ", ".join(report.cameras) or "-"),
            ("optional cameras", ", ".join(report.optional_cameras) or "-"),
            ("masked cameras", ", ".join(report.masked_cameras) or "-"),
            ("state, action", f"{report.state_dim}, {report.action_dim} of {size['action_width']}"),
            ("chunk", f"{report.horizon} actions, {report.solver_steps} solver steps"),
            ("control period", f"{report.control_period_ms:g} ms" if report.control_period_ms else "not stated"),
            ("prompt", f"{report.prompt}, at most {report.prompt_tokens} tokens"),
            ("tokenizer", f"{report.tokenizer} ({report.tokenizer_pieces:,} pieces)"),
            ("resize", report.resize),
            ("actions", _actions(report)),
            ("state statistics", _statistics(report.state_normalisation)),
            ("action statistics", _statistics(report.action_normalisation)),
        ]
    if report.bytes:
        dtypes = ", ".join(f"{count} {name}" for name, count in report.dtypes.items())
        lines.append(("tensors", f"{dtypes}{'; ' if dtypes else ''}{report.bytes / 1e6:,.1f} MB"))
    lines += [(f"sha256 {name}", digest) for name, digest in report.sha256.items()]
    return lines


def _actions(report: Report) -> str:
    relative = [str(index) for index, on in enumerate(report.relative_actions) if on]
    text = f"relative to the state in dimensions {', '.join(relative)}" if relative else "absolute"
    return f"{text}; ALOHA joint space" if report.adapt_to_pi else text


def _statistics(report: NormalisationReport | None) -> str:
    if report is None or report.low_range is None or report.high_range is None:
        return "none (IDENTITY)"
    first, second = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99")}.get(
        report.mode, ("q10", "q90")
    )
    low, high = report.low_range, report.high_range
    return (
        f"{report.mode}, {report.width} dimensions, {first} in [{low[0]:.4g}, {low[1]:.4g}], "
        f"{second} in [{high[0]:.4g}, {high[1]:.4g}]"
    )
