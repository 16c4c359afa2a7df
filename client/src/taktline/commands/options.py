"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str, typer.Option("--url", envvar="TAKTLINE_URL", help="The gateway, e.g. http://gateway:8080.", metavar="URL")
]
DEFAULT_URL = "http://127.0.0.1:8080"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
