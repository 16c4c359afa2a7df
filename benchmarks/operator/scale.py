"""The operator at size: many PolicyDeployments and pods on a real control plane, with simulated nodes.

    python -m benchmarks.operator.scale --policies 1000 --pods 5            1,000 policies and 5,000 pods
    python -m benchmarks.operator.scale --policies 20 --pods 2 --quiet-s 20 a look

kube-apiserver, etcd, scheduler and controller manager are the real ones (`make control-plane`). Nodes are objects; a
simulated kubelet in this process marks bound pods as running and ready at once, so that the operator and the API are
measured, not workers. All share one machine: times are those of a busy API server, not of the operator alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from taktline_local.cluster import Cluster
from taktline_local.kube_api import ApiError, KubeApi
from taktline_operator import schema
from taktline_protocol import metrics

from benchmarks.operator.operator_process import Operator, Reading, until
from benchmarks.operator.simulated_nodes import PODS_PER_NODE, SimulatedNodes

Json = dict[str, Any]
PDS = "/apis/taktline.dev/v1alpha1/namespaces/{}/policydeployments"
DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"
NAMESPACE, SYSTEM = "scale", "taktline-system"
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"


def policy(name: str, pods: int) -> Json:
    """A PolicyDeployment with one CPU pool."""
    return {
        "apiVersion": "taktline.dev/v1alpha1",
        "kind": "PolicyDeployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "model": {"family": "pi05", "source": {"path": "/srv/policy"}, "revision": "a"},
            "pools": [{"name": "cpu", "accelerator": "cpu", "minReplicas": pods, "maxReplicas": pods + 10}],
            "slo": {"controlBudgetMs": 250},
        },
    }


def bare_deployment(name: str, pods: int) -> Json:
    """The floor: a Deployment as anybody writes it."""
    labels = {"app": name}
    container = {"name": "main", "image": "none", "resources": {"requests": {"cpu": "10m"}}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": pods,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


class Scale:
    """The measurement."""

    def __init__(self, api: KubeApi, operator: Operator, options: argparse.Namespace) -> None:
        self.api, self.operator, self.options = api, operator, options
        self.result: Json = {}

    async def available(self, names: set[str]) -> bool:
        """Whether all these PolicyDeployments are Available."""
        ready: set[str] = set()
        page = {"limit": "100"}
        while True:
            try:
                found = await self.api.request("GET", PDS.format(NAMESPACE), parameters=page)
            except (httpx.TransportError, ApiError):  # too busy to answer: not there yet, and `until` has a limit
                return False
            ready |= {
                item["metadata"]["name"]
                for item in found["items"]
                for condition in item.get("status", {}).get("conditions", [])
                if condition["type"] == "Available" and condition["status"] == "True"
            }
            if not (token := found["metadata"].get("continue")):
                return names <= ready
            page["continue"] = token

    async def reading(self) -> Reading:
        """The operator's numbers now."""
        return Reading(await self.operator.read())

    async def one_by_one(self) -> None:
        """Apply-to-Available of single policies, and of bare Deployments of the same size, in turn."""
        ours, bare = [], []
        for number in range(self.options.singles):
            name = f"single-{number}"
            await self.api.request("POST", PDS.format(NAMESPACE), body=policy(name, self.options.pods))
            ours.append(await until(lambda n=name: self.available({n}), f"{name} Available", 120))
            await self.api.request(
                "POST", DEPLOYMENTS.format(NAMESPACE), body=bare_deployment(f"bare-{number}", self.options.pods)
            )
            bare.append(await until(lambda n=f"bare-{number}": self._deployed(n), "the bare Deployment", 120))
        self.result["apply_to_available_s"] = round(statistics.median(ours), 2)
        self.result["bare_deployment_s"] = round(statistics.median(bare), 2)

    async def _deployed(self, name: str) -> bool:
        found = await self.api.get(f"{DEPLOYMENTS.format(NAMESPACE)}/{name}")
        return bool(found.get("status", {}).get("availableReplicas", 0) >= self.options.pods)

    async def all_at_once(self) -> None:
        """Every policy, as fast as the API takes them, until all are Available."""
        names = [f"p-{number:04d}" for number in range(self.options.policies)]
        before, began = await self.reading(), time.monotonic()
        for start in range(0, len(names), 16):
            bodies = [policy(name, self.options.pods) for name in names[start : start + 16]]
            await asyncio.gather(*(self.api.request("POST", PDS.format(NAMESPACE), body=body) for body in bodies))
        self.result["created_s"] = round(time.monotonic() - began, 1)
        limit_s = 120 + 3.0 * self.options.policies
        # Looking at all of them is work for the API server: seldom where they are many.
        every_s = max(0.2, self.options.policies / 200)
        await until(lambda: self.available(set(names)), "all policies Available", limit_s, every_s)
        self.result["all_available_s"] = round(time.monotonic() - began, 1)
        after = await self.reading()
        requests = after.total(metrics.OPERATOR_REQUESTS) - before.total(metrics.OPERATOR_REQUESTS)
        self.result["api_calls_a_policy"] = round(requests / len(names), 1)
        self.result["writes_a_policy"] = round((after.writes - before.writes) / len(names), 1)
        self.result["reconcile_p50_ms_at_most"] = after.quantile_ms(0.5, before)
        self.result["reconcile_p99_ms_at_most"] = after.quantile_ms(0.99, before)
        cpu = after.total("process_cpu_seconds_total") - before.total("process_cpu_seconds_total")
        self.result["cpu_s_a_policy"] = round(cpu / len(names), 4)
        self.result["operator_mib"] = round(after.total("process_resident_memory_bytes") / 2**20, 1)

    async def steady(self) -> None:
        """What an hour without changes costs, from a shorter look."""
        await until(self._is_quiet, "a quiet operator", 300)
        before = await self.reading()
        await asyncio.sleep(self.options.quiet_s)
        after = await self.reading()
        self.result["steady_s"] = self.options.quiet_s
        self.result["steady_writes"] = after.writes - before.writes
        reconciles = after.total(metrics.OPERATOR_RECONCILES) - before.total(metrics.OPERATOR_RECONCILES)
        self.result["steady_reconciles"] = reconciles
        reads = after.total(metrics.OPERATOR_REQUESTS, verb="GET") - before.total(metrics.OPERATOR_REQUESTS, verb="GET")
        self.result["steady_reads_a_minute"] = round(60 * reads / self.options.quiet_s, 1)
        cpu = after.total("process_cpu_seconds_total") - before.total("process_cpu_seconds_total")
        self.result["steady_cores"] = round(cpu / self.options.quiet_s, 4)

    async def _is_quiet(self) -> bool:
        """Whether nothing was written, and hardly anything looked at, for ten seconds: what is under way is over."""
        before = await self.reading()
        await asyncio.sleep(10)
        after = await self.reading()
        looks = after.total(metrics.OPERATOR_RECONCILES) - before.total(metrics.OPERATOR_RECONCILES)
        return after.writes == before.writes and looks <= 2

    async def one_change(self) -> None:
        """API calls of one more replica of one policy, mean over a few."""
        changed = [f"p-{number:04d}" for number in range(min(10, self.options.policies))]
        await until(self._is_quiet, "a quiet operator", 300)
        before = await self.reading()
        for name in changed:
            pools = policy(name, self.options.pods + 1)["spec"]["pools"]
            body = {"spec": {"pools": pools}}
            await self.api.request("PATCH", f"{PDS.format(NAMESPACE)}/{name}", body=body, patch="merge")
        await until(self._is_quiet, "a quiet operator", 300)
        after = await self.reading()
        calls = after.total(metrics.OPERATOR_REQUESTS) - before.total(metrics.OPERATOR_REQUESTS)
        self.result["api_calls_a_change"] = round(calls / len(changed), 1)
        self.result["writes_a_change"] = round((after.writes - before.writes) / len(changed), 1)

    async def restart(self) -> None:
        """Killed and started anew: until every policy has been reconciled once, and what that writes."""
        everything = self.options.policies + self.options.singles
        self.operator.restart()

        async def done() -> bool:
            return (await self.reading()).total(metrics.OPERATOR_RECONCILES, result="done") >= everything

        self.result["converged_after_restart_s"] = round(await until(done, "convergence", 900), 1)
        after = await self.reading()
        self.result["writes_after_restart"] = after.writes
        self.result["operator_mib_after_restart"] = round(after.total("process_resident_memory_bytes") / 2**20, 1)


async def measure(options: argparse.Namespace) -> Json:
    """Runs everything; returns the row."""
    with tempfile.TemporaryDirectory() as text, Cluster.open(Path(text)) as cluster:
        folder = Path(text)
        (folder / "crd.yaml").write_text(schema.crd_text())
        cluster.kubectl("apply", "--server-side", "-f", str(folder / "crd.yaml"))
        for namespace in (NAMESPACE, SYSTEM):
            cluster.kubectl("create", "namespace", namespace)
        api = KubeApi(cluster.kubeconfig)
        pods = (options.policies + 2 * options.singles + 20) * (options.pods + 1)
        nodes = SimulatedNodes(api, 1 + pods // PODS_PER_NODE)
        operator = Operator(cluster.kubeconfig, folder, SYSTEM)
        try:
            await nodes.start()
            found = Scale(api, operator, options)
            await until(operator.read, "the operator's metrics", 60)
            for step in (found.one_by_one, found.all_at_once, found.steady, found.one_change, found.restart):
                print(f"{step.__name__} ...", file=sys.stderr, flush=True)
                before = set(found.result)
                await step()
                # Each step's numbers as they come: what interrupts a long run takes only the rest.
                new = {name: value for name, value in found.result.items() if name not in before}
                print(json.dumps(new), file=sys.stderr, flush=True)
            # Not 0: the machine was too busy for the nodes' heartbeats, and what was measured is their loss, too.
            lost = await api.request("GET", EVENTS, parameters={"fieldSelector": "reason=NodeNotReady"})
            found.result["pods_marked_not_ready"] = len(lost["items"])
            return found.result
        finally:
            await nodes.stop()
            operator.stop()
            await api.close()


def main() -> None:
    """Prints the numbers and, with --out, writes them as a row of results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policies", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=5, help="pods of each policy")
    parser.add_argument("--singles", type=int, default=5, help="policies applied one at a time for apply-to-Available")
    parser.add_argument("--quiet-s", type=float, default=120.0, help="length of the look at the steady state")
    parser.add_argument("--out", type=Path, help="JSON file with a list of rows")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    row = {
        "bench": "operator_scale",
        "policies": options.policies,
        "pods": options.policies * options.pods,
        **asyncio.run(measure(options)),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_before": round(load, 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks.operator.scale --policies {options.policies} --pods {options.pods}",
    }
    print(json.dumps(row, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        rows = json.loads(options.out.read_text()) if options.out.exists() else []
        kept = [found for found in rows if found["policies"] != options.policies]
        options.out.write_text(json.dumps([*kept, row], indent=1) + "\n")


if __name__ == "__main__":
    main()
