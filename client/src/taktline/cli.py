"""The `taktline` command: its own commands and those that installed members add, each loaded only when asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

GROUP = "taktline.commands"
_OWN = {
    "act": ("taktline.commands.act:act", "Send one observation to a policy and print the chunk."),
    "policies": ("taktline.commands.policies:policies", "List the policies that a gateway serves."),
    "bench-http": ("taktline.commands.bench_http:bench_http", "Load a gateway and print latency terms and misses."),
    "version": ("taktline.commands.version:version", "Print the versions of the installed members."),
}
# Help of known members' commands, so that `taktline --help` loads none of them.
_KNOWN = {
    "up": "Run a PolicyDeployment on this machine: gateway, workers and robots.",
    "checkpoint": "Look at policy checkpoints.",
    "model": "Bring checkpoints to this node, and look after those that are here.",
    "profile": "Measure the phases of a policy on this machine, against its roofline.",
    "profile-planner": "Measure a planner on several ranks and fit its latency model.",
    "bench": "Measure a part of the platform on this machine.",
    "kernels": "Say which kernel each operation gets and why; measure candidates on a GPU.",
    "rollout": "Look at and steer the rollout of a PolicyDeployment.",
}


def main() -> None:
    """Entry point. A typed error ends in one line on stderr and exit code 1."""
    if sys.argv[1:3] == ["profile", "planner"]:  # a folder of that name is ./planner
        sys.argv[1:3] = ["profile-planner"]
    app = build(next((argument for argument in sys.argv[1:] if not argument.startswith("-")), ""))
    try:
        app()
    except BrokenPipeError:
        # The reader of our output has had enough, as `| head` does.
        sys.stderr.close()
        raise SystemExit(0) from None
    except Exception as error:
        # The protocol loads numpy, which `--help` can do without.
        from taktline_protocol.errors import TaktlineError, of_files

        said = of_files(error) if isinstance(error, OSError) else error
        if not isinstance(said, TaktlineError):
            raise
        print(f"taktline: {said}", file=sys.stderr)
        raise SystemExit(1) from None


def build(chosen: str) -> typer.Typer:
    """The application with the command `chosen` loaded and every other one present by name and help only."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Serve robot policies at takt time. Set TAKTLINE_URL to your gateway.",
    )

    @app.callback()
    def root(
        shown: bool = typer.Option(
            False, "--version", help="Show the version and exit.", is_eager=True, callback=_print_version
        ),
    ) -> None:
        """Keeps the commands a group, however few are installed."""

    plugins = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name, (path, summary) in _OWN.items():
        _add(app, name, summary, partial(_resolve, path) if name == chosen else None)
    for name, entry in sorted(plugins.items()):
        if name not in _OWN:
            _add(app, name, _summary(entry), partial(_load, entry) if name == chosen else None)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"taktline {version('taktline')}")
        raise typer.Exit


def _add(app: typer.Typer, name: str, summary: str, load: Callable[[], Any] | None) -> None:
    if load is None:
        app.command(name, help=summary)(_placeholder)
        return
    command = load()
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _placeholder() -> None:
    """Stands for a command that was not asked for; never runs."""


def _summary(entry: EntryPoint) -> str:
    package = entry.dist.name if entry.dist is not None else entry.module
    return _KNOWN.get(entry.name, f"Added by {package}.")


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        # A broken member must not break the others; its own command says what is wrong.
        print(
            f"taktline: the command {entry.name!r} cannot be loaded: {error} (reinstall {entry.module})",
            file=sys.stderr,
        )
        raise SystemExit(1) from error
