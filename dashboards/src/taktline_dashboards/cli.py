"""The `taktline-dashboards` command: write the JSON files, or check that they are up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from taktline_dashboards import pages


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="taktline-dashboards", description="Taktline's Grafana dashboards.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    write = commands.add_parser("write", help="write the dashboards as JSON files that Grafana imports")
    write.add_argument("folder", type=Path, help="where to; files of dashboards that are no more are removed")
    write.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is not up to date")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 1 when `write --check` finds a stale file."""
    options = _parser().parse_args(arguments)
    if options.check:
        stale = pages.stale(options.folder)
        for name in stale:
            print(f"{options.folder / name} is not up to date: run taktline-dashboards write {options.folder}")
        return 1 if stale else 0
    for name in pages.write(options.folder):
        print(options.folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
