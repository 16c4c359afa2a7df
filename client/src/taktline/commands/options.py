"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str, typer.Option("--url", envvar="TAKTLINE_URL", help="The gateway, e.g. http://gateway:8080.", metavar="URL")
]
DEFAULT_URL = "http://127.0.0.1:8080"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

KeyFile = Annotated[
    str,
    typer.Option(
        "--api-key-file",
        envvar="TAKTLINE_API_KEY_FILE",
        help="File with the API key or token; or set TAKTLINE_API_KEY.",
        metavar="FILE",
    ),
]
CaFile = Annotated[
    str,
    typer.Option(
        "--ca-file", envvar="TAKTLINE_CA_FILE", help="Certificates to trust for an https gateway.", metavar="FILE"
    ),
]
ClientCert = Annotated[
    str,
    typer.Option(
        "--client-cert",
        envvar="TAKTLINE_CLIENT_CERT",
        help="Own certificate and key (PEM), where the gateway asks for one.",
        metavar="FILE",
    ),
]
