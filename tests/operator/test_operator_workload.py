"""What the planned pods look like: accelerators, security, sources, probes."""

from __future__ import annotations

from typing import Any

import pytest
from taktline_operator import accelerators, naming
from taktline_operator.plan import Ref

Json = dict[str, Any]
QUARANTINE = {"key": "taktline.dev/quarantine", "operator": "DoesNotExist"}
LOST = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]


def terms(pod: Json) -> list[list[Json]]:
    """The expressions of a pod's required node affinity."""
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [term["matchExpressions"] for term in required["nodeSelectorTerms"]]


def pod_of(make: Any, **pool: Any) -> Json:
    """The pod spec of a one-pool policy."""
    found = make.policy(pools=[{"name": "p", "accelerator": "cpu"} | pool])
    deployment = make.applied(found)[Ref("Deployment", "reach-p")]
    template: Json = deployment["spec"]["template"]["spec"]
    return template


@pytest.mark.parametrize("name", sorted(accelerators.CLASSES))
def test_pods_meet_the_restricted_pod_security_standard(make: Any, name: str) -> None:
    pod = pod_of(make, accelerator=name)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", sorted(set(accelerators.CLASSES) - {"cpu"}))
def test_a_gpu_class_asks_for_its_gpu_and_its_nodes(make: Any, name: str) -> None:
    pod = pod_of(make, accelerator=name)
    resources = pod["containers"][0]["resources"]
    assert resources["requests"][accelerators.GPU_RESOURCE] == resources["limits"][accelerators.GPU_RESOURCE] == "1"
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = [term["matchExpressions"][0] for term in required["nodeSelectorTerms"]]
    assert labels[0] == {"key": naming.LABEL_ACCELERATOR, "operator": "In", "values": [name]}
    assert labels[1]["key"] == "nvidia.com/gpu.product"
    assert labels[1]["values"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_cpu_asks_for_no_gpu_and_goes_anywhere(make: Any) -> None:
    pod = pod_of(make)
    assert not {"runtimeClassName", "nodeSelector"} & pod.keys()
    assert terms(pod) == [[QUARANTINE]]
    assert [toleration["key"] for toleration in pod["tolerations"]] == LOST
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": "1", "memory": "2Gi"}}


def test_jetson_is_arm64_with_the_nvidia_runtime(make: Any) -> None:
    pod = pod_of(make, accelerator="jetson-thor")
    assert pod["runtimeClassName"] == "nvidia"
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    for term in required["nodeSelectorTerms"]:
        assert {"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]} in term["matchExpressions"]


def test_what_the_pool_says_goes_before_the_class(make: Any) -> None:
    pod = pod_of(
        make,
        accelerator="h100",
        nodeSelector={"cell": "7"},
        tolerations=[{"key": "cell", "operator": "Equal", "value": "7"}],
        runtimeClassName="kata",
        image="registry.example/special:2",
        resources={"requests": {"cpu": 2}, "limits": {"nvidia.com/mig-1g.10gb": 1, "memory": "8Gi"}},
    )
    assert pod["nodeSelector"] == {"cell": "7"}
    assert terms(pod) == [[QUARANTINE]]
    assert pod["tolerations"][-1] == {"key": "cell", "operator": "Equal", "value": "7"}
    assert pod["runtimeClassName"] == "kata"
    container = pod["containers"][0]
    assert container["image"] == "registry.example/special:2"
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "8Gi", "nvidia.com/mig-1g.10gb": "1"},
        "limits": {"memory": "8Gi", "nvidia.com/mig-1g.10gb": "1"},
    }


@pytest.mark.parametrize(
    ("source", "volume", "mount", "path"),
    [
        ({"path": "/srv/a"}, {"hostPath": {"path": "/srv/a", "type": "Directory"}}, "/srv/a", "/srv/a"),
        (
            {"pvc": {"claimName": "c", "path": "x/y"}},
            {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
            "/models",
            "/models/x/y",
        ),
        (
            {"pvc": {"claimName": "c"}},
            {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
            "/models",
            "/models",
        ),
    ],
)
def test_the_checkpoint_is_mounted_read_only(make: Any, source: Json, volume: Json, mount: str, path: str) -> None:
    found = make.policy(model={"family": "pi05", "source": source})
    pod = make.applied(found)[Ref("Deployment", "reach-cpu")]["spec"]["template"]["spec"]
    assert {"name": "model", **volume} in pod["volumes"]
    assert {"name": "model", "mountPath": mount, "readOnly": True} in pod["containers"][0]["volumeMounts"]
    assert found.spec.model_path() == path


def test_a_worker_is_probed_over_grpc_and_says_why_it_ended(make: Any) -> None:
    container = pod_of(make)["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == 50051
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert container["command"][:2] == ["taktline-worker", "serve"]


def test_one_worker_is_replaced_without_a_gap(make: Any) -> None:
    strategy = make.applied(make.policy())[Ref("Deployment", "reach-cpu")]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_revision_is_the_users_name_or_follows_the_settings(make: Any) -> None:
    unnamed = {"family": "pi05", "source": {"path": "/srv/a"}}
    first = make.policy(model=unnamed).spec.revision()
    assert first == make.policy(model=unnamed).spec.revision()
    assert first != make.policy(model=unnamed, engine={"solverSteps": 3}).spec.revision()
    assert make.policy().spec.revision() == "a"
