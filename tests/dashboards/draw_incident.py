"""Tells the scripted incident and draws every dashboard of it: python -m tests.dashboards.draw_incident FOLDER."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from taktline_dashboards import cli

from .conftest import ROOT
from .incident import SLOW, Incident


def main() -> None:
    out, programs = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        run = Incident(programs, Path(folder))
        try:
            record = run.tell()
            minutes = (record.ended - record.began) / 60
            span = ["--prometheus", run.prometheus.url, "--minutes", str(minutes), "--end", str(record.ended)]
            for path in sorted((ROOT / "dashboards/grafana").glob("*.json")):
                policy = SLOW if path.stem == "policy" else ".*"
                cli.main(["render", str(path), *span, "--out", str(out), "--rate", "5s", "--policy", policy])
            print(record.fired)
        finally:
            run.stop()


if __name__ == "__main__":
    main()
