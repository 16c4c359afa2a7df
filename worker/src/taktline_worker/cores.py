"""How many processors this process may keep busy: those it may run on, or what its control groups let it use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1. Part of a processor counts as none: threads that wait awake would burn it.

    Args:
        root: where `proc` and `sys` are.
    """
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Processors' time by each group above this process that limits it, as cgroups(7) has them, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = mount / path.lstrip("/")
        # In a container the path may be the host's, of which only the mount is there: its own group.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            quota = _quota(folder, first=bool(controllers))
            if quota is not None:
                yield quota


def _quota(folder: Path, *, first: bool) -> float | None:
    """Of one group, of the first version where `first`; None where it has no limit."""
    try:
        if first:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        else:
            quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # `max` is no number
        return None
