"""`taktline up FILE`: a PolicyDeployment on this machine, and robots that use it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_local import DEVICE_NOTICE

FLEET_GRACE_S = 5.0
INTERRUPTED = 130
DEFAULT_PORT = 8080
"""What the SDK and the commands ask where no URL is given."""


def up(
    file: Annotated[Path, typer.Argument(help="PolicyDeployment YAML, e.g. deploy/examples/demo-reach.yaml")],
    robots: Annotated[int, typer.Option(min=0, help="simulated robots in closed loop; 0 only serves")] = 4,
    workers: Annotated[int | None, typer.Option(min=1, help="workers of each pool; default what the file says")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="the gateway's port; 0 picks a free one")] = DEFAULT_PORT,
    episodes: Annotated[int, typer.Option(min=1, help="episodes each robot plays")] = 3,
    seed: Annotated[int, typer.Option(help="seed of the robots' scenes")] = 0,
    report: Annotated[Path, typer.Option(help="where the HTML report goes")] = Path(".taktline/report.html"),
    policy: Annotated[str | None, typer.Option(help="the robots' policy, where the file holds several")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="serve until Ctrl-C instead of starting robots")] = False,
    logs: Annotated[Path | None, typer.Option(help="folder for logs; default .taktline/runs/<time>")] = None,
) -> None:
    """Run a PolicyDeployment on this machine: workers, one gateway, and simulated robots that report at the end.

    Plain local processes, no cluster, no containers. Ctrl-C ends all of them.
    """
    if not file.is_file():
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, f"there is no file {file}", "name a PolicyDeployment, see deploy/examples"
        )
    folder = (logs or default_folder()).resolve()
    code = asyncio.run(
        run(
            file=file.resolve(),
            robots=0 if serve else robots,
            workers=workers,
            port=port,
            policy=policy,
            fleet_arguments=["--episodes", str(episodes), "--seed", str(seed), "--report", str(report)],
            folder=folder,
        )
    )
    if code:
        raise SystemExit(code)


def default_folder() -> Path:
    """A folder of its own for this run."""
    stamp = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return Path(".taktline") / "runs" / f"{stamp}-{os.getpid()}"


async def run(
    *,
    file: Path,
    robots: int,
    workers: int | None,
    port: int,
    policy: str | None,
    fleet_arguments: list[str],
    folder: Path,
) -> int:
    """Start, wait for the robots (or for Ctrl-C where there are none), stop; returns the exit code."""
    # The process runner brings gRPC and HTTP libraries, which `--help` can do without.
    from taktline_local.stack import EVENTS, Stack, StackOptions

    if (folder / EVENTS).exists():
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, f"{folder} has the logs of another run", "name another folder with --logs"
        )

    console = Console(stderr=True, highlight=False)
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    # File, port and policy are checked before anything is announced, or left behind.
    stack = Stack(StackOptions(file=file, folder=folder, port=port, workers=workers), say)
    chosen = choose_policy(stack.policies, policy)
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 (nothing else runs yet)
    say(f"{file.name} on this machine ({DEVICE_NOTICE}); logs: {folder}")
    with console.status("starting workers and gateway"):
        if not await unless(interrupted, stack.__aenter__()):
            return INTERRUPTED
    try:
        say(f"watch it live in a browser: {stack.url}/")
        if robots == 0:
            look = "taktline policies" + ("" if port == DEFAULT_PORT else f" --url {stack.url}")
            say(f"serving {', '.join(stack.policies)} at {stack.url}; try `{look}`; Ctrl-C ends it")
            await interrupted.wait()
            return 0
        return await run_fleet(stack.url, chosen, robots, fleet_arguments, interrupted)
    finally:
        with console.status("stopping"):
            await stack.stop()
        say(f"everything is stopped; logs: {folder}")


def choose_policy(policies: list[str], asked: str | None) -> str:
    """The policy that the robots use. Raises TaktlineError where the choice is not clear."""
    if asked is None and len(policies) == 1:
        return policies[0]
    if asked in policies:
        return str(asked)
    known = ", ".join(policies)
    problem = f"the file has no policy {asked}" if asked else "the file holds several policies"
    raise TaktlineError(ErrorCode.CONFIG_INVALID, problem, f"choose with --policy one of: {known}")


async def unless(interrupted: asyncio.Event, work: object) -> bool:
    """Await `work` unless the signal comes first; False when it did and the work was cancelled."""
    task = asyncio.ensure_future(work)  # type: ignore[call-overload]
    waiting = asyncio.create_task(interrupted.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return False
    task.result()
    return True


async def run_fleet(url: str, policy: str, robots: int, arguments: list[str], interrupted: asyncio.Event) -> int:
    """The robots, as a process of their own that draws its progress on this terminal; returns its exit code."""
    from taktline_local.child import Child
    from taktline_local.node import default_search_path

    command = ["taktline-demo", "fleet", "--url", url, "--policy", policy, "--robots", str(robots), *arguments]
    sys.stdout.flush()
    fleet = Child(command, log=None, env={**os.environ, "PATH": default_search_path()})
    if await unless(interrupted, fleet.wait()):
        return fleet.exit_code() or 0
    fleet.send(signal.SIGINT)
    await fleet.stop(FLEET_GRACE_S)
    return INTERRUPTED
