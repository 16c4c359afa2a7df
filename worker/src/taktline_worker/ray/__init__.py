"""A planner on a cluster by Ray Serve: one Planner and a fixed number of WorldModels. Needs `taktline-worker[ray]`.

`taktline_worker.ray:app` is the builder that a Serve config names; `python -m taktline_worker.ray` runs it here.
"""

from __future__ import annotations

from typing import Any


def app(args: dict[str, Any]) -> Any:
    """The Serve application of one planner (`application.build`, where the arguments are).

    Raises:
        TaktlineError: CONFIG_INVALID, CHECKPOINT_INVALID or SEARCH_INVALID, before anything is deployed.
    """
    # Only here: the rest of the worker runs without Ray.
    from taktline_worker.ray.application import build

    return build(args)
