"""`taktline-demo`: record demonstrations, train and evaluate the policy, run a fleet, or show what a robot sees."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from taktline_protocol.errors import ErrorCode, TaktlineError, of_files

app = typer.Typer(
    help="A simulated arm, its policy, and a fleet of such arms for a Taktline gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_console = Console(stderr=True)


@app.command()
def record(
    out: Annotated[Path, typer.Option(help="The npz file to write.")],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to record.")] = 2800,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode.")] = 1_000_000,
) -> None:
    """Record the scripted expert's demonstrations (about five minutes for the default on one core)."""
    from taktline_demo.recording import record as record_demonstrations

    with Progress(console=_console) as bar:
        task = bar.add_task("recording", total=episodes)
        demonstrations = record_demonstrations(episodes, seed, lambda done: bar.update(task, completed=done))
    demonstrations.save(out)
    typer.echo(f"{len(demonstrations.states)} observations of {episodes} episodes in {out}")


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="Demonstrations written by `record`.")],
    out: Annotated[Path, typer.Option(help="Checkpoint folder to write.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Observations a step.")] = 768,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights, the batches and the noise.")] = 0,
    device: Annotated[str, typer.Option(help="A torch device, or auto.")] = "auto",
) -> None:
    """Train the policy and write its LeRobot checkpoint (two minutes on an H200; hours on a CPU)."""
    _require_training()
    import torch

    from taktline_demo.policy.training import TrainingOptions
    from taktline_demo.policy.training import train as train_policy

    if not data.is_file():
        raise _usage(f"{data} does not exist", f"record it first: taktline-demo record --out {data}")
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    options = TrainingOptions(steps=steps, batch=batch, seed=seed, warmup=min(200, max(1, steps // 5)))
    train_policy(data, out, options, torch.device(chosen), typer.echo)


@app.command()
def evaluate(
    checkpoint: Annotated[
        Path | None, typer.Option(help="Run this checkpoint directly, without gateway and worker.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Run the policy behind this gateway.")] = None,
    policy: Annotated[str, typer.Option(help="Name of the policy behind the gateway.")] = "demo-reach",
    episodes: Annotated[int, typer.Option(min=1, help="Layouts; each is run once for every block.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first layout.")] = 0,
    control: Annotated[bool, typer.Option(help="With --checkpoint: run untrained weights too.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every episode's result here.")] = None,
) -> None:
    """Measure success in lockstep: the simulation waits for each answer, so equal seeds give equal results."""
    from taktline_demo.evaluation import evaluate as run
    from taktline_demo.evaluation import json_document, print_evaluations
    from taktline_demo.gateway_policy import gateway_act

    if (checkpoint is None) == (url is None):
        raise _usage("evaluate needs either --checkpoint or --url", "see taktline-demo evaluate --help")
    policies: list[tuple[str, Any]] = []
    if url is not None:
        policies.append((f"{policy} behind the gateway", gateway_act(url, policy)))
    if checkpoint is not None:
        _require_training()
        from taktline_demo.policy.inference import DirectPolicy

        if not (checkpoint / "model.safetensors").is_file():
            raise _usage(f"{checkpoint} holds no model.safetensors", "give the folder of a demo checkpoint")
        policies.append(("checkpoint", DirectPolicy(checkpoint).act))
        if control:
            policies.append(("untrained weights", DirectPolicy(checkpoint, random_weights_seed=0).act))
    evaluations = []
    for name, act in policies:
        with Progress(console=_console) as bar:
            task = bar.add_task(name, total=3 * episodes)
            seeds = range(seed, seed + episodes)
            evaluations.append(run(name, act, seeds, lambda result, task=task: bar.advance(task)))  # type: ignore[misc]
    print_evaluations(evaluations, Console())
    if json_path is not None:
        json_path.write_text(json_document(evaluations))


@app.command()
def fleet(
    url: Annotated[str, typer.Option(help="The gateway.")] = "http://127.0.0.1:8080",
    policy: Annotated[str, typer.Option(help="Name of the policy.")] = "demo-reach",
    robots: Annotated[int, typer.Option(min=1, max=64, help="Simulated robots, one process each.")] = 4,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of each robot.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here; it opens offline.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all measurements here.")] = None,
) -> None:
    """Run simulated robots in closed loop with a policy, in real time, and report what they measured."""
    from taktline_demo.fleet.console import LiveTable, result_table
    from taktline_demo.fleet.processes import FleetOptions, run_fleet
    from taktline_demo.fleet.report import write_report

    options = FleetOptions(url, policy, robots, episodes, seed)
    console = Console()
    try:
        with LiveTable(options, console) as live:
            run = run_fleet(options, live.update)
    except KeyboardInterrupt:
        _console.print("stopped")
        raise typer.Exit(130) from None
    console.print(result_table(run))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(run.as_dict(), indent=1) + "\n")
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        write_report(report, run)
        console.print(f"report: {report}", highlight=False)


@app.command()
def snapshot(
    out: Annotated[Path, typer.Option(help="Folder for scene.jpg and wrist.jpg.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode.")] = 0,
) -> None:
    """Write what a robot sees at the start of an episode, and print the `taktline act` command that sends it."""
    from taktline_demo.environment import ReachEnvironment
    from taktline_demo.jpeg import encode_jpeg

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _usage(
            f"{out} cannot be made: {error.strerror}", "name a folder that you may write to with --out"
        ) from error
    environment = ReachEnvironment()
    environment.reset(seed)
    cameras = ""
    for name, frame in environment.frames().items():
        path = out / f"{name}.jpg"
        path.write_bytes(encode_jpeg(frame))
        cameras += f" --camera {name}={path}"
    state = ",".join(f"{angle:.4f}" for angle in environment.state())
    environment.close()
    typer.echo(f'taktline act --policy demo-reach{cameras} --state={state} --instruction "{environment.instruction}"')


def _require_training() -> None:
    missing = [name for name in ("torch", "safetensors", "sentencepiece") if importlib.util.find_spec(name) is None]
    if missing:
        raise _usage(f"{', '.join(missing)} is not installed", "install the extra: pip install 'taktline-demo[train]'")


def _usage(message: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.CONFIG_INVALID, message, next_step)


def main() -> None:
    """Entry point: typed errors become one line on stderr and exit status 1."""
    try:
        app()
    except (TaktlineError, OSError) as error:
        said = of_files(error) if isinstance(error, OSError) else error
        if said is None:
            raise
        print(f"taktline-demo: {said}", file=sys.stderr)
        sys.exit(1)
