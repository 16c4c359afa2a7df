"""What the planned pods look like: accelerators, security, sources, probes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from taktline_operator import accelerators, naming, workload
from taktline_operator.plan import Ref
from taktline_protocol.deployment import EngineConfig, QuantisationOptions

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


def test_a_derived_revision_is_golden(make: Any) -> None:
    """It is in engine.json: where it changes by an upgrade, every worker of an unnamed revision restarts."""
    unnamed = {"family": "pi05", "source": {"path": "/srv/a"}}
    assert make.policy(model=unnamed).spec.revision() == "r-8c9b378333"
    engine = {"solverSteps": 5, "precision": "fp32"}
    assert make.policy(model=unnamed, engine=engine).spec.revision() == "r-4a128bce82"


def engine_of(make: Any, family: str = "pi05", **engine: Any) -> Json:
    """The engine part of the engine.json of a policy."""
    found = make.policy(model={"family": family, "source": {"path": "/srv/a"}}, engine=engine)
    text = workload.engine_json(found, found.spec.pools[0])
    assert msgspec.json.decode(text, type=EngineConfig).engine == found.spec.engine_options("cpu")
    content: Json = json.loads(text)["engine"]
    return content


def test_engine_json_holds_what_the_spec_decides_and_no_more(make: Any) -> None:
    plain = {"device": "cpu", "precision": "bf16", "buckets": [1, 2, 4, 8]}
    assert engine_of(make) == plain
    chosen = engine_of(
        make,
        solverSteps=10,
        cheaperSteps=[5, 2],
        shorterHorizons=[25],
        maxImagePixels=1_000_000,
        frameCacheMb=0,
        rtc={"mode": "guided", "maxGuidanceWeight": 5},
        parallel={"dp": 2},
    )
    assert chosen == plain | {
        "solver_steps": 10,
        "cheaper_steps": [5, 2],
        "shorter_horizons": [25],
        "max_image_pixels": 1_000_000,
        "frame_cache_mb": 0,
        "rtc": {"mode": "guided", "max_guidance_weight": 5.0, "gradient": "identity"},
        "parallel": {"dp": 2, "cfg": 1, "tp": 1, "search": 1},
    }


def test_engine_json_of_quantised_weights(make: Any) -> None:
    found = make.policy(
        model={"family": "pi05", "source": {"path": "/srv/a"}},
        engine={"quantisation": {"expert": "int8"}},
        pools=[{"name": "p", "accelerator": "a40"}],
    )
    content = json.loads(workload.engine_json(found, found.spec.pools[0]))["engine"]
    assert content["quantisation"] == {"expert": "int8", "max_batch": 4}
    assert found.spec.engine_options("cuda").quantisation == QuantisationOptions(expert="int8")


def test_engine_json_spells_a_search_out(make: Any) -> None:
    search = engine_of(make, "vjepa2-ac", search={"candidates": 800, "pins": {"z": 0}, "closeGripper": 1})["search"]
    assert search == {
        "optimiser": "cem",
        "candidates": 800,
        "rounds": 10,
        "elites": 10,
        "horizon": 2,
        "max_step_m": 0.05,
        "momentum_mean": 0.15,
        "momentum_std": 0.15,
        "momentum_mean_gripper": 0.15,
        "momentum_std_gripper": 0.15,
        "pins": {"z": 0.0},
        "close_gripper": 1,
        "convergence": 0.0,
        "temperature": 0.25,
        "anytime": False,
        "max_candidates": 4096,
        "max_rounds": 100,
    }


@pytest.mark.parametrize(
    ("family", "parallel", "gpus", "shared_memory"),
    [
        ("pi05", None, 1, False),
        ("pi05", {"dp": 4}, 4, False),
        ("vjepa2-ac", {"search": 8}, 8, True),
        ("vjepa2-ac", {"dp": 2}, 2, False),
        ("cosmos3-nano", {"cfg": 2}, 2, True),
        ("cosmos3-nano", {"dp": 2, "cfg": 2, "tp": 4}, 16, True),
    ],
)
def test_a_pod_asks_for_the_gpus_that_its_worker_spreads_over(
    make: Any, family: str, parallel: Json | None, gpus: int, shared_memory: bool
) -> None:
    found = make.policy(
        model={"family": family, "source": {"path": "/srv/a"}},
        engine={"parallel": parallel} if parallel else {},
        pools=[{"name": "p", "accelerator": "h100"}],
    )
    pod = make.applied(found)[Ref("Deployment", "reach-p")]["spec"]["template"]["spec"]
    asked = pod["containers"][0]["resources"]
    assert asked["limits"] == {"nvidia.com/gpu": str(gpus)}
    assert asked["requests"] == {"cpu": str(4 * gpus), "memory": f"{24 * gpus}Gi", "nvidia.com/gpu": str(gpus)}
    memory = [volume for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"]
    mounts = [mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    assert ([volume["name"] for volume in memory], mounts) == ((["shm"], ["shm"]) if shared_memory else ([], []))


def test_gpus_that_a_pool_names_take_the_place_of_the_counted_ones(make: Any) -> None:
    found = make.policy(
        engine={"parallel": {"dp": 2}},
        pools=[{"name": "p", "accelerator": "h100", "resources": {"limits": {"nvidia.com/mig-3g.40gb": 2}}}],
    )
    pod = make.applied(found)[Ref("Deployment", "reach-p")]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "2"}


def test_replicas_on_cpus_ask_for_no_gpu(make: Any) -> None:
    found = make.policy(engine={"parallel": {"dp": 2}})
    pod = make.applied(found)[Ref("Deployment", "reach-cpu")]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": "2", "memory": "4Gi"}}
