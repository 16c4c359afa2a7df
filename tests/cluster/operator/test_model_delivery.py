"""A checkpoint that comes by HTTP: fetched by real init containers on a real control plane, told in the status."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from taktline_local.cluster import Cluster
from taktline_local.kubectl import wait_until
from taktline_worker.delivery.cache import Cache
from taktline_worker.delivery.prune import in_use, prune

from tests.delivery.mirror import Mirror, serving

pytestmark = pytest.mark.usefixtures("running_operator", "cluster")

Json = dict[str, Any]
CHECKPOINT = Path(__file__).resolve().parents[3] / "demo" / "checkpoint"
WEIGHTS = "/demo/model.safetensors"


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    """A mirror with the demo's checkpoint."""
    with serving(Mirror()) as started:
        paths = [path for path in CHECKPOINT.rglob("*") if path.is_file()]
        started.put("demo", {str(path.relative_to(CHECKPOINT)): path.read_bytes() for path in paths})
        yield started


def body(policies: Any, mirror: Mirror, name: str, cache: Path, **http: str) -> Json:
    pin = hashlib.sha256(mirror.files["/demo/SHA256SUMS"]).hexdigest()
    pool = {
        "name": "line",
        "accelerator": "cpu",
        "minReplicas": 2,
        "nodeSelector": {"taktline.dev/pool": "cpu"},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
    }
    return policies.body(
        name,
        model={"family": "pi05", "source": {"http": {"url": f"{mirror.url}/demo", "sha256": pin} | http}},
        engine={"precision": "fp32", "buckets": [1]},
        pools=[pool],
        slo={"controlBudgetMs": 500},
        delivery={"cache": {"hostPath": str(cache)}},
    )


def test_two_workers_of_a_node_fetch_once_and_serve(policies: Any, cluster: Cluster, mirror: Mirror, tmp_path: Path):
    cache = tmp_path / "models"
    half = len(mirror.files[WEIGHTS]) // 2
    mirror.fault = lambda asked: (
        {"cut": half, "stall": True} if asked.method == "GET" and asked.path == WEIGHTS else None
    )
    policies.kubectl.apply(body(policies, mirror, "pick-fetched", cache))

    def percent() -> int:
        live = policies.get("pick-fetched") or {}
        return int(live.get("status", {}).get("delivery", {}).get("percent", 0))

    policies.wait("pick-fetched", "ModelDelivery", "Unknown", "Downloading")
    wait_until(lambda: 0 < percent() < 100, "the status says how far it is")
    mirror.fault = lambda asked: None
    mirror.released.set()
    policies.wait("pick-fetched", "Available", "True")
    policies.wait("pick-fetched", "Progressing", "False", "Complete")
    found = policies.wait("pick-fetched", "ModelDelivery", "True", "Verified")
    assert "its 2 workers" in found["message"]
    whole = sum(len(data) for data in set(mirror.files.values()))  # files of one content come once
    assert mirror.served_bytes == whole, "two pods of a node fetched each byte once, one of them after a cut"
    (record,) = Cache(cache).records()
    assert in_use(Cache(cache), record.key)
    assert prune(Cache(cache), 0, min_age_s=0).in_use == [record.key]


def test_a_wrong_digest_is_told_with_what_to_do_and_a_corrected_one_serves(
    policies: Any, mirror: Mirror, tmp_path: Path
):
    right = mirror.files[WEIGHTS]
    mirror.files[WEIGHTS] = right[:-1] + bytes([right[-1] ^ 1])
    policies.kubectl.apply(body(policies, mirror, "pick-wrong", tmp_path / "models"))
    found = policies.wait("pick-wrong", "ModelDelivery", "False", "ModelMismatch")
    for data in (right, mirror.files[WEIGHTS]):
        assert hashlib.sha256(data).hexdigest() in found["message"]
    assert "put the right file there" in found["message"]
    policies.wait("pick-wrong", "Degraded", "True", "CrashLoopBackOff")
    policies.wait("pick-wrong", "Available", "False")
    mirror.files[WEIGHTS] = right
    policies.wait("pick-wrong", "ModelDelivery", "True", "Verified")
