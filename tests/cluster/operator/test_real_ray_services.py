"""Planners on Ray under KubeRay's own operator: clusters become pods, serve when their application runs, and roll.

Opt-in, as the operator is built from its module once: `make controllers-test`. What KubeRay asks of a Ray cluster over
HTTP goes to the test, as to a proxy: there is no Ray in the pods of a node without machine.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from taktline_local.controllers import KubeRay
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.programs import find_controllers

pytestmark = pytest.mark.usefixtures("running_operator", "node")

Json = dict[str, Any]
PLANNER = {"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"}
LIMIT_S = 180.0
RANKS = 4


class Dashboards:
    """The dashboards of all Ray clusters, as KubeRay sees them through a proxy."""

    def __init__(self) -> None:
        self.status = "RUNNING"  # of an application that was deployed
        self.deployed: dict[str, Json] = {}  # host -> what it was told to serve
        found = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Nothing: the test says what matters."""

            def do_GET(self) -> None:
                """Status of applications, or of a proxy actor."""
                self._answer(found.applications(urlsplit(self.path).netloc) if "/api/serve/" in self.path else {})

            def do_PUT(self) -> None:
                """Deploys."""
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                found.deployed[urlsplit(self.path).netloc] = json.loads(body)
                self._answer({})

            def _answer(self, body: Json) -> None:
                content = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def applications(self, host: str) -> Json:
        """What the dashboard at a host says of its applications."""
        told = [one["name"] for one in self.deployed.get(host, {}).get("applications", [])]
        deployments = {"Planner": {"name": "Planner", "status": "HEALTHY"}}
        return {
            "applications": {
                name: {"name": name, "status": self.status, "deployments": deployments, "route_prefix": ""}
                for name in told
            }
        }

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def dashboards() -> Iterator[Dashboards]:
    """The proxy."""
    found = Dashboards()
    yield found
    found.close()


@pytest.fixture(scope="module", autouse=True)
def controller(
    kubectl: Kubectl, installed: None, dashboards: Dashboards, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeRay]:
    """KubeRay's operator with the kinds of its module; there before the operator under test runs."""
    if os.environ.get("TAKTLINE_CONTROLLERS") != "1":
        pytest.skip("controllers of other products are tested by `make controllers-test`")
    programs = find_controllers("kuberay")
    assert programs is not None, "run `make controllers`"
    through = {"HTTP_PROXY": dashboards.url, "http_proxy": dashboards.url, "NO_PROXY": "", "no_proxy": ""}
    with KubeRay(programs, kubectl, tmp_path_factory.mktemp("kuberay"), through) as found:
        yield found


def body(policies: Any, name: str, revision: str = "a") -> Json:
    engine = {"runtime": "ray", "buckets": [1], "parallel": {"search": RANKS}}
    made: Json = policies.body(name, model=PLANNER | {"revision": revision}, engine=engine)
    made["spec"]["slo"] = {"controlBudgetMs": 4000}
    return made


class Clusters:
    """The pods of one policy's Ray clusters."""

    def __init__(self, policies: Any, name: str) -> None:
        self.policies, self.name = policies, name

    def pods(self, kind: str = "") -> list[Json]:
        """Of a node type, `head` or `worker`; those that are being deleted left out."""
        selector = f"taktline.dev/policy={self.name}" + (f",ray.io/node-type={kind}" if kind else "")
        found = self.policies.kubectl.list("pods", self.policies.namespace, selector)
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def routes(self) -> list[str]:
        """What robots are sent to."""
        found: list[str] = self.policies.routes().get(self.name, [])
        return found

    def serving(self) -> bool:
        """Whether one cluster is there, whole, and its head is what robots are sent to."""
        status = (self.policies.get(self.name) or {}).get("status", {})
        heads, ranks = self.pods("head"), self.pods("worker")
        return (
            status.get("readyReplicas") == 1
            and len(heads) == 1
            and len(ranks) == RANKS
            and self.routes() == [f"{heads[0]['status'].get('podIP')}:50051"]
        )


def gone(policies: Any, name: str) -> None:
    """Deletes a policy, and waits for the end of everything that was made for it."""
    policies.kubectl("-n", policies.namespace, "delete", "pd", name, "--timeout=60s")
    wait_until(lambda: Clusters(policies, name).pods() == [], "its pods are gone", timeout_s=LIMIT_S)


def test_a_cluster_serves_when_its_application_runs_and_not_before(policies: Any, dashboards: Dashboards) -> None:
    dashboards.status = "DEPLOYING"
    policies.kubectl.apply(body(policies, "ray-served"))
    clusters = Clusters(policies, "ray-served")

    def deployed() -> bool:
        names = [one["name"] for told in dashboards.deployed.values() for one in told["applications"]]
        return "planner" in names

    wait_until(deployed, "KubeRay deploys the application", timeout_s=LIMIT_S)
    assert len(clusters.pods("head")) == 1
    assert len(clusters.pods("worker")) == RANKS
    assert clusters.routes() == []
    assert policies.get("ray-served")["status"]["readyReplicas"] == 0
    (told,) = dashboards.deployed.values()
    assert told["applications"][0]["args"]["listen"] == "0.0.0.0:50051"
    dashboards.status = "DEPLOY_FAILED"
    policies.wait("ray-served", "Degraded", "True", "ApplicationFailed")
    dashboards.status = "RUNNING"
    wait_until(clusters.serving, "the cluster serves", timeout_s=LIMIT_S)
    policies.wait("ray-served", "Available", "True")
    policies.wait("ray-served", "Progressing", "False", "Complete")
    policies.wait("ray-served", "Degraded", "False", "AsExpected")
    (head,) = clusters.pods("head")
    assert head["spec"]["containers"][0]["command"], "KubeRay starts Ray"
    gone(policies, "ray-served")


def test_nothing_is_written_while_a_cluster_rests(policies: Any) -> None:
    policies.kubectl.apply(body(policies, "ray-rest"))
    wait_until(Clusters(policies, "ray-rest").serving, "the cluster serves", timeout_s=LIMIT_S)
    policies.wait("ray-rest", "Progressing", "False", "Complete")

    def versions() -> dict[str, Any]:
        found = policies.kubectl.list("pd,services,configmaps,poddisruptionbudgets", policies.namespace)
        seen = {f"{one['kind']}/{one['metadata']['name']}": one["metadata"]["resourceVersion"] for one in found}
        services = policies.kubectl.list("rayservices", policies.namespace)
        # KubeRay writes into its status; what we write moves the generation or our own annotations.
        return seen | {one["metadata"]["name"]: [one["metadata"][key] for key in KEPT] for one in services}

    def unchanged() -> bool:
        before = versions()
        time.sleep(3.0)
        return versions() == before

    wait_until(unchanged, "nothing is written any more", timeout_s=LIMIT_S)
    gone(policies, "ray-rest")


KEPT = ("generation", "annotations", "labels")


def test_another_revision_is_another_cluster_that_serves_before_the_old_one_goes(
    policies: Any, dashboards: Dashboards
) -> None:
    policies.kubectl.apply(body(policies, "ray-rolls"))
    clusters = Clusters(policies, "ray-rolls")
    wait_until(clusters.serving, "the cluster serves", timeout_s=LIMIT_S)
    before = {pod["metadata"]["uid"] for pod in clusters.pods()}
    policies.kubectl.apply(body(policies, "ray-rolls", "b"))

    def rolled() -> bool:
        assert clusters.routes(), "robots have nobody"
        now = {pod["metadata"]["uid"] for pod in clusters.pods()}
        return policies.get("ray-rolls")["status"]["currentRevision"] == "b" and now.isdisjoint(before)

    wait_until(rolled, "the second revision serves", timeout_s=LIMIT_S)
    wait_until(clusters.serving, "it alone serves", timeout_s=LIMIT_S)
    gone(policies, "ray-rolls")


def test_a_head_that_is_lost_is_left_and_comes_back(policies: Any) -> None:
    policies.kubectl.apply(body(policies, "ray-lost"))
    clusters = Clusters(policies, "ray-lost")
    wait_until(clusters.serving, "the cluster serves", timeout_s=LIMIT_S)
    (head,) = clusters.pods("head")
    policies.kubectl("-n", policies.namespace, "delete", "pod", head["metadata"]["name"], "--wait=false")
    lost = f"{head['status']['podIP']}:50051"
    wait_until(lambda: lost not in clusters.routes(), "robots are sent there no more", timeout_s=LIMIT_S)
    wait_until(clusters.serving, "a cluster serves again", timeout_s=LIMIT_S)
    assert lost not in clusters.routes()
    gone(policies, "ray-lost")
