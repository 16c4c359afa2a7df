"""An operator on a cluster whose CRD is older than it needs says so and writes nothing."""

from __future__ import annotations

import copy
from typing import Any

from taktline_operator import schema, served_crd

Json = dict[str, Any]


def served(found: Json) -> Json:
    kind = {"group": "taktline.dev", "version": "v1alpha1", "kind": "PolicyDeployment"}
    return {"components": {"schemas": {"x": {"x-kubernetes-group-version-kind": [kind], **found}, "list": {}}}}


def test_the_own_crd_lacks_nothing() -> None:
    assert served_crd.missing(served(schema.object_schema())) == []


def test_an_older_crd_is_told_by_its_outermost_missing_parts() -> None:
    older = copy.deepcopy(schema.object_schema())
    del older["properties"]["status"]["properties"]["rollout"]
    del older["properties"]["spec"]["properties"]["pools"]["items"]["properties"]["costPerHour"]
    assert served_crd.missing(served(older)) == ["spec.pools[].costPerHour", "status.rollout"]


def test_a_newer_crd_is_no_hindrance() -> None:
    newer = copy.deepcopy(schema.object_schema())
    newer["properties"]["spec"]["properties"]["future"] = {"type": "string"}
    assert served_crd.missing(served(newer)) == []


def test_an_api_server_that_publishes_no_schema_is_not_a_reason_to_stop() -> None:
    assert served_crd.missing({}) == []
    assert served_crd.missing({"components": {"schemas": {}}}) == []
