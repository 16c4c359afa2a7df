"""Rows of the result files, which several runs fill: what a run does not measure stays as it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """One line of the results, in the form that all benchmarks share, with the engine's own details last."""

    policy: str
    shape: dict[str, int]
    batch: int
    median_ms: float
    p99_ms: float
    n: int
    floor_ms: float
    versions: dict[str, str]
    date: str
    peer: str = ""
    peer_median_ms: float | None = None
    ratio: float | None = None
    bench: str = "engine"
    dtype: str = "bf16"
    gpus: int = 1
    command: str = "python benchmarks/engine.py"
    details: dict[str, Any] = field(default_factory=dict)


def save_rows(target: Path, rows: Sequence[Row]) -> None:
    """Write `rows`, and behind them those of the file that are of other subjects or peers.

    A peer that stays is set beside the subject's newest time.
    """
    before = [Row(**one) for one in json.loads(target.read_text(encoding="utf-8"))] if target.is_file() else []
    newest = {_subject(row): row for row in rows}
    measured = {(*_subject(row), row.peer) for row in rows}
    kept: list[Row] = []
    for row in before:
        own = newest.get(_subject(row))
        if own is None:
            kept.append(row)
        elif row.peer and row.peer_median_ms and (*_subject(row), row.peer) not in measured:
            ratio = row.peer_median_ms / own.median_ms
            kept.append(replace(own, peer=row.peer, peer_median_ms=row.peer_median_ms, ratio=ratio))
    text = json.dumps([asdict(row) for row in (*rows, *kept)], indent=1)
    target.write_text(text + "\n", encoding="utf-8")


def _subject(row: Row) -> tuple[str, ...]:
    return row.policy, row.dtype, json.dumps(row.shape, sort_keys=True), str(row.batch)
