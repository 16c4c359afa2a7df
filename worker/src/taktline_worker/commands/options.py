"""Arguments that the measuring commands share, and how they talk while they measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from taktline_worker.idle_threads import let_others_run

if TYPE_CHECKING:
    from taktline_worker.adapter import Profile

PolicyArgument = Annotated[
    str,
    typer.Argument(
        metavar="POLICY",
        help="A checkpoint folder, a worker's engine.json, or a policy of full size with random weights: random:FAMILY "
        "(pi05, pi0, gr00t-n1.7, minicpm-robot, cosmos3-nano, cosmos3-edge; of the last two also -paper, a benchmark's "
        "shape).",
    ),
]
BatchesOption = Annotated[str, typer.Option("--batches", help="Batch sizes, separated by commas.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
PrecisionOption = Annotated[str, typer.Option(help="fp32, bf16 or fp8; default: the config's on a GPU, fp32 on a CPU.")]
QuantisationOption = Annotated[
    str,
    typer.Option(help="Keep the action expert's matrices in fp8 or int8 (pi05, pi0); default: as the config says."),
]
ViewsOption = Annotated[int, typer.Option(help="Cameras a row; 0 takes the policy's.")]
PromptOption = Annotated[int, typer.Option("--prompt-tokens", help="Prompt tokens a row; 0 takes the longest prompt.")]
StatisticsOption = Annotated[
    str, typer.Option("--statistics", help="openpi asset id or embodiment tag, where the folder holds several.")
]
StepsOption = Annotated[int, typer.Option("--steps", help="Solver steps; 0 takes the checkpoint's.")]
HorizonOption = Annotated[int, typer.Option("--horizon", help="Actions a chunk; 0 takes the checkpoint's.")]
RunsOption = Annotated[int, typer.Option("--runs", min=3, help="Runs of each measurement.")]
LimitOption = Annotated[
    float, typer.Option("--limit-s", min=0.0, help="Seconds after which a measurement ends with the runs it has.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the rows as JSON, and nothing else, to stdout.")]


def read_batches(text: str, what: str = "batch sizes", option: str = "--batches") -> tuple[int, ...]:
    """`1,2,4` as numbers. Raises typer.BadParameter for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of {what}; write 1,2,4", param_hint=option) from None


def check_place(device: str, precision: str) -> None:
    """Raises typer.BadParameter for a device or a precision that there is not."""
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is no device; write auto, cpu or cuda", param_hint="--device")
    if precision not in ("", "fp32", "bf16", "fp8"):
        raise typer.BadParameter(f"{precision!r} is no precision; write fp32, bf16 or fp8", param_hint="--precision")


def check_quantisation(quantisation: str) -> Literal["", "fp8", "int8"]:
    """The format of stored weights. Raises typer.BadParameter for one that there is not."""
    formats: dict[str, Literal["", "fp8", "int8"]] = {"": "", "fp8": "fp8", "int8": "int8"}
    if quantisation not in formats:
        text = f"{quantisation!r} is no format of weights; write fp8 or int8"
        raise typer.BadParameter(text, param_hint="--quantisation")
    return formats[quantisation]


def open_profile(
    policy: str,
    batches: tuple[int, ...],
    device: str,
    precision: str,
    views: int,
    prompt_tokens: int,
    steps: int,
    horizon: int,
    quantisation: str = "",
    statistics: str = "",
) -> Profile:
    """The policy, loaded; torch is imported here. Raises TaktlineError where it is refused."""
    check_place(device, precision)
    stored = check_quantisation(quantisation)
    let_others_run()  # as a worker does: what is measured here is what it will take
    from taktline_worker.profiling.subject import Request, check_batches, open_subject

    return open_subject(
        Request(
            policy=policy,
            batches=check_batches(batches),
            device=device,
            precision=precision,
            views=views,
            prompt_tokens=prompt_tokens,
            solver_steps=steps,
            action_horizon=horizon,
            quantisation=stored,
            statistics=statistics,
        )
    )


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """One line on stderr that says what is being done; plain lines where stderr is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(text, markup=False, highlight=False)
        return
    with console.status("loading") as status:
        yield status.update
