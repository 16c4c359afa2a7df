"""A checkpoint that is fetched: what pods get for it, and what the status says while it is on its way."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from aiohttp import web
from taktline_operator import advice, delivery_polling, delivery_status, model_source, plan, workload
from taktline_operator.plan import Ref
from taktline_operator.telemetry import Telemetry
from taktline_protocol.delivery import DeliveryConfig, DeliveryProgress, HttpSource, HubSource, S3Source
from taktline_protocol.deployment import EngineConfig
from taktline_protocol.errors import TaktlineError
from taktline_worker.delivery import progress as telling

Json = dict[str, Any]
PIN = "a" * 64
HTTP = {"http": {"url": "https://models.example/reach", "sha256": PIN}}


def fetched(make: Any, source: Json = HTTP, model: Json | None = None, **parts: Any) -> Any:
    return make.policy(model={"family": "pi05", "source": source, "revision": "a", **(model or {})}, **parts)


def template(make: Any, policy: Any) -> Json:
    return make.applied(policy)[Ref("Deployment", "reach-cpu")]["spec"]["template"]["spec"]


def volume(pod: Json, name: str) -> Json:
    return next({key: value for key, value in v.items() if key != "name"} for v in pod["volumes"] if v["name"] == name)


def files(make: Any, policy: Any) -> dict[str, str]:
    name = volume(template(make, policy), "engine")["configMap"]["name"]
    found: dict[str, str] = make.applied(policy)[Ref("ConfigMap", name)]["data"]
    return found


def test_the_worker_loads_what_the_init_container_publishes(make: Any) -> None:
    policy = fetched(make, model={"sha256": {"model.safetensors": PIN}})
    content = files(make, policy)
    delivery = msgspec.json.decode(content["delivery.json"], type=DeliveryConfig)
    engine = msgspec.json.decode(content["engine.json"], type=EngineConfig)
    assert engine.model.path == f"/model-cache/models/{delivery.key}"
    assert engine.model.sha256 == {}, "checked on the way; not read again at each start"
    assert delivery.sha256 == {"model.safetensors": PIN}
    pod = template(make, policy)
    (fetching,) = pod["initContainers"]
    assert fetching["command"][:3] == ["taktline-worker", "model", "fetch"]
    assert "/etc/taktline/delivery.json" in fetching["command"]
    mounts = {mount["name"]: mount for mount in fetching["volumeMounts"]}
    assert mounts["model"] == {"name": "model", "mountPath": "/model-cache"}
    (worker,) = pod["containers"]
    assert {"name": "model", "mountPath": "/model-cache", "readOnly": True} in worker["volumeMounts"]
    assert fetching["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert volume(pod, "model") == {"emptyDir": {}}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (HTTP, HttpSource(url="https://models.example/reach", sha256=PIN)),
        (
            {"s3": {"bucket": "robots", "prefix": "reach/1", "endpoint": "http://minio:9000", "sha256": PIN}},
            S3Source(bucket="robots", prefix="reach/1", endpoint="http://minio:9000", sha256=PIN),
        ),
        (
            {"hub": {"repo": "org/reach", "revision": "b" * 40, "include": ["*.json"]}},
            HubSource(repo="org/reach", revision="b" * 40, include=("*.json",)),
        ),
    ],
    ids=["http", "s3", "hub"],
)
def test_every_source_reaches_the_fetching_program(make: Any, source: Json, expected: Any) -> None:
    content = files(make, fetched(make, source, delivery={"maxSize": "10Gi", "cacheLimit": "500G"}))
    found = msgspec.json.decode(content["delivery.json"], type=DeliveryConfig)
    assert found.source == expected
    assert (found.policy, found.revision, found.deadline_s) == ("reach", "a", 3600.0)
    assert (found.max_bytes, found.cache_bytes) == (10 << 30, 500 * 10**9)


def test_credentials_come_by_reference_only(make: Any) -> None:
    def variables(source: Json) -> Json:
        env = template(make, fetched(make, source))["initContainers"][0]["env"]
        return {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in env if "valueFrom" in entry}

    token = variables({"http": HTTP["http"] | {"tokenSecret": {"name": "mirror"}}})
    assert token == {"TAKTLINE_MODEL_TOKEN": {"name": "mirror", "key": "token"}}
    keys = variables({"s3": {"bucket": "robots", "sha256": PIN, "credentialsSecret": {"name": "s3"}}})
    assert keys["AWS_ACCESS_KEY_ID"] == {"name": "s3", "key": "AWS_ACCESS_KEY_ID"}
    assert keys["AWS_SESSION_TOKEN"]["optional"] is True
    assert variables(HTTP) == {}


def test_cache_certificates_and_proxy(make: Any) -> None:
    policy = fetched(
        make,
        delivery={
            "cache": {"claimName": "models"},
            "caConfigMap": {"name": "ca"},
            "proxy": "http://proxy:3128",
            "noProxy": "models.example",
            "deadlineSeconds": 7200,
        },
    )
    pod = template(make, policy)
    assert volume(pod, "model") == {"persistentVolumeClaim": {"claimName": "models"}}
    assert volume(pod, "model-ca")["configMap"]["name"] == "ca"
    assert pod["initContainers"][0]["command"][-2:] == ["--ca", "/etc/taktline-ca/ca.crt"]
    env = {entry["name"]: entry.get("value") for entry in pod["initContainers"][0]["env"]}
    assert (env["HTTPS_PROXY"], env["NO_PROXY"]) == ("http://proxy:3128", "models.example")
    deployment = make.applied(policy)[Ref("Deployment", "reach-cpu")]
    assert deployment["spec"]["progressDeadlineSeconds"] == 2100 + 7200, "a download is no stalled rollout"


def test_a_proxys_password_comes_from_a_secret_and_stands_in_no_pod(make: Any) -> None:
    policy = fetched(make, delivery={"proxySecret": {"name": "way-out"}, "noProxy": "models.example"})
    env = {entry["name"]: entry for entry in template(make, policy)["initContainers"][0]["env"]}
    for name in ("HTTPS_PROXY", "HTTP_PROXY"):
        assert env[name] == {"name": name, "valueFrom": {"secretKeyRef": {"name": "way-out", "key": "proxy"}}}
    assert env["NO_PROXY"]["value"] == "models.example"
    assert advice.Referred("Secret", "way-out", "delivery.proxySecret") in advice.references(policy)
    with pytest.raises(TaktlineError, match="not both"):
        fetched(make, delivery={"proxySecret": {"name": "way-out"}, "proxy": "http://proxy:3128"})
    with pytest.raises(TaktlineError, match="proxy"):
        fetched(make, delivery={"proxy": "http://user:password@proxy:3128"})


def test_a_large_checkpoint_on_a_claim_is_not_walked_through_before_each_start(make: Any) -> None:
    """The kubelet gives every file of a volume to fsGroup at each mount, unless its root says that it was done."""
    on_claim = {"family": "pi05", "source": {"pvc": {"claimName": "models"}}, "revision": "a"}
    for policy in (make.policy(model=on_claim), fetched(make, delivery={"cache": {"claimName": "models"}})):
        context = template(make, policy)["securityContext"]
        assert (context["fsGroup"], context["fsGroupChangePolicy"]) == (10001, "OnRootMismatch")
    # Pods of other volumes stay as they are: none is replaced for it.
    assert "fsGroupChangePolicy" not in template(make, make.policy())["securityContext"]


def test_a_claim_that_is_not_there_is_noticed(make: Any) -> None:
    policy = fetched(make, delivery={"cache": {"claimName": "models"}})
    absent = advice.references(policy)
    assert absent == (advice.Referred("PersistentVolumeClaim", "models", "delivery.cache"),)
    said = advice.review(policy, advice.Surroundings(absent=frozenset(absent))).cautions
    assert any("models" in caution.message for caution in said)


def test_the_installations_cache_holds_where_the_policy_names_none(make: Any) -> None:
    settings = msgspec.structs.replace(make.settings, model_cache="/var/lib/taktline/models")

    def planned(policy: Any) -> Json:
        live = {"metadata": {"name": "reach", "generation": 1}, "status": {}}
        desired = plan.plan(policy, make.Observed(live=live, now=make.now), settings).desired
        pod = next(found for found in desired if found["kind"] == "Deployment")["spec"]["template"]["spec"]
        return volume(pod, "model")

    assert planned(fetched(make)) == {"hostPath": {"path": "/var/lib/taktline/models", "type": "DirectoryOrCreate"}}
    own = fetched(make, delivery={"cache": {"claimName": "models"}})
    assert planned(own) == {"persistentVolumeClaim": {"claimName": "models"}}
    assert planned(make.policy()) == {"hostPath": {"path": "/srv/policies/reach", "type": "Directory"}}


def test_workers_keep_the_kernels_that_they_compile_where_the_installation_says(make: Any) -> None:
    def pod(folder: str) -> Json:
        live = {"metadata": {"name": "reach", "generation": 1}, "status": {}}
        settings = msgspec.structs.replace(make.settings, kernel_cache=folder)
        desired = plan.plan(make.policy(), make.Observed(live=live, now=make.now), settings).desired
        found: Json = next(one for one in desired if one["kind"] == "Deployment")["spec"]["template"]["spec"]
        return found

    told = pod("/var/lib/taktline/kernels")
    worker = told["containers"][0]
    # Kernels that one worker plants would run in the others' context: no other namespace sees them.
    own = f"/var/lib/taktline/kernels/{make.policy().namespace}"
    assert volume(told, "kernels") == {"hostPath": {"path": own, "type": "DirectoryOrCreate"}}
    assert volume(pod("/var/lib/taktline/kernels/"), "kernels") == volume(told, "kernels")
    assert {"name": "kernels", "mountPath": "/kernel-cache"} in worker["volumeMounts"]
    assert {"name": "TAKTLINE_KERNEL_CACHE", "value": "/kernel-cache"} in worker["env"]
    # Workers that run must not restart for a setting that nobody made.
    plain = pod("")
    assert plain["volumes"] == [one for one in told["volumes"] if one["name"] != "kernels"]
    assert "TAKTLINE_KERNEL_CACHE" not in {one["name"] for one in plain["containers"][0]["env"]}


def test_statistics_of_their_own_change_the_folder_and_come_along(make: Any) -> None:
    statistics = {"url": "https://models.example/line-7.json", "sha256": "b" * 64, "path": "assets/x/norm_stats.json"}
    plain, changed = fetched(make), fetched(make, model={"statisticsFrom": statistics})
    assert plain.spec.model_path() != changed.spec.model_path()
    found = msgspec.json.decode(files(make, changed)["delivery.json"], type=DeliveryConfig).statistics_file
    assert found is not None
    assert (found.source, found.path) == (HttpSource(url=statistics["url"]), statistics["path"])
    bucket = {"s3": {"bucket": "robots", "prefix": "a", "sha256": PIN}}
    of_key = fetched(make, bucket, model={"statisticsFrom": {"key": "n.json", "sha256": PIN, "path": "n.json"}})
    inside = msgspec.json.decode(files(make, of_key)["delivery.json"], type=DeliveryConfig).statistics_file
    assert inside is not None
    assert inside.source == S3Source(bucket="robots", prefix="n.json")


def test_an_image_is_a_volume_of_the_kubelets(make: Any) -> None:
    reference = f"registry.example/reach@sha256:{PIN}"
    policy = fetched(make, {"oci": {"reference": reference, "path": "m", "pullSecret": {"name": "pull"}}})
    pod = template(make, policy)
    assert volume(pod, "model") == {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
    assert "initContainers" not in pod
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert json.loads(files(make, policy)["engine.json"])["model"]["path"] == "/models/m"


def test_a_cluster_without_image_volumes_is_told_so(make: Any) -> None:
    policy = fetched(make, {"oci": {"reference": f"r/x@sha256:{PIN}"}})
    body = make.body()
    for version, accepted in (((1, 30), "False"), ((1, 31), "True"), (None, "True")):
        result = plan.plan(policy, make.Observed(live=body, now=make.now, version=version), make.settings)
        found = next(c for c in result.status["conditions"] if c["type"] == "Accepted")
        assert found["status"] == accepted
        if accepted == "False":
            assert found["reason"] == "ImageVolumesUnsupported"
            assert "this cluster is 1.30" in found["message"]
            assert not result.desired


@pytest.mark.parametrize("engine", [{}, {"buckets": [1, 2]}], ids=["defaults", "a list"])
def test_an_applied_policy_is_steady(make: Any, engine: Json) -> None:
    policy = fetched(make, {"hub": {"repo": "org/reach", "revision": "b" * 40, "include": ["*.json"]}}, engine=engine)
    # As the API server gives them back.
    children = {ref: json.loads(json.dumps(child)) for ref, child in make.applied(policy).items()}
    observed = make.Observed(live=make.body(), now=make.now, children=children)
    assert not plan.plan(policy, observed, make.settings).writes


# The condition.

RUNNING = {"running": {}}
DONE = {"terminated": {"exitCode": 0}}
WORDS = "downloading 3%\ntaktline-worker: model_mismatch: m has sha256 b, expected a (put the right file there)\n"
ENDED = {"terminated": {"exitCode": 2, "message": WORDS}}


def pods(make: Any, policy: Any, *states: Json) -> list[Json]:
    found = []
    for number, state in enumerate(states):
        made = make.pod(f"reach-{number}", f"10.0.0.{number + 1}", owner=policy, ready=state == {"state": DONE})
        made["spec"]["initContainers"] = [{"name": "model"}]
        made["status"]["initContainerStatuses"] = [{"name": "model", **state}]
        found.append(made)
    return found


def condition_of(make: Any, states: list[Json], progress: dict[str, DeliveryProgress] | None = None) -> Any:
    policy = fetched(make)
    return delivery_status.condition(policy, pods(make, policy, *states), progress or {})


HALF = DeliveryProgress(state="downloading", done_bytes=3_100_000_000, total_bytes=7_000_000_000, total_files=5)


def test_a_download_says_how_far_it_is(make: Any) -> None:
    found, counts = condition_of(make, [{"state": RUNNING}, {"state": DONE}], {"reach-0": HALF})
    assert found[:2] == ("Unknown", "Downloading")
    assert found[2] == "pod/reach-0: 44% of 7.0 GB, 0 of 5 files"
    assert (counts["percent"], counts["fetching"], counts["delivered"]) == (44, 1, 1)
    tried = msgspec.structs.replace(HALF, trouble="https://models.example/m: answers 503")
    found, _ = condition_of(make, [{"state": RUNNING}], {"reach-0": tried})
    assert found[2].endswith("; trying again: https://models.example/m: answers 503")
    unknown = DeliveryProgress(trouble="https://models.example/SHA256SUMS: Name or service not known")
    found, _ = condition_of(make, [{"state": RUNNING}], {"reach-0": unknown})
    assert found[2] == f"pod/reach-0: preparing; trying again: {unknown.trouble}"
    found, _ = condition_of(make, [{"state": RUNNING}], {})
    assert found == ("Unknown", "Downloading", "pod/reach-0: starting")


def test_one_that_waits_does_not_pull_the_percent_down(make: Any) -> None:
    behind = DeliveryProgress(state="waiting", done_bytes=1, total_bytes=7_000_000_000, total_files=5)
    _, counts = condition_of(make, [{"state": RUNNING}, {"state": RUNNING}], {"reach-0": HALF, "reach-1": behind})
    assert counts["percent"] == 44


def test_it_is_verified_where_every_worker_has_it(make: Any) -> None:
    found, counts = condition_of(make, [{"state": DONE}, {"state": DONE}])
    assert found == ("True", "Verified", "revision a is whole and verified where its 2 workers are")
    assert counts == {"delivered": 2, "fetching": 0, "failed": 0, "percent": 100}
    assert condition_of(make, [])[0][:2] == ("Unknown", "NoWorker")
    assert condition_of(make, [{"state": {"waiting": {}}}])[0][:2] == ("Unknown", "Pending")


def test_a_failure_has_the_code_as_its_reason_and_the_next_step(make: Any) -> None:
    expected = ("False", "ModelMismatch", "pod/reach-0: m has sha256 b, expected a (put the right file there)")
    backing_off = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ENDED}
    again = {"state": RUNNING, "lastState": ENDED}
    for state in ({"state": ENDED}, backing_off, again):  # one condition, however the attempts go
        assert condition_of(make, [state, {"state": DONE}])[0] == expected
    goes_on = condition_of(make, [again], {"reach-0": HALF})[0]
    assert goes_on[:2] == ("Unknown", "Downloading")
    assert condition_of(make, [{"state": ENDED}, {"state": ENDED}])[0][2].endswith("(and 1 more)")
    killed = {"state": {"terminated": {"exitCode": 137, "message": ""}}}
    assert condition_of(make, [killed])[0] == ("False", "Failed", "pod/reach-0: fetching ended with exit code 137")


def test_the_plan_looks_again_only_while_something_is_on_its_way(make: Any) -> None:
    policy = fetched(make)

    def again_s(state: Json) -> float | None:
        observed = make.Observed(
            live=make.body(), now=make.now, children=make.applied(policy), pods=pods(make, policy, state)
        )
        result = plan.plan(policy, observed, make.settings)
        assert "delivery" in result.status
        found: float | None = result.again_s
        return found

    assert again_s({"state": RUNNING}) == delivery_status.LOOK_S
    assert again_s({"state": DONE}) is None


async def test_pods_that_fetch_are_asked_and_no_others(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = telling.Progress()
    counted.begin(files=2, total_bytes=100)
    counted.received(42)
    port = telling.serve(counted, "127.0.0.1", 0)
    monkeypatch.setattr(delivery_status, "PROGRESS_PORT", port)
    policy = fetched(make)
    asked = pods(make, policy, {"state": RUNNING}, {"state": DONE}, {"state": RUNNING})
    asked[0]["status"]["podIP"] = "127.0.0.1"
    asked[2]["metadata"]["deletionTimestamp"] = make.now
    poller = delivery_polling.DeliveryPoller()
    try:
        found = await poller.of(asked)
    finally:
        await poller.close()
    assert list(found) == ["reach-0"]
    assert (found["reach-0"].percent, found["reach-0"].total_files) == (42, 2)


async def test_an_answer_holds_until_the_next_look(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A status that changes has the policy looked at at once: with a new answer each time that would never end.
    counted = telling.Progress()
    counted.begin(files=2, total_bytes=100)
    monkeypatch.setattr(delivery_status, "PROGRESS_PORT", telling.serve(counted, "127.0.0.1", 0))
    monkeypatch.setattr(delivery_polling, "TIMEOUT_S", 60.0)
    (pod,) = pods(make, fetched(make), {"state": RUNNING})
    pod["status"]["podIP"] = "127.0.0.1"
    now_s = 0.0
    poller = delivery_polling.DeliveryPoller(lambda: now_s)

    async def percent() -> int:
        (found,) = (await poller.of([pod])).values()
        return found.percent

    try:
        assert await percent() == 0
        counted.received(42)
        now_s = delivery_status.LOOK_S - 0.1
        assert await percent() == 0
        now_s = delivery_status.LOOK_S
        assert await percent() == 42
        counted.received(8)
        pod["metadata"]["uid"] = "of another one of this name"
        assert await percent() == 50
    finally:
        await poller.close()


@pytest.mark.parametrize("answer", ["redirect", "flood"])
async def test_a_pod_can_neither_flood_the_operator_nor_send_it_elsewhere(
    make: Any, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    asked: list[str] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.path == "/progress" and answer == "redirect":
            return web.Response(status=302, headers={"location": "/elsewhere"})
        return web.Response(body=b'{"state": "downloading"}' + bytes([32]) * (1 << 20))

    application = web.Application()
    application.router.add_get("/{rest:.*}", reply)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setattr(delivery_status, "PROGRESS_PORT", runner.addresses[0][1])
    monkeypatch.setattr(delivery_polling, "TIMEOUT_S", 60.0)
    (pod,) = pods(make, fetched(make), {"state": RUNNING})
    pod["status"]["podIP"] = "127.0.0.1"
    poller = delivery_polling.DeliveryPoller()
    try:
        assert await poller.of([pod]) == {}
    finally:
        await poller.close()
        await runner.cleanup()
    assert asked == ["/progress"]


def test_the_percentage_is_a_metric() -> None:
    found = Telemetry()
    about = {"namespace": "line-1", "name": "reach"}
    statuses = [{"metadata": about, "status": {"delivery": {"percent": 42}}}, {"metadata": about | {"name": "x"}}]
    found.watch(dict, lambda: statuses)
    lines = [line for line in found.exposition().decode().splitlines() if "delivery_percent{" in line]
    assert lines == ['taktline_policydeployment_delivery_percent{namespace="line-1",policy="reach"} 42.0']


def test_a_policy_that_is_not_fetched_has_neither_condition_nor_init_container(make: Any) -> None:
    policy = make.policy()
    pod = template(make, policy)
    assert "initContainers" not in pod
    result = plan.plan(policy, make.Observed(live=make.body(), now=make.now), make.settings)
    assert delivery_status.CONDITION not in {c["type"] for c in result.status["conditions"]}
    assert workload.config_map(policy, policy.spec.pools[0])["data"].keys() == {"engine.json"}
    assert model_source.described({"source": {"path": "/x", "pvc": None, "http": None}, "statisticsFrom": None}) == {
        "source": {"path": "/x", "pvc": None}
    }
