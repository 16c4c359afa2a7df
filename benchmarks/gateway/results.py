"""Committed rows of the gateway's benchmarks: a run replaces what it measured again, and leaves the rest."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Sequence[dict[str, Any]], command: str) -> None:
    """Writes rows with today's date; rows of the same bench and policy that are there already give way."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    renewed = {(row["bench"], row["policy"]) for row in rows}
    kept = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in kept if (row["bench"], row["policy"]) not in renewed]
    lines = [json.dumps(row) for row in (*kept, *({**row, "date": date, "command": command} for row in rows))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
