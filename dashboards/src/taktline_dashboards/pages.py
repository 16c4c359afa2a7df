"""All dashboards, and the text of each as Grafana imports it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from taktline_dashboards import fleet, platform, policy, pools, rollouts
from taktline_dashboards.page import Page

PAGES: dict[str, Callable[[], Page]] = {
    "fleet.json": fleet.page,
    "policy.json": policy.page,
    "pool.json": pools.page,
    "rollout.json": rollouts.page,
    "operator.json": platform.page,
}
"""File name and builder of each dashboard."""


def texts() -> dict[str, str]:
    """The content of each file."""
    return {
        name: json.dumps(json.loads(JSONEncoder().encode(page().build())), indent=1, sort_keys=True) + "\n"
        for name, page in PAGES.items()
    }


def stale(folder: Path) -> list[str]:
    """Names of the files in `folder` that are missing, differ, or belong to no dashboard."""
    wanted = texts()
    found = {path.name: path.read_text() for path in folder.glob("*.json")}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def write(folder: Path) -> list[str]:
    """Writes each file that is stale, removes what belongs to no dashboard, returns their names. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = stale(folder)
    wanted = texts()
    for name in changed:
        if name in wanted:
            (folder / name).write_text(wanted[name])
        else:
            (folder / name).unlink()
    return changed
