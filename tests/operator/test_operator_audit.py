"""The counts that the steady state's measurement takes from an audit log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.operator import audit

OPERATOR = "system:serviceaccount:taktline-system:taktline-operator"


def event(verb: str, resource: str, user: str = OPERATOR, subresource: str = "", **more: Any) -> bytes:
    what = {"resource": resource} | ({"subresource": subresource} if subresource else {})
    found = {"stage": "ResponseComplete", "verb": verb, "user": {"username": user}, "objectRef": what} | more
    return json.dumps(found).encode() + b"\n"


def test_changes_are_counted_by_what_they_change(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(
        event("patch", "deployments")
        + event("patch", "policydeployments", subresource="status")
        + event("patch", "policydeployments", subresource="status")
        + event("update", "leases")
        + event("patch", "nodes", "admin", "status")
    )
    log = audit.AuditLog(path, OPERATOR)
    counts = log.read()
    assert counts == {
        audit.Change("patch", "deployments"): 1,
        audit.Change("patch", "policydeployments/status"): 2,
        audit.Change("update", "leases"): 1,
    }
    assert audit.split(counts) == (3, 1)
    assert log.others == {"admin": 1}


def test_a_log_is_read_as_it_grows_and_no_half_line_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    line = event("create", "events")
    path.write_bytes(line + line[:30])
    log = audit.AuditLog(path, OPERATOR)
    assert audit.split(log.read()) == (1, 0)
    with path.open("ab") as stream:
        stream.write(line[30:])
    assert audit.split(log.read()) == (2, 0)
    assert audit.split(log.read()) == (2, 0)


def test_a_request_counts_once_and_only_when_it_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(event("patch", "services", stage="ResponseStarted") + event("patch", "services"))
    assert audit.split(audit.AuditLog(path, OPERATOR).read()) == (1, 0)
