"""A planner on a cluster by Ray Serve: one Planner and a fixed number of WorldModels. Needs `taktline-worker[ray]`.

`taktline_worker.ray:app` is the builder that a Serve config names; `python -m taktline_worker.ray` runs it here.
"""

from __future__ import annotations

import os
from typing import Any

# Below a `uv run`, Ray would start its processes by `uv run`, too, in an environment that has neither it nor us.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


def app(args: dict[str, Any]) -> Any:
    """The Serve application of one planner (`application.build`, where the arguments are).

    Raises:
        TaktlineError: CONFIG_INVALID, CHECKPOINT_INVALID or SEARCH_INVALID, before anything is deployed.
    """
    # Only here: the rest of the worker runs without Ray.
    from taktline_worker.ray.application import build

    return build(args)
