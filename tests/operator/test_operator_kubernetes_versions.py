"""Chart, manifests and workers against the API schemas of three Kubernetes releases: no field that they do not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_operator_chart import CHART, find_helm

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("1.29", "1.33", "1.37")
# Kinds of others, whose schemas Kubernetes does not know.
FOREIGN = ("monitoring.coreos.com", "cert-manager.io", "taktline.dev")


SWITCHES = (
    "gateway.clientPorts[0].protocol=openpi,gateway.clientPorts[0].port=8000",
    "worker.tls.secret=w,worker.tls.clientAuth=true,gateway.workerTls.secret=g,gateway.tls.secret=t",
    "gateway.access.mode=keys,gateway.redis.secret=r,gateway.grootTokenSecret=o,imagePullSecrets[0].name=pull",
    "networkPolicy.enabled=true,operator.gatewayKeySecret=k,worker.images.jetson-thor=taktline/worker:1-arm64",
)


def rendered(*values: str) -> list[Json]:
    """The chart's objects for some values."""
    helm = find_helm()
    if helm is None:
        pytest.skip("there is no helm here: run tools/install-helm")
    command = [helm, "template", "taktline", str(CHART), "--namespace=factory", *values]
    reply = subprocess.run(command, capture_output=True, text=True, check=True)
    return [found for found in yaml.safe_load_all(reply.stdout) if found]


@pytest.fixture(scope="module")
def validator() -> Path:
    """The folder of tools/install-kubernetes-schemas."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taktline"
    found = sorted(cache.glob("kubernetes-schemas-*/kubernetes_validate"))
    if not found:
        pytest.skip("there are no Kubernetes schemas here: run tools/install-kubernetes-schemas")
    return found[-1].parent


def problems(validator: Path, version: str, objects: list[Json], folder: Path) -> str:
    """What is wrong with any of `objects`; empty where nothing is."""
    file = folder / f"objects-{version}.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "--kubernetes-version", version, str(file)]
    environment = os.environ | {"PYTHONPATH": str(validator)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    return "" if found.returncode == 0 else found.stdout + found.stderr


@pytest.fixture(scope="module")
def everything(make: Any) -> list[Json]:
    """The chart as it is and with every switch, the plain manifests, and all objects of policies of every form."""
    switched = [word for part in SWITCHES for word in ("--set", part)]
    objects = rendered() + rendered("-f", str(CHART / "values-ha.yaml"), *switched)
    for path in sorted((ROOT / "deploy" / "manifests").glob("*.yaml")):
        objects += [part for part in yaml.safe_load_all(path.read_text()) if part and part["kind"] != "Kustomization"]
    planner = {"family": "vjepa2-ac", "source": {"path": "/srv/x"}, "revision": "a"}
    mesh = {"interface": "eth0", "topologyKey": "rack"}
    pool = {"name": "line", "accelerator": "h100", "gpusPerNode": 8, "mesh": mesh}
    for parts in (
        {"pools": [{"name": "m", "accelerator": "h100", "migProfile": "1g.10gb", "spot": True, "startupSeconds": 300}]},
        {"pools": [{"name": "j", "accelerator": "jetson-thor", "nodeSelector": {"line": "3"}}]},
        {"model": planner, "engine": {"parallel": {"search": 16}}, "pools": [pool], "queue": {"name": "robots"}},
    ):
        policy = make.policy(**parts)
        observed = make.Observed(live=make.body(), now=make.now)
        objects += make.plan(policy, observed, make.settings).desired
    known = [found for found in objects if found["apiVersion"].partition("/")[0] not in FOREIGN]
    # The CRD is in there four times; validating it takes a while.
    return list({yaml.safe_dump(_shape(found)): found for found in known}.values())


def _shape(found: Json) -> Json:
    """What makes two objects the same to a schema."""
    return {"apiVersion": found["apiVersion"], **{key: part for key, part in found.items() if key != "metadata"}}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_that_the_release_knows(
    validator: Path, version: str, everything: list[Json], tmp_path: Path
) -> None:
    assert {"StatefulSet", "Deployment", "PodDisruptionBudget", "NetworkPolicy"} <= {o["kind"] for o in everything}
    assert problems(validator, version, everything, tmp_path) == ""


def test_an_unknown_field_would_be_found(validator: Path, tmp_path: Path) -> None:
    objects = [found for found in rendered() if found["kind"] == "Deployment"]
    objects[0]["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    assert "imagePullPolice" in problems(validator, VERSIONS[0], objects, tmp_path)
