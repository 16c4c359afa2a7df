"""What the operator writes while nothing changes, counted by the API server's own audit log.

    python -m benchmarks.operator.steady --out benchmarks/results/cpu/operator_steady.json      an hour
    python -m benchmarks.operator.steady --quiet-s 60                                           a look
    python -m benchmarks.operator.steady --without nowhere                 an hour in which nothing changes at all

A real control plane (`make control-plane`), the operator with its own service account and a Lease, simulated nodes, and
PolicyDeployments of every kind: plain, a mesh in one pod, a group of pods, scaled by a demand that has noise, one that
was rolled out in steps, one placed by cost, one that fetches its checkpoint, one that fits no node, one refused.
Renewals of the operator's Lease are counted apart: they are what a Lease is. What fits no node (`nowhere`) is declared
stalled at its progress deadline, half an hour after it was applied: one Event and one status, within an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import yaml
from taktline_local.cluster import Cluster
from taktline_local.cluster_demo import MANIFESTS
from taktline_local.kube_api import ApiError, KubeApi
from taktline_local.kubectl import wait_until
from taktline_protocol import metrics

from benchmarks.operator import audit
from benchmarks.operator.noisy_gateway import GATEWAY, SYSTEM, NoisyGateway
from benchmarks.operator.operator_process import Operator, Reading, until
from benchmarks.operator.simulated_nodes import SimulatedNodes

Json = dict[str, Any]
NAMESPACE = "steady"
ACCOUNT = "taktline-operator"
USER = f"system:serviceaccount:{SYSTEM}:{ACCOUNT}"
PDS = f"/apis/taktline.dev/v1alpha1/namespaces/{NAMESPACE}/policydeployments"
RATE = 12.0  # observations a second of the scaled policy
SAMPLE_S = 30.0
STILL_S = 60.0  # without a write before the counting begins
NO_DIGEST = "0" * 64
OURS = {"measurement": "steady"}
"""Label of this measurement's simulated nodes: on others of the cluster real processes may be started."""


def policies() -> dict[str, Json]:
    """Specs by name."""
    model = {"family": "pi05", "source": {"path": "/srv/policy"}, "revision": "a"}
    slo = {"controlBudgetMs": 250}
    line = {"name": "line", "accelerator": "h100", "minReplicas": 2, "maxReplicas": 6}
    cosmos = {"family": "cosmos3-nano", "source": {"path": "/srv/cosmos"}, "revision": "a"}
    planner = {"family": "vjepa2-ac", "source": {"path": "/srv/planner"}, "revision": "a"}
    fetched = {"http": {"url": "https://models.example/reach", "sha256": NO_DIGEST}}
    times = [{"batch": 1, "medianMs": 100, "p99Ms": 110}, {"batch": 8, "medianMs": 300, "p99Ms": 360}]
    scaled = line | {"minReplicas": 1, "maxReplicas": 8}
    spread = {"minReplicas": 0, "maxReplicas": 4, "profile": times[:1]}
    one = {"buckets": [1]}
    return {
        "plain": {"model": model, "pools": [line], "slo": slo},
        "processor": {
            "model": model,
            "pools": [{"name": "cpu", "accelerator": "cpu", "minReplicas": 3, "nodeSelector": OURS}],
            "slo": slo,
        },
        "mesh": {
            "model": cosmos,
            "engine": one | {"parallel": {"cfg": 2, "tp": 2}},
            "pools": [{"name": "mesh", "accelerator": "h100"}],
            "slo": {"controlBudgetMs": 600},
        },
        "group": {
            "model": planner,
            "engine": one | {"parallel": {"search": 4}},
            "pools": [{"name": "planner", "accelerator": "h100", "gpusPerNode": 2}],
            "slo": {"controlBudgetMs": 4000},
        },
        "scaled": {
            "model": model,
            "pools": [scaled],
            "slo": {"controlBudgetMs": 1000},
            "scaling": {"downCooldownSeconds": 30},
        },
        "stepwise": {"model": model, "pools": [line], "slo": slo, "rollout": {"strategy": "Progressive"}},
        "placed": {
            "model": model,
            "pools": [
                spread | {"name": "fast", "accelerator": "h100", "costPerHour": 3.0},
                spread | {"name": "cheap", "accelerator": "cpu", "costPerHour": 0.5},
            ],
            "slo": {"controlBudgetMs": 400},
            "replicas": 1,
            "placement": {"mode": "Cheapest"},
        },
        "fetched": {"model": model | {"source": fetched}, "pools": [line], "slo": slo},
        "nowhere": {"model": model, "pools": [line | {"nodeSelector": {"no-such": "label"}}], "slo": slo},
        "refused": {
            "model": model,
            "pools": [line | {"resources": {"requests": {"memory": "24Gi"}, "limits": {"memory": "8Gi"}}}],
            "slo": slo,
        },
    }


def operator_kubeconfig(cluster: Cluster, folder: Path) -> Path:
    """A kubeconfig with the operator's own service account, for longer than the measurement takes."""
    token = cluster.kubectl("-n", SYSTEM, "create", "token", ACCOUNT, "--duration=12h").strip()
    found = yaml.safe_load(cluster.kubeconfig.read_text())
    found["users"] = [{"name": user["name"], "user": {"token": token}} for user in found["users"]]
    path = folder / "operator-kubeconfig"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(found))
    return path


async def gone(api: KubeApi, path: str) -> bool:
    """Whether there is no such object."""
    try:
        await api.get(path)
    except ApiError as error:
        return error.status == 404
    except httpx.TransportError:
        return False
    return False


class Steady:
    """The measurement."""

    def __init__(self, api: KubeApi, operator: Operator, log: audit.AuditLog, still_s: float) -> None:
        self.api, self.operator, self.log, self._still_s = api, operator, log, still_s

    async def condition(self, name: str, wanted: str) -> str:
        """`STATUS REASON` of a condition of a policy, of its present generation; empty where there is none."""
        try:
            live = await self.api.get(f"{PDS}/{name}")
        except (httpx.TransportError, ApiError):  # too busy to answer: not there yet, and `until` has a limit
            return ""
        for found in live.get("status", {}).get("conditions", []):
            if found["type"] == wanted and found["observedGeneration"] == live["metadata"]["generation"]:
                return f"{found['status']} {found['reason']}"
        return ""

    async def apply(self, names: Sequence[str]) -> None:
        """Applies these policies, and waits until each is what it is to be."""
        for name in names:
            spec = policies()[name]
            body = {"apiVersion": "taktline.dev/v1alpha1", "kind": "PolicyDeployment", "metadata": {"name": name}}
            await self.api.request("POST", PDS, body={**body, "spec": spec})
        others = {"nowhere": ("Degraded", "True Unschedulable"), "refused": ("Accepted", "False")}
        for name in names:
            kind, start = others.get(name, ("Available", "True"))
            await until(lambda n=name, k=kind, s=start: self._is(n, k, s), f"{name}: {kind}={start}", 300)
        if "stepwise" in names:
            await self._roll("stepwise")

    async def _is(self, name: str, kind: str, start: str) -> bool:
        return (await self.condition(name, kind)).startswith(start)

    async def _roll(self, name: str) -> None:
        """A second revision, let through by hand: what its robots would show is not what is measured here."""
        model = policies()[name]["model"] | {"revision": "b"}
        await until(lambda: self._is(name, "Progressing", "False Complete"), f"{name}'s first revision", 120)
        await self._edit(name, {"spec": {"model": model}})
        await until(lambda: self._is_at(name, "Shadow", "a"), f"{name}'s trial", 300)
        await self._edit(name, {"metadata": {"annotations": {"taktline.dev/rollout": "promote"}}})
        await until(lambda: self._is_at(name, "Complete", "b"), f"{name}'s second revision", 300)

    async def _edit(self, name: str, body: Json) -> None:
        await self.api.request("PATCH", f"{PDS}/{name}", body=body, patch="merge")

    async def _is_at(self, name: str, phase: str, revision: str) -> bool:
        status = (await self.api.get(f"{PDS}/{name}")).get("status", {})
        return status.get("rollout", {}).get("phase") == phase and status.get("currentRevision") == revision

    async def still(self) -> bool:
        """Whether the operator wrote nothing for so long."""
        before, _ = audit.split(self.log.read())
        await asyncio.sleep(self._still_s)
        return audit.split(self.log.read())[0] == before

    async def versions(self) -> dict[str, str]:
        """resourceVersion of all that the operator keeps: nobody else touched it either, if they stay."""
        found: dict[str, str] = {}
        selector = {"labelSelector": "app.kubernetes.io/managed-by=taktline-operator"}
        kinds = {
            "policydeployments": ("/apis/taktline.dev/v1alpha1", {}),
            "configmaps": ("/api/v1", selector),
            "services": ("/api/v1", selector),
            "deployments": ("/apis/apps/v1", selector),
            "statefulsets": ("/apis/apps/v1", selector),
            "controllerrevisions": ("/apis/apps/v1", selector),
            "poddisruptionbudgets": ("/apis/policy/v1", selector),
        }
        for plural, (prefix, parameters) in kinds.items():
            listed = await self.api.request("GET", f"{prefix}/{plural}", parameters=parameters)
            for item in listed["items"]:
                metadata = item["metadata"]
                found[f"{plural}/{metadata['namespace']}/{metadata['name']}"] = metadata["resourceVersion"]
        return found

    async def look(self, quiet_s: float) -> Json:
        """Counts for `quiet_s` seconds; returns the figures."""
        first, objects = self.log.read(), await self.versions()
        others = Counter(self.log.others)
        before = Reading(await self.operator.read())
        began = time.monotonic()
        samples: list[Json] = []
        while (left := began + quiet_s - time.monotonic()) > 0:
            await asyncio.sleep(min(SAMPLE_S, left))
            writes, leases = audit.split(self.log.read() - first)
            samples.append({"s": round(time.monotonic() - began), "writes": writes, "lease_renewals": leases})
            if writes:
                print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
        seconds = time.monotonic() - began
        counts, after = self.log.read() - first, Reading(await self.operator.read())
        writes, leases = audit.split(counts)
        now = await self.versions()
        reads = after.total(metrics.OPERATOR_REQUESTS, verb="GET") - before.total(metrics.OPERATOR_REQUESTS, verb="GET")
        looks = after.total(metrics.OPERATOR_RECONCILES) - before.total(metrics.OPERATOR_RECONCILES)
        cpu_s = after.total("process_cpu_seconds_total") - before.total("process_cpu_seconds_total")
        return {
            "seconds": round(seconds),
            "policies": sum(name.startswith("policydeployments/") for name in objects),
            "objects": len(objects),
            "writes_until_still": audit.split(first)[0],
            "writes": writes,
            "written": {f"{verb} {what}": n for (verb, what), n in counts.items() if what != "leases"},
            "lease_renewals": leases,
            "writes_by_the_operators_own_count": after.writes - before.writes,
            "objects_changed_by_anybody": sorted(name for name in objects | now if objects.get(name) != now.get(name)),
            "changes_by_others": dict((self.log.others - others).most_common(6)),
            "reconciliations": looks,
            "reads": reads,
            "operator_cpu_s": round(cpu_s, 1),
            "operator_mib": round(after.total("process_resident_memory_bytes") / 2**20, 1),
            "samples": samples[:: max(1, len(samples) // 12)] + samples[-1:],
        }


async def measure(
    cluster: Cluster, folder: Path, quiet_s: float, still_s: float = STILL_S, names: Sequence[str] = ()
) -> Json:
    """Applies policies to a local control plane on which no other operator runs, waits until all is still, and counts.

    Args:
        folder: takes the operator's log and credentials.
        quiet_s: how long is counted.
        still_s: time without a write before the counting begins.
        names: of `policies`; empty is all.
    """
    assert cluster.control_plane is not None, "the audit log is that of the local control plane"
    for name in ("namespace", "policydeployments", "rbac"):
        cluster.kubectl("apply", "--server-side", "-f", str(MANIFESTS / f"{name}.yaml"))
    known = ("api-resources", "--output=name")
    wait_until(lambda: "policydeployments" in cluster.kubectl(*known, check=False), "the new kind is published")
    cluster.kubectl("create", "namespace", NAMESPACE)
    api = KubeApi(cluster.kubeconfig)
    nodes = SimulatedNodes(
        api,
        3,
        labels={"taktline.dev/accelerator": "h100"} | OURS,
        extended={"nvidia.com/gpu": "16"},
        addresses={GATEWAY: "127.0.0.1"},
    )
    gateway = NoisyGateway("scaled", "line", rate=RATE)
    lease = ("--lease", "taktline-operator")
    operator = Operator(operator_kubeconfig(cluster, folder), folder, SYSTEM, *lease)
    try:
        await nodes.start()
        await gateway.start()
        await api.request("POST", f"/api/v1/namespaces/{SYSTEM}/pods", body=gateway.pod(OURS))
        found = Steady(api, operator, audit.AuditLog(cluster.control_plane.audit_log, USER), still_s)
        await until(operator.read, "the operator's metrics", 60)
        await found.apply(names or tuple(policies()))
        print("applied; waiting until all is still ...", file=sys.stderr, flush=True)
        await until(found.still, "a still operator", 1200)
        print(f"still; counting for {quiet_s:g} s ...", file=sys.stderr, flush=True)
        return await found.look(quiet_s)
    finally:
        operator.stop()
        await gateway.stop()
        # The control plane may be somebody's who goes on using it.
        await api.request("DELETE", f"/api/v1/namespaces/{SYSTEM}/pods/{GATEWAY}")
        await api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}")
        await until(lambda: gone(api, f"/api/v1/namespaces/{NAMESPACE}"), "the end of the namespace", 120)
        await nodes.remove()
        await api.close()


def main() -> None:
    """Prints the figures and, with --out, writes them; exits with 1 where anything was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quiet-s", type=float, default=3600.0, help="how long is counted (default: an hour)")
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=tuple(policies()),
        help="a policy to leave out; may be repeated",
    )
    options = parser.parse_args()
    load = os.getloadavg()[0]
    names = tuple(name for name in policies() if name not in options.without)
    with tempfile.TemporaryDirectory() as text, Cluster.open(Path(text)) as cluster:
        found = asyncio.run(measure(cluster, Path(text), options.quiet_s, names=names))
    without = "".join(f" --without {name}" for name in options.without)
    row = {
        "bench": "operator_steady",
        **found,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_before": round(load, 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks.operator.steady --quiet-s {options.quiet_s:g}{without}",
    }
    print(json.dumps(row, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(row, indent=1) + "\n")
    sys.exit(1 if found["writes"] else 0)


if __name__ == "__main__":
    main()
