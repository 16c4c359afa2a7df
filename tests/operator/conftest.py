"""Builders of PolicyDeployments, pods and children, and an API double that counts what is written."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from taktline_operator import naming, spec, workload
from taktline_operator.kube import ApiError
from taktline_operator.plan import Observed, Settings, desired_objects, plan, ref_of

sys.path.insert(0, str(Path(__file__).parent))  # for simulated_cluster, which several test files share

Json = dict[str, Any]
NOW = "2026-03-01T08:00:00Z"
LATER = "2026-03-01T09:00:00Z"
SETTINGS = Settings(image="registry.example/worker:1")


def body(name: str = "reach", namespace: str = "line-1", uid: str = "uid-1", **parts: Any) -> Json:
    """A complete PolicyDeployment as the API server returns it; `parts` replace fields of its spec."""
    return {
        "apiVersion": "taktline.dev/v1alpha1",
        "kind": "PolicyDeployment",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid,
            "generation": 1,
            "creationTimestamp": "2026-02-01T00:00:00Z",
            "resourceVersion": "1",
        },
        "spec": {
            "model": {"family": "pi05", "source": {"path": "/srv/policies/reach"}, "revision": "a"},
            "pools": [{"name": "cpu", "accelerator": "cpu"}],
            "slo": {"controlBudgetMs": 100},
            **parts,
        },
    }


def policy(**parts: Any) -> spec.PolicyDeployment:
    """The same, parsed."""
    return spec.parse(body(**parts))


def pod(
    name: str,
    ip: str = "10.0.0.1",
    *,
    owner: spec.PolicyDeployment | None = None,
    pool: str = "cpu",
    ready: bool = True,
    template: str | None = None,
    **status: Any,
) -> Json:
    """A worker pod, by default ready and built from the current template of `owner`'s pool."""
    found = owner or policy()
    spec_pool = next((part for part in found.spec.pools if part.name == pool), found.spec.pools[0])
    current = workload.pod_template(found, spec_pool, SETTINGS.image)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": found.namespace,
            "labels": naming.labels(found.name, pool),
            "annotations": {
                naming.ANNOTATION_REVISION: found.spec.revision(),
                naming.ANNOTATION_TEMPLATE: template or workload.template_hash(current),
            },
        },
        "spec": {"volumes": copy.deepcopy(current["spec"]["volumes"])},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            **status,
        },
    }


def applied(found: spec.PolicyDeployment) -> dict[Any, Json]:
    """All children as they are after a first apply."""
    return {ref_of(child): child for child in desired_objects(found, SETTINGS)}


def _copied(found: Any) -> Any:
    """A copy of JSON data; `copy.deepcopy` takes several times as long, and is most of what a simulated day costs."""
    if isinstance(found, dict):
        return {name: _copied(value) for name, value in found.items()}
    return [_copied(value) for value in found] if isinstance(found, list | tuple) else found


class ApiDouble:
    """Not Kubernetes: a dictionary with the operator's six calls. It counts writes and can fail at any of them."""

    def __init__(self, *objects: Json) -> None:
        self.objects = {self._key(found): _copied(found) for found in objects}
        self.writes: list[tuple[str, str]] = []
        self.calls = 0
        self.fail_at: int | None = None
        self.installed: dict[str, frozenset[str]] = {}  # kinds of other products, by group and version
        self.monitoring: frozenset[str] = frozenset()  # kinds of the Prometheus operator that are installed

    @staticmethod
    def _key(found: Json) -> tuple[str, str, str]:
        return found["kind"], found["metadata"]["namespace"], found["metadata"]["name"]

    def _call(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise ApiError(500, "InternalError", "the double was told to fail")

    def of_kind(self, kind: str) -> list[Json]:
        """All objects of a kind, by name."""
        return [found for key, found in sorted(self.objects.items()) if key[0] == kind]

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        self._call()
        return _copied(self.objects.get((kind, namespace, name)))

    async def exists(self, kind: str, namespace: str, name: str) -> bool:
        self._call()
        return (kind, namespace, name) in self.objects

    async def list(
        self, kind: str, namespace: str | None, selector: str = "", *, metadata_only: bool = False, name: str = ""
    ) -> list[Json]:
        self._call()
        wanted = [part.partition("=") for part in selector.split(",") if part]
        return [
            _copied(found)
            for found in self.of_kind(kind)
            if namespace in (None, found["metadata"]["namespace"])
            and name in ("", found["metadata"]["name"])
            and all(
                found["metadata"].get("labels", {}).get(key) == value if mark else key in found["metadata"]["labels"]
                for key, mark, value in wanted
            )
        ]

    async def group_versions(self) -> frozenset[str]:
        self._call()
        return frozenset(self.installed) | (frozenset({"monitoring.coreos.com/v1"}) if self.monitoring else frozenset())

    async def kinds(self, group_version: str) -> frozenset[str]:
        self._call()
        if group_version == "monitoring.coreos.com/v1":
            return self.monitoring
        return self.installed.get(group_version, frozenset())

    async def apply(self, desired: Json, subresource: str = "") -> Json:
        self._call()
        key = self._key(desired)
        self.writes.append((f"apply {subresource}".strip(), "/".join(key)))
        if subresource == "status":
            if key not in self.objects:
                raise ApiError(404, "NotFound", "no such object")
            self.objects[key]["status"] = _copied(desired["status"])
            return self.objects[key]
        self.objects[key] = _merged(self.objects.get(key, {}), desired)
        return self.objects[key]

    async def annotate(self, kind: str, namespace: str, name: str, annotations: dict[str, str]) -> None:
        self._call()
        self.writes.append(("annotate", f"{kind}/{namespace}/{name}"))
        self.objects[kind, namespace, name]["metadata"].setdefault("annotations", {}).update(annotations)

    async def create(self, found: Json) -> bool:
        self._call()
        key = self._key(found)
        if key in self.objects:
            return False
        self.writes.append(("create", "/".join(key)))
        self.objects[key] = _copied(found)
        return True

    async def delete(self, kind: str, namespace: str, name: str, uid: str, version: str = "") -> None:
        self._call()
        live = self.objects.get((kind, namespace, name), {"metadata": {"uid": uid, "resourceVersion": version}})
        seen = {"uid": uid} | ({"resourceVersion": version} if version else {})
        if any(live["metadata"].get(field, "") != value for field, value in seen.items()):
            raise ApiError(409, "Conflict", "Precondition failed")
        self.writes.append(("delete", f"{kind}/{namespace}/{name}"))
        self.objects.pop((kind, namespace, name), None)


def _merged(live: Any, desired: Any) -> Any:
    if isinstance(live, dict) and isinstance(desired, dict):
        return live | {name: _merged(live.get(name), value) for name, value in desired.items()}
    return _copied(desired)


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The builders, as attributes."""
    return SimpleNamespace(
        body=body,
        policy=policy,
        pod=pod,
        applied=applied,
        plan=plan,
        Observed=Observed,
        Api=ApiDouble,
        settings=SETTINGS,
        now=NOW,
        later=LATER,
    )
