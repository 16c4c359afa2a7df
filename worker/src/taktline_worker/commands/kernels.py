"""`taktline kernels`: which kernel each operation of a policy gets and why, and how a table for a GPU is made."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taktline_worker.commands.options import (
    DeviceOption,
    PolicyArgument,
    PrecisionOption,
    PromptOption,
    QuantisationOption,
    ViewsOption,
    check_place,
    check_quantisation,
    open_profile,
    progress,
    read_batches,
)

if TYPE_CHECKING:
    from taktline_kernels.selector import Choice

    from taktline_worker.profiling.kernels import Recorded
    from taktline_worker.profiling.rehearsal import Rehearsed
    from taktline_worker.profiling.subject import Request
    from taktline_worker.profiling.tuning import Tuned

app = typer.Typer(help="Look at and measure the kernels of an engine.", no_args_is_help=True)


@app.callback()
def kernels() -> None:
    """Look at and measure the kernels of an engine."""


@app.command()
def explain(
    policy: PolicyArgument,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the request that is looked at.")] = 1,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "",
    quantisation: QuantisationOption = "",
    views: ViewsOption = 0,
    prompt_tokens: PromptOption = 0,
    table: Annotated[
        str, typer.Option(help="Say what the GPU of this shipped table would run, such as h200; in bf16 by default.")
    ] = "",
    arch: Annotated[
        str, typer.Option(help="Of random policies, say what a GPU of this architecture without a table would run.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Run one request of POLICY and list each kind of operation with its kernel and the reason.

    On a CPU every operation runs its torch reference. `--table` then tells what a GPU would run: of random policies all
    of it, over tensors that have shapes only; of others the same operations, without those that a GPU's engine fuses
    (attention over the cache, gated feed-forward).
    """
    with progress() as say:
        from taktline_worker.profiling.kernels import choice_by, packaged_table, record

        rules = packaged_table(table) if table else ()
        if (table or arch) and policy.startswith("random:"):
            from taktline_worker.profiling.rehearsal import explained
            from taktline_worker.profiling.subject import Request, check_batches

            check_place(device, precision)
            say(f"{policy} for {table or arch}")
            stored = check_quantisation(quantisation)
            request = Request(
                policy, check_batches((batch,)), "cuda", precision, views, prompt_tokens, quantisation=stored
            )
            calls = explained(request, arch or "sm_90", table)
            choices = [call.choice for call in calls]
        else:
            say(f"loading {policy}")
            # On a CPU the default is fp32, which no table is about.
            served = precision or ("bf16" if table else "")
            subject = open_profile(policy, (batch,), device, served, views, prompt_tokens, 0, 0, quantisation)
            say(f"one request of {batch} row(s)")
            calls = record(subject, batch)
            choices = [choice_by(rules, table, call) if table else call.choice for call in calls]
    if as_json:
        import json

        typer.echo(json.dumps([_entry(call, choice) for call, choice in zip(calls, choices, strict=True)], indent=1))
        return
    _print_choices(calls, choices)


@app.command()
def tune(
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="POLICY...",
            help="As for the other commands; several make one table. `shipped` is all that the shipped tables are"
            " measured on, shipped:pi05 a part of it (pi05, pi0, groot, minicpm, cosmos3, planner).",
        ),
    ],
    batches: Annotated[str, typer.Option("--batches", help="Batch sizes, separated by commas.")] = "1,2,4,8,16,32",
    precision: PrecisionOption = "",
    quantisation: QuantisationOption = "",
    views: Annotated[str, typer.Option(help="Cameras a row, several separated by commas; 0: the policy's.")] = "0",
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", help="Prompt tokens a row, likewise; 0: the longest prompt.")
    ] = "0",
    layers: Annotated[
        int, typer.Option(help="Of random policies, so many layers a tower: as good to measure by; 0: all.")
    ] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Table to write; default: the GPU's name, here.")] = None,
    runs: Annotated[int, typer.Option("--runs", min=7, help="Replays of each candidate, and turns.")] = 9,
    ops: Annotated[str, typer.Option("--ops", help="Operations to measure, separated by commas; default: all.")] = "",
    grids: Annotated[
        bool, typer.Option("--grids/--known", help="Also try settings that no table names; or only those.")
    ] = True,
    complete: Annotated[
        bool, typer.Option("--complete", help="At the end, leave out rules that no run has measured.")
    ] = False,
    limit_s: Annotated[float, typer.Option("--limit-s", help="Begin no further request after so long.")] = 1e9,
    as_json: Annotated[bool, typer.Option("--json", help="Print every candidate's time as JSON.")] = False,
) -> None:
    """Measure every kernel that could run each operation of the policies on this GPU; write the winners as a table.

    The table in force (a shipped one, or TAKTLINE_KERNEL_TABLE) is where it starts from: what it names runs unless
    another kernel is faster inside its phase, beyond doubt. What is measured gets its figures, the other rules stay.
    Use the new table with TAKTLINE_KERNEL_TABLE=FILE, or put it among the shipped ones. A candidate whose result strays
    from what runs now is refused. Needs an NVIDIA GPU that nothing else uses.
    """
    import torch
    from taktline_protocol import ErrorCode, TaktlineError

    if not torch.cuda.is_available():
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "kernels are measured on the GPU that is to run them, and no CUDA device is visible here",
            "run this on a machine of the pool; taktline kernels explain works anywhere",
        )
    from taktline_worker.profiling import tuning_run

    gpu = torch.cuda.get_device_name()
    path = out or Path(f"{gpu.lower().replace('nvidia', '').strip().replace(' ', '-')}.toml")
    requests = [
        request
        for policy in policies
        for request in _requests(policy, batches, precision, quantisation, views, prompt_tokens, layers)
    ]
    wanted = tuple(name.strip() for name in ops.split(",") if name.strip())
    settings = tuning_run.Settings(wanted, runs, grids, complete, limit_s)
    with progress() as say:
        results = tuning_run.run(requests, settings, path, say)
    if as_json:
        import json

        typer.echo(json.dumps([_tuned_entry(result) for result in results], indent=1))
    else:
        _print_tuned(results)
        typer.echo(f"written: {path}; use it with TAKTLINE_KERNEL_TABLE={path}")


def _requests(
    policy: str, batches: str, precision: str, quantisation: str, views: str, prompt_tokens: str, layers: int
) -> Iterator[Request]:
    """What `tune` is asked to measure of one policy."""
    import itertools

    from taktline_worker.profiling.subject import Request, check_batches
    from taktline_worker.profiling.tuning_plan import SHIPPED, planned

    check_place("cuda", precision)
    if policy.partition(":")[0] == SHIPPED:
        yield from planned(policy)
        return
    cameras = read_batches(views, "cameras", "--views")
    prompts = read_batches(prompt_tokens, "prompt tokens", "--prompt-tokens")
    sizes = check_batches(read_batches(batches))
    for count, tokens in itertools.product(cameras, prompts):
        yield Request(
            policy,
            sizes,
            "cuda",
            precision,
            count,
            tokens,
            quantisation=check_quantisation(quantisation),
            layers=layers,
        )


@app.command()
def check(
    policies: Annotated[
        list[str] | None, typer.Argument(help="Policies of the published sizes, such as pi05; default: all.")
    ] = None,
    arch: Annotated[str, typer.Option(help="Architecture: sm_80, sm_86, sm_87, sm_89 or sm_90.")] = "sm_90",
    table: Annotated[
        str, typer.Option(help="Shipped kernel table; default: h200 for sm_90, none for the others.")
    ] = "",
    precision: Annotated[str, typer.Option(help="bf16 or fp8; default: every one that a policy has.")] = "",
    batches: Annotated[str, typer.Option("--batches", help="Batch sizes, separated by commas.")] = "1,8",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Compile every kernel that the policies launch for a GPU that is not here, and look at what their graphs capture.

    Needs no GPU and no checkpoint: weights have shapes only. Lists registers, local memory and shared memory of each
    kernel, the operations that the table has no rule for, and captured code that a GPU would refuse. Exit code 1 where
    something cannot run.
    """
    import json
    from dataclasses import asdict

    from taktline_protocol import ErrorCode, TaktlineError

    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "there is no compiler for kernels here: Triton is missing, or TRITON_INTERPRET has it interpret them",
            "run this on Linux, without TRITON_INTERPRET",
        )
    from taktline_worker.profiling import rehearsal

    wanted = policies or list(rehearsal.POLICIES)
    if unknown := [name for name in wanted if name not in rehearsal.POLICIES]:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"there is no policy {unknown[0]!r} to check",
            f"choose from {', '.join(rehearsal.POLICIES)}",
        )
    table = table or ("h200" if arch == "sm_90" else "")
    found: list[rehearsal.Rehearsed] = []
    with progress() as say:
        for name in wanted:
            for number_format in rehearsal.precisions(name, arch, precision):
                say(f"{name} {number_format} for {arch}")
                found.append(
                    rehearsal.rehearse(name, arch, precision=number_format, table=table, batches=read_batches(batches))
                )
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=1))
    else:
        for one in found:
            _print_rehearsed(one)
    if any(one.failed or one.findings for one in found):
        raise typer.Exit(1)


def _print_rehearsed(one: Rehearsed) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"\n{one.policy} {one.precision} on {one.arch}: {one.graphs} graphs", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel")
    for name in ("registers", "local", "shared"):
        table.add_column(name, justify="right")
    table.add_column("settings", overflow="fold")
    for kernel in one.kernels:
        settings = " ".join(
            f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in kernel.settings.items()
        )
        numbers = (kernel.registers, kernel.stack_bytes, kernel.shared_bytes)
        table.add_row(kernel.name, *map(str, numbers), settings if not kernel.error else f"REFUSED: {kernel.error}")
    console.print(table, markup=False)
    for name in one.without_rule:
        console.print(f"{name}: the torch reference runs", markup=False)
    for finding in one.findings:
        console.print(f"CAPTURE: {finding.where}: {finding.what}", markup=False)


def _entry(call: Recorded, choice: Choice) -> dict[str, Any]:
    return {
        "op": call.name,
        "shape": call.shape,
        "dtype": str(call.dtype).removeprefix("torch."),
        "calls": call.calls,
        "kernel": choice.kernel,
        "config": dict(choice.config),
        "reason": choice.reason,
    }


def _tuned_entry(result: Tuned) -> dict[str, Any]:
    candidates = [
        {"kernel": each.kernel, "config": dict(each.config), "us": each.us, "refused": each.reason}
        for each in result.candidates
    ]
    return _entry(result.call, result.call.choice) | {"candidates": candidates}


def _print_choices(calls: Sequence[Recorded], choices: Sequence[Choice]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("operation")
    table.add_column("calls", justify="right")
    for name in ("shape", "dtype", "kernel", "why"):
        table.add_column(name, overflow="fold")
    for call, choice in zip(calls, choices, strict=True):
        shape = " ".join(f"{name}={value}" for name, value in call.shape.items())
        settings = " ".join(f"{name}={value}" for name, value in choice.config.items())
        kernel = f"{choice.kernel} ({settings})" if settings else choice.kernel
        table.add_row(call.name, str(call.calls), shape, str(call.dtype).removeprefix("torch."), kernel, choice.reason)
    Console().print(table, markup=False)


def _before(result: Tuned) -> str:
    """What ran before, with its time, where another kernel won."""
    if result.best.runs(result.call.choice):
        return ""
    before = next((each for each in result.candidates if each.runs(result.call.choice)), None)
    time = f" {before.us:.2f}" if before is not None and before.us is not None else ""
    return f"{result.call.choice.kernel} {dict(result.call.choice.config)}{time}"


def _print_tuned(results: Sequence[Tuned]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("operation", "shape", "best", "us", "before", "refused"):
        table.add_column(name, overflow="fold")
    for result in results:
        shape = " ".join(f"{name}={value}" for name, value in result.call.shape.items())
        refused = sum(each.us is None for each in result.candidates)
        table.add_row(
            result.call.name,
            shape,
            result.best.label,
            f"{result.best.us:.2f}",
            _before(result),
            f"{refused} of {len(result.candidates)}" if refused else "",
        )
    Console().print(table, markup=False)
