"""Who asked the API server for which changes: counts of the local control plane's audit log, read as it grows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Change(NamedTuple):
    """One kind of change: HTTP's verb in Kubernetes' words, and the resource, with its subresource."""

    verb: str
    resource: str


class AuditLog:
    """Counts the changes of one user. An event counts when its answer was complete, whatever the answer was."""

    def __init__(self, path: Path, user: str) -> None:
        """`user` as the API server names it, such as `system:serviceaccount:NAMESPACE:NAME`."""
        self._path, self._user = path, user
        self._at = 0  # bytes read; always the end of a line
        self._counts: Counter[Change] = Counter()
        self.others: Counter[str] = Counter()  # changes by everybody else, by user

    def read(self) -> Counter[Change]:
        """All changes until now. Raises OSError where there is no log."""
        with self._path.open("rb") as log:
            log.seek(self._at)
            for line in log:
                if not line.endswith(b"\n"):
                    break  # the rest of it is still being written
                self._at += len(line)
                self._count(json.loads(line))
        return Counter(self._counts)

    def _count(self, event: dict[str, object]) -> None:
        asked, what = event.get("user"), event.get("objectRef")
        if event.get("stage") != "ResponseComplete" or not isinstance(asked, dict) or not isinstance(what, dict):
            return
        if asked.get("username") != self._user:
            self.others[str(asked.get("username"))] += 1
            return
        parts = [str(what["resource"]), *([str(what["subresource"])] if what.get("subresource") else [])]
        self._counts[Change(str(event["verb"]), "/".join(parts))] += 1


def split(counts: Counter[Change]) -> tuple[int, int]:
    """(changes that are no renewal of a Lease, renewals of a Lease)."""
    leases = sum(count for change, count in counts.items() if change.resource == "leases")
    return sum(counts.values()) - leases, leases
