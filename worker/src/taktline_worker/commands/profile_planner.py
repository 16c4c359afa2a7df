"""`taktline profile-planner`: how long a plan takes by ranks, and how few of them keep a deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from taktline_worker.commands.options import (
    DeviceOption,
    JsonOption,
    PrecisionOption,
    check_place,
    progress,
    read_batches,
)


def profile_planner(
    policy: Annotated[Path, typer.Argument(help="A planner's checkpoint folder, or a worker's engine.json.")],
    ranks: Annotated[
        str,
        typer.Option(
            help="Numbers of ranks to measure, separated by commas; 1 among them. "
            "Left out: the three fewest that divide a round's units, 1,2,4 for 800 candidates on GPUs."
        ),
    ] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of a plan; 0 takes the deployment's.")] = 0,
    candidates: Annotated[int, typer.Option(min=0, help="Candidates of a round; 0 takes the deployment's.")] = 0,
    runs: Annotated[int, typer.Option(min=1, help="Timed plans of each mesh.")] = 3,
    deadline_ms: Annotated[float, typer.Option(min=0, help="Say how few ranks keep this; 0 says nothing.")] = 0.0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "",
    out: Annotated[Path, typer.Option("--out", help="Folder for planner.json and planner.png.")] = Path(
        "taktline-profile"
    ),
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw the figure (needs matplotlib).")] = True,
    as_json: JsonOption = False,
) -> None:
    """Measure a planner on meshes of several sizes and fit time(W) = rounds (r / eff(W) + c (W - 1)), in whole units.

    Each further rank is a process of its own: on a GPU of its own, or on a share of this machine's cores.
    """
    stated = read_batches(ranks, "numbers of ranks", "--ranks") if ranks else None
    check_place(device, precision)
    with progress() as say:
        from taktline_worker.profiling.ranks import check_sizes, default_sizes, measure, planner_config

        if stated is not None:
            check_sizes(stated)
        config = planner_config(policy, device, precision)
        sizes = default_sizes(config, candidates) if stated is None else stated
        check_sizes(sizes)
        times = measure(config, sizes, runs, say, rounds, candidates)
    import json

    model = times.model
    measured = [
        {
            "ranks": one.ranks,
            "rounds": one.rounds,
            "seconds": one.seconds,
            "model_s": model.plan_s(one.ranks, one.rounds),
        }
        for one in times.measurements
    ]
    count = times.measurements[0].rounds
    enough = model.ranks_for(deadline_ms / 1000.0, count, 64) if deadline_ms else None
    content = {
        "policy": config.policy,
        "device": times.device,
        "dtype": times.precision,
        "shape": {"candidates": times.candidates, "units": times.units, "rounds": count, "horizon": times.horizon},
        "measured": measured,
        "model": {"round_s": model.round_s, "rank_s": model.rank_s, "loss": model.loss},
        "plans_equal": times.plans_equal,
        "deadline_ms": deadline_ms or None,
        "ranks_for_deadline": enough,
    }
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    (out / "planner.json").write_text(text, encoding="utf-8")
    if plot:
        from taktline_worker.profiling.ranks import draw

        draw(times, out / "planner.png", deadline_ms / 1000.0 if deadline_ms else None)
    if as_json:
        typer.echo(text, nl=False)
        return
    shape = f"{times.candidates} candidates, {count} rounds, {times.precision} on {times.device}"
    typer.echo(f"{'ranks':>5} {'measured s':>11} {'model s':>9}   {shape}")
    for row in measured:
        typer.echo(f"{row['ranks']:>5} {row['seconds']:>11.3f} {row['model_s']:>9.3f}")
    typer.echo(
        f"time(W) = {count} x ({model.round_s:.4g} s / eff(W) + {model.rank_s:.3g} s x (W - 1)), "
        f"eff(W) = W' / (1 + {model.loss:.3g} x (W - 1)), W' = {times.units} / ceil({times.units} / W)"
    )
    constants = f"{{roundMs: {1000 * model.round_s:.4g}, rankMs: {1000 * model.rank_s:.3g}, loss: {model.loss:.3g}}}"
    typer.echo(f"for the operator to choose the ranks: spec.engine.parallel.searchModel: {constants}")
    typer.echo("all meshes gave the same plan" if times.plans_equal else "THE PLANS DIFFER between meshes")
    if deadline_ms:
        typer.echo(
            f"no number of ranks up to 64 keeps {deadline_ms:g} ms: ask for fewer rounds or candidates"
            if enough is None
            else f"{enough} rank{'s' if enough > 1 else ''} keep {deadline_ms:g} ms: engine.parallel.search: {enough}"
        )
    if not times.plans_equal:
        raise typer.Exit(1)
