"""`taktline-operator plan`: the planner on files, for `taktline up` and for reading what an apply would do."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_operator import naming, routing, spec
from taktline_operator.plan import Observed, Ref, Settings, plan, ref_of

Json = dict[str, Any]


def read_policies(path: Path, say: Callable[[str], None] = lambda _: None) -> list[Json]:
    """The PolicyDeployments of a YAML file; relative model folders become absolute, counted from the file's folder.

    Args:
        say: hears how each relative folder was resolved.

    Raises:
        TaktlineError: CONFIG_INVALID; the file is absent, no YAML, or holds anything else.
    """
    try:
        documents = [part for part in yaml.safe_load_all(path.read_text()) if part is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"cannot read {path}: it is no YAML{where}: {reason}",
            "correct that line and try again",
        ) from error
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, f"cannot read {path}: {reason}", "name a PolicyDeployment YAML file"
        ) from error
    if not documents or not all(isinstance(part, dict) for part in documents):
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"{path} holds no PolicyDeployment",
            "see deploy/examples for complete files",
        )
    for document in documents:
        _resolve_path(document, path.parent, say)
    return documents


def _resolve_path(document: Json, folder: Path, say: Callable[[str], None]) -> None:
    found: Any = document
    for name in ("spec", "model", "source"):
        found = found.get(name) if isinstance(found, dict) else None
    if isinstance(found, dict) and isinstance(found.get("path"), str) and found["path"]:
        given, resolved = found["path"], (folder / found["path"]).resolve()
        found["path"] = str(resolved)
        if not Path(given).is_absolute():
            missing = "" if resolved.is_dir() else "; there is no such folder on this machine"
            say(f"spec.model.source.path {given} is {resolved}, counted from the folder of the file{missing}")


def read_observed(path: Path | None) -> list[Json]:
    """Objects of a JSON List, as `kubectl get deploy,svc,cm,pdb,pods -o json` prints it; none without a path.

    Raises:
        TaktlineError: CONFIG_INVALID; the file is absent or not such a list.
    """
    if path is None:
        return []
    try:
        items = json.loads(path.read_text())["items"]
        return [item for item in items if isinstance(item["metadata"]["name"], str)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"cannot read {path}: {type(error).__name__} {error}",
            "give a JSON List of objects, as `kubectl get pods -o json` prints it",
        ) from error


def planned_list(bodies: list[Json], items: list[Json], settings: Settings) -> Json:
    """A JSON List: each policy's objects, the routing table, and the PolicyDeployments with their status.

    Without metadata.uid (a file that never met an API server) the objects carry no owner reference.

    Raises:
        TaktlineError: CONFIG_INVALID; a PolicyDeployment does not fit the CRD.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    policies = [spec.parse(body) for body in bodies]
    owners = routing.owners({policy.key: policy.created for policy in policies})
    objects: list[Json] = []
    planned: list[Json] = []
    routes = []
    for policy, body in zip(policies, bodies, strict=True):
        owner = owners[policy.name]
        own = [item for item in items if _belongs(item, policy)]
        previous = next((item for item in items if _is_self(item, policy)), body)
        observed = Observed(
            live=body | {"status": previous.get("status", {})},
            now=now,
            children={ref_of(item): item for item in own if item.get("kind") != "Pod"},
            pods=[item for item in own if item.get("kind") == "Pod"],
            name_owner=owner if owner != policy.key else None,
        )
        result = plan(policy, observed, settings)
        objects += result.desired
        planned.append(body | {"status": result.status})
        routes += [result.route] if result.route else []
    table = routing.config_map(routing.table(routes), settings.gateway_namespace)
    return {"apiVersion": "v1", "kind": "List", "items": [*objects, table, *planned]}


def _belongs(item: Json, policy: spec.PolicyDeployment) -> bool:
    metadata = item["metadata"]
    here = metadata.get("namespace", "default") == policy.namespace
    return bool(here and metadata.get("labels", {}).get(naming.LABEL_POLICY) == policy.name)


def _is_self(item: Json, policy: spec.PolicyDeployment) -> bool:
    metadata = item["metadata"]
    ref = Ref("PolicyDeployment", policy.name)
    return ref_of(item) == ref and metadata.get("namespace", "default") == policy.namespace
