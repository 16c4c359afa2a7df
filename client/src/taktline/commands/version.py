"""`taktline version`: what is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import typer

MEMBERS = (
    "taktline",
    "taktline-protocol",
    "taktline-gateway",
    "taktline-worker",
    "taktline-kernels",
    "taktline-operator",
    "taktline-local",
)


def version() -> None:
    """Print the versions of the installed members."""
    for member in MEMBERS:
        try:
            typer.echo(f"{member} {installed(member)}")
        except PackageNotFoundError:
            continue
