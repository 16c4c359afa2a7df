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
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from taktline_local.cluster import Cluster
from taktline_local.kube_api import ApiError, KubeApi
from taktline_operator import schema
from taktline_protocol import metrics

Json = dict[str, Any]
PODS_PER_NODE = 250
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


def is_ready(pod: Json) -> bool:
    """Whether a pod counts as ready."""
    conditions = pod["status"].get("conditions", [])
    return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)


class SimulatedNodes:
    """Node objects, and a kubelet for all of them: bound pods are ready at once, deleted ones gone at once."""

    def __init__(self, api: KubeApi, count: int) -> None:
        self._api, self._count = api, count
        self._tasks: list[asyncio.Task[None]] = []
        self._addresses = 0
        self._due: asyncio.Queue[Json] = asyncio.Queue()
        self._doing: set[tuple[str, bool]] = set()

    async def start(self) -> None:
        """Makes the nodes and begins to report."""
        await asyncio.gather(*(self._make(number) for number in range(self._count)))
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._watch())]
        self._tasks += [asyncio.create_task(self._work()) for _ in range(16)]

    async def stop(self) -> None:
        """Stops reporting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _make(self, number: int) -> None:
        name = f"sim-{number}"
        await self._api.request("POST", "/api/v1/nodes", body={"metadata": {"name": name}})
        await self._ready(name)
        await self._api.request("PATCH", f"/api/v1/nodes/{name}", body={"spec": {"taints": []}}, patch="merge")

    async def _ready(self, name: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Ready", "status": "True", "reason": "Simulated", "message": "", "lastHeartbeatTime": now}
        capacity = {"cpu": "10000", "memory": "100Ti", "pods": str(PODS_PER_NODE)}
        status = {"conditions": [condition], "capacity": capacity, "allocatable": capacity}
        await self._api.request("PATCH", f"/api/v1/nodes/{name}/status", body={"status": status}, patch="strategic")

    async def _beat(self) -> None:
        # Late heartbeats make the node controller evict: all nodes at once, well within its patience.
        while True:
            await asyncio.sleep(10)
            names = [f"sim-{number}" for number in range(self._count)]
            await asyncio.gather(*(self._ready(name) for name in names), return_exceptions=True)

    async def _watch(self) -> None:
        async for kind, found in self._api.watch("/api/v1/pods", "spec.nodeName!="):
            for pod in found["items"] if kind == "LISTED" else [found]:
                key = (pod["metadata"]["uid"], bool(pod["metadata"].get("deletionTimestamp")))
                # Where heartbeats were late the node controller takes readiness away; a kubelet gives it back.
                if kind != "DELETED" and key not in self._doing and (key[1] or not is_ready(pod)):
                    self._doing.add(key)
                    self._due.put_nowait(pod)

    async def _work(self) -> None:
        while True:
            pod = await self._due.get()
            # From here on a later change of the pod counts anew.
            self._doing.discard((pod["metadata"]["uid"], bool(pod["metadata"].get("deletionTimestamp"))))
            path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
            with contextlib.suppress(ApiError, httpx.TransportError):  # gone meanwhile
                if pod["metadata"].get("deletionTimestamp"):
                    await self._api.request("DELETE", path, body={"gracePeriodSeconds": 0})
                else:
                    await self._run(pod)

    async def _run(self, pod: Json) -> None:
        if not (address := pod["status"].get("podIP")):
            self._addresses += 1
            high, low = divmod(self._addresses % 60_000, 250)
            address = f"198.18.{high % 250}.{low + 1}"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")  # Deployments count how long a pod has been ready
        kinds = ("Ready", "ContainersReady")
        ready = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds]
        names = [container["name"] for container in pod["spec"]["containers"]]
        state = {
            "image": "x",
            "imageID": "",
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {}},
        }
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": ready,
            "containerStatuses": [{"name": name, **state} for name in names],
        }
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}/status"
        await self._api.request("PATCH", path, body={"status": status}, patch="strategic")


class Operator:
    """The operator's process and what it says of itself."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._log = (folder / "operator.log").open("a")
        self._command = [Path(sys.executable).parent / "taktline-operator", "run", f"--kubeconfig={kubeconfig}"]
        self._command += [f"--health-listen={self._address}", f"--gateway-namespace={SYSTEM}"]
        self.process = subprocess.Popen(self._command, stderr=self._log)

    def restart(self) -> None:
        """Kills it without warning and starts it anew."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = subprocess.Popen(self._command, stderr=self._log)

    def stop(self) -> None:
        """Ends it."""
        self.process.terminate()
        self.process.wait(30)

    async def read(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """All its series: name, labels, value; empty until it answers."""
        try:
            async with httpx.AsyncClient(timeout=10) as http:
                text = (await http.get(f"http://{self._address}/metrics")).text
        except httpx.TransportError:
            return {}
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return found


class Reading:
    """Numbers of one look at the operator's metrics."""

    def __init__(self, series: dict[str, dict[tuple[tuple[str, str], ...], float]]) -> None:
        self._series = series

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels."""
        wanted = set(labels.items())
        return sum(value for key, value in self._series.get(name, {}).items() if wanted <= set(key))

    @property
    def writes(self) -> float:
        """Requests that change something, but for the lease."""
        return sum(
            value
            for key, value in self._series.get(metrics.OPERATOR_REQUESTS, {}).items()
            if dict(key)["verb"] != "GET" and dict(key)["kind"] != "Lease"
        )

    def quantile_ms(self, share: float, since: Reading | None = None) -> float:
        """Upper edge of the bucket that holds this quantile of the reconciliations, in ms."""
        name = f"{metrics.OPERATOR_RECONCILE}_bucket"
        before = since._series.get(name, {}) if since else {}
        buckets = sorted(
            (float(dict(key)["le"].replace("+Inf", "inf")), value - before.get(key, 0.0))
            for key, value in self._series.get(name, {}).items()
        )
        count = buckets[-1][1] if buckets else 0.0
        return next((1e3 * edge for edge, value in buckets if count and value >= share * count), float("nan"))


async def until(condition: Any, what: str, limit_s: float, every_s: float = 0.2) -> float:
    """Waits for an awaitable condition, asked every `every_s`; returns the seconds it took."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if await condition():
            return time.monotonic() - began
        await asyncio.sleep(every_s)
    raise SystemExit(f"{what} did not happen within {limit_s:g} s")


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
        operator = Operator(cluster.kubeconfig, folder)
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
