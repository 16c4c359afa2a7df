"""The `taktline-dashboards` command: write the JSON files, check that they are up to date, or draw what they show."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_dashboards import pages

EXIT_REFUSED = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="taktline-dashboards", description="Taktline's Grafana dashboards.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    write = commands.add_parser("write", help="write the dashboards as JSON files that Grafana imports")
    write.add_argument("folder", type=Path, help="where to; files of dashboards that are no more are removed")
    write.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is not up to date")
    render = commands.add_parser(
        "render",
        help="draw dashboards as PNG from a Prometheus, where there is no Grafana",
        description="Asks a Prometheus the queries of each dashboard and draws the answers with matplotlib.",
    )
    render.add_argument("files", type=Path, nargs="+", help="dashboard JSON files")
    render.add_argument("--prometheus", required=True, metavar="URL", help="for example http://127.0.0.1:9090")
    render.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    render.add_argument("--minutes", type=float, default=60.0, help="length of the span (default %(default)s)")
    render.add_argument("--end", type=float, metavar="UNIX_S", help="end of the span (default: now)")
    render.add_argument("--rate", default="1m", help="window of rates (default %(default)s)")
    render.add_argument("--policy", default=".*", help="value of the variable policy (default: all)")
    return parser


def _render(options: argparse.Namespace) -> int:
    from taktline_dashboards.render import Source, draw  # matplotlib is slow to import, and an extra

    end_s = options.end or time.time()
    variables = {
        "policy": options.policy,
        "pool": ".*",
        "host": ".*",
        "__rate_interval": options.rate,
        "__range": f"{max(1, round(60 * options.minutes))}s",
    }
    source = Source(options.prometheus, end_s - 60 * options.minutes, end_s, variables)
    for file in options.files:
        out = options.out / f"{file.stem}.png"
        draw(json.loads(file.read_text()), source, out)
        print(out)
    return 0


def _write(options: argparse.Namespace) -> int:
    if options.check:
        stale = pages.stale(options.folder)
        for name in stale:
            print(f"{options.folder / name} is not up to date: run taktline-dashboards write {options.folder}")
        return 1 if stale else 0
    for name in pages.write(options.folder):
        print(options.folder / name)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 for a stale file (`write --check`), 2 for one that cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        return _render(options) if options.command == "render" else _write(options)
    except (OSError, json.JSONDecodeError) as error:
        refused = _unusable(error)
        print(f"taktline-dashboards: {refused}", file=sys.stderr)
        return EXIT_REFUSED


def _unusable(error: OSError | json.JSONDecodeError) -> TaktlineError:
    if isinstance(error, json.JSONDecodeError):
        return TaktlineError(
            ErrorCode.CONFIG_INVALID, f"a file is no dashboard: {error}", "give files that taktline-dashboards wrote"
        )
    reason = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
    return TaktlineError(ErrorCode.CONFIG_INVALID, reason, "name files and folders that this user may read and write")


if __name__ == "__main__":
    sys.exit(main())
