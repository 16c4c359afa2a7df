"""Rewriting of container paths and addresses, and `$(NAME)` references, as containers mean them."""

from __future__ import annotations

from pathlib import Path

import pytest
from taktline_local.fields import ContainerConfigError, expand, field_value
from taktline_local.paths import LocalPaths, bind_address, mount_places

PATHS = LocalPaths({"/etc/taktline": Path("/pod/engine"), "/models/": Path("/data/m"), "/models/x": Path("/data/x")})


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("/etc/taktline/engine.json", "/pod/engine/engine.json"),
        ("--config=/etc/taktline/engine.json", "--config=/pod/engine/engine.json"),
        ('{"path": "/models"}', '{"path": "/data/m"}'),
        ("/models/x/y", "/data/x/y"),
        ("/models/xy", "/data/m/xy"),
        ("/models:/etc/taktline", "/data/m:/pod/engine"),
        ("ends with /models.", "ends with /data/m."),
        # Not the mount itself: parts of other paths, longer names.
        ("/other/models", "/other/models"),
        ("/models-old", "/models-old"),
        ("/models.bak", "/models.bak"),
        ("file:///models", "file:///models"),
    ],
)
def test_mounted_paths_are_rewritten_whole(text: str, rewritten: str) -> None:
    assert PATHS.rewrite(text) == rewritten


def test_nothing_mounted_nothing_rewritten() -> None:
    assert LocalPaths({}).rewrite("/models") == "/models"


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("0.0.0.0:50051", "127.70.0.2:50051"),
        ("[::]:50051", "127.70.0.2:50051"),
        ("--listen=0.0.0.0", "--listen=127.70.0.2"),
        ("10.0.0.0", "10.0.0.0"),
        ("0.0.0.0.1", "0.0.0.0.1"),
    ],
)
def test_every_address_becomes_the_pods_own(text: str, bound: str) -> None:
    assert bind_address(text, "127.70.0.2") == bound


def test_sub_paths_lead_into_their_volume() -> None:
    mounts = [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b", "subPath": "deep/file"}]
    pod = {"spec": {"containers": [{"name": "c", "volumeMounts": mounts}]}}
    assert mount_places(pod, {"v": Path("/vol")}) == {"/a": Path("/vol"), "/b": Path("/vol/deep/file")}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)/$(B)", "1/2"),
        ("$$(A)", "$(A)"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$A ${A} $", "$A ${A} $"),
        ("$$$(A)", "$1"),
    ],
)
def test_references_expand_as_in_containers(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expanded


def test_downward_fields() -> None:
    pod = {
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a/b": "c"}},
        "spec": {"nodeName": "here"},
    }
    assert field_value(pod, "127.0.0.2", "127.0.0.1", "metadata.labels['a/b']") == "c"
    assert field_value(pod, "127.0.0.2", "127.0.0.1", "metadata.annotations['none']") == ""
    assert field_value(pod, "127.0.0.2", "127.0.0.1", "status.hostIP") == "127.0.0.1"
    with pytest.raises(ContainerConfigError, match=r"status\.phase"):
        field_value(pod, "127.0.0.2", "127.0.0.1", "status.phase")
