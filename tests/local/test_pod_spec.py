"""What a Pod may ask of plain processes: refusals by name, unenforced fields by name, everything else silent."""

from __future__ import annotations

from typing import Any

import pytest
from taktline_local.pod_spec import not_enforced, refusals

Object = dict[str, Any]


def pod(container: Object | None = None, **spec: Any) -> Object:
    return {"spec": {"containers": [{"name": "main", "command": ["true"], **(container or {})}], **spec}}


def test_ordinary_pod_is_accepted_and_silent() -> None:
    ordinary = pod(
        {
            "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
        },
        volumes=[{"name": "v", "emptyDir": {}}, {"name": "bare"}],
    )
    assert refusals(ordinary) == []
    assert not_enforced(ordinary) == []


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (pod({"command": []}), "no command"),
        (pod({"tty": True}), "tty"),
        (pod({"volumeDevices": [{"name": "d", "devicePath": "/dev/x"}]}), "volumeDevices"),
        (pod({"lifecycle": {"postStart": {"exec": {"command": ["true"]}}}}), "postStart"),
        (pod({"volumeMounts": [{"name": "v", "mountPath": "/"}]}), "at /"),
        (pod({"volumeMounts": [{"name": "v", "mountPath": "/v", "subPathExpr": "$(A)"}]}), "subPathExpr"),
        (pod({"env": [{"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "x"}}}]}), "resourceFieldRef"),
        (pod(volumes=[{"name": "v", "nfs": {"server": "s", "path": "/"}}]), "kind nfs"),
        (pod(volumes=[{"name": "v", "projected": {"sources": [{"clusterTrustBundle": {}}]}}]), "clusterTrustBundle"),
        (pod(initContainers=[{"name": "s", "command": ["x"], "restartPolicy": "Always"}]), "keep running"),
        (pod(resourceClaims=[{"name": "gpu"}]), "resource claims"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_by_name(asked: Object, named: str) -> None:
    found = refusals(asked)
    assert len(found) == 1
    assert named in found[0]


def test_one_path_for_two_volumes_is_refused() -> None:
    two = pod({"volumeMounts": [{"name": "a", "mountPath": "/x"}]})
    two["spec"]["containers"].append(
        {"name": "other", "command": ["true"], "volumeMounts": [{"name": "b", "mountPath": "/x/"}]}
    )
    assert "/x" in refusals(two)[0]


def test_what_has_no_effect_is_named() -> None:
    asked = pod({"image": "worker:1", "securityContext": {"runAsUser": 1}}, hostNetwork=True)
    assert not_enforced(asked) == ["containers.image", "containers.securityContext", "spec.hostNetwork"]
