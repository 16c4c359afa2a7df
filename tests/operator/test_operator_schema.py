"""The PolicyDeployment API: every rule accepts and rejects, every field is described, types and schema agree."""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from taktline_operator import engine_spec, schema, spec
from taktline_protocol.deployment import EngineOptions, ParallelOptions, RtcOptions, SearchOptions, WorldActionOptions
from taktline_protocol.errors import ErrorCode, TaktlineError

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


def changed(base: Json, path: str, value: object) -> Json:
    """`base` with one field set; a None value removes it."""
    result = copy.deepcopy(base)
    target: Any = result
    *parents, last = path.split(".")
    for name in parents:
        target = target[int(name)] if name.isdigit() else target.setdefault(name, {})
    if value is None:
        del target[last]
    elif isinstance(target, list):
        target[int(last)] = value
    else:
        target[last] = value
    return result


# (what it is about, field, a value that is right, a value that is wrong, what the message says)
SCALED = {
    "model": {"family": "pi05", "source": {"path": "/srv/x"}},
    "pools": [{"name": "p", "accelerator": "a40", "maxReplicas": 4}],
    "slo": {"controlBudgetMs": 100},
    "scaling": {},
}


def engine_of(family: str, **engine: Any) -> Json:
    """The spec fields of a policy of `family` with these engine fields."""
    return {"model": {"family": family, "source": {"path": "/srv/x"}}, "engine": engine}


A40: Json = {"pools": [{"name": "p", "accelerator": "a40"}]}
PIN = "a" * 64
MIRROR = {"url": "https://models.example/reach", "sha256": PIN}


def fetched(model: Json | None = None, **source: Any) -> Json:
    """A model whose source is this one."""
    return {"family": "pi05", "source": source, **(model or {})}


JETSON = {"pools": [{"name": "p", "accelerator": "jetson-thor"}]}
RULES = [
    ("name length", "metadata.name", "a" * 40, "a" * 41, "at most 40 lower-case letters"),
    ("name letters", "metadata.name", "pick-2", "Pick_2", "lower-case letters, digits and dashes"),
    ("largest bucket", "spec.batching", {"maxBatch": 8}, {"maxBatch": 9}, "larger than every bucket"),
    ("wait below budget", "spec.batching", {"maxWaitMs": 99}, {"maxWaitMs": 100}, "longer than batching.maxWaitMs"),
    ("absolute path", "spec.model.source", {"path": "/srv/x"}, {"path": "srv/x"}, "absolute folder on the node"),
    ("no parent folder", "spec.model.source", {"path": "/srv/.x"}, {"path": "/srv/../x"}, "without '..'"),
    (
        "one source",
        "spec.model.source",
        {"path": "/x"},
        {"path": "/x", "pvc": {"claimName": "c"}},
        "exactly one source",
    ),
    ("some source", "spec.model.source", {"pvc": {"claimName": "c"}}, {}, "exactly one source"),
    (
        "path in the volume",
        "spec.model.source",
        {"pvc": {"claimName": "c", "path": "a/b"}},
        {"pvc": {"claimName": "c", "path": "/a"}},
        "relative to the volume's root",
    ),
    (
        "address of a mirror",
        "spec.model",
        fetched(http=MIRROR),
        fetched(http=MIRROR | {"url": "https://me:secret@models.example/reach"}),
        "a token comes from tokenSecret",
    ),
    (
        "pinned mirror",
        "spec.model",
        fetched(http=MIRROR),
        fetched(http={"url": "https://models.example/reach"}),
        "must be pinned",
    ),
    (
        "pinned bucket",
        "spec.model",
        fetched({"sha256": {"model.safetensors": PIN}}, s3={"bucket": "robots"}),
        fetched(s3={"bucket": "robots"}),
        "must be pinned",
    ),
    (
        "listed files",
        "spec.model",
        fetched({"sha256": {"model.safetensors": PIN}}, http=MIRROR | {"layout": "Listed"}),
        fetched(http=MIRROR | {"layout": "Listed"}),
        "Listed and Index fetch the files that model.sha256 names",
    ),
    (
        "image by digest",
        "spec.model",
        fetched(oci={"reference": f"registry.example/reach@sha256:{PIN}"}),
        fetched(oci={"reference": "registry.example/reach:v1"}),
        "pinned by digest",
    ),
    (
        "path in the image",
        "spec.model",
        fetched(oci={"reference": f"registry.example/reach@sha256:{PIN}", "path": "a/b"}),
        fetched(oci={"reference": f"registry.example/reach@sha256:{PIN}", "path": "../a"}),
        "relative to the image's root",
    ),
    (
        "commit of a hub",
        "spec.model",
        fetched(hub={"repo": "org/reach", "revision": "a" * 40}),
        fetched(hub={"repo": "org/reach", "revision": "main"}),
        "branches and tags move",
    ),
    (
        "statistics of what is fetched",
        "spec.model",
        fetched({"statisticsFrom": {"url": "https://x.example/n", "path": "n", "sha256": PIN}}, http=MIRROR),
        fetched({"statisticsFrom": {"url": "https://x.example/n", "path": "n", "sha256": PIN}}, path="/srv/x"),
        "put the file into their folder",
    ),
    (
        "statistics of a bucket",
        "spec.model",
        fetched({"statisticsFrom": {"key": "n", "path": "n", "sha256": PIN}}, s3={"bucket": "robots", "sha256": PIN}),
        fetched({"statisticsFrom": {"key": "n", "path": "n", "sha256": PIN}}, http=MIRROR),
        "a key of the source's bucket",
    ),
    (
        "one place of statistics",
        "spec.model",
        fetched({"statisticsFrom": {"url": "https://x.example/n", "path": "n", "sha256": PIN}}, http=MIRROR),
        fetched({"statisticsFrom": {"path": "n", "sha256": PIN}}, http=MIRROR),
        "exactly one of statisticsFrom.url",
    ),
    (
        "place of statistics",
        "spec.model",
        fetched({"statisticsFrom": {"url": "https://x.example/n", "path": "a/n", "sha256": PIN}}, http=MIRROR),
        fetched({"statisticsFrom": {"url": "https://x.example/n", "path": "/a/n", "sha256": PIN}}, http=MIRROR),
        "relative to the checkpoint folder",
    ),
    (
        "one cache",
        "spec.delivery.cache",
        {"claimName": "models"},
        {"claimName": "models", "hostPath": "/var/lib/models"},
        "not both",
    ),
    (
        "one proxy",
        "spec.delivery",
        {"proxySecret": {"name": "way-out"}, "noProxy": "models.example"},
        {"proxySecret": {"name": "way-out"}, "proxy": "http://proxy:3128"},
        "set delivery.proxy or delivery.proxySecret, not both",
    ),
    (
        "fields that Ray has no use for",
        "spec",
        engine_of("vjepa2-ac", runtime="ray") | A40,
        engine_of("vjepa2-ac", runtime="ray")
        | {"pools": [{"name": "p", "accelerator": "a40"}, {"name": "q", "accelerator": "a40", "gpusPerNode": 8}]},
        "leave pools[].startupSeconds, gpusPerNode and mesh out",
    ),
    (
        "GPUs by claim",
        "spec",
        {"pools": [{"name": "p", "accelerator": "h100", "claimTemplate": "one-gpu"}]},
        {"pools": [{"name": "p", "accelerator": "h100", "claimTemplate": "one-gpu", "migProfile": "1g.10gb"}]},
        "claimTemplate brings the GPUs",
    ),
    ("folder of the cache", "spec.delivery.cache", {"hostPath": "/a"}, {"hostPath": "a"}, "must be an absolute folder"),
    ("digest", "spec.model.sha256", {"m": "a" * 64}, {"m": "A" * 64}, "64 lower-case hex digits"),
    ("ascending buckets", "spec.engine", {"buckets": [1, 3]}, {"buckets": [3, 1]}, "strictly ascending"),
    ("distinct buckets", "spec.engine", {"buckets": [1]}, {"buckets": [1, 1]}, "strictly ascending"),
    ("control period", "spec.engine", {"controlPeriodMs": 0.5}, {"controlPeriodMs": 0}, "greater than 0"),
    ("budget", "spec.slo.controlBudgetMs", 6, -1, "controlBudgetMs must be greater than 0"),
    ("objective", "spec.slo.onTimeObjective", 0.9, 1, "between 0 and 1"),
    ("SLO period", "spec.slo.windowDays", 7, 14, "windowDays must be 7, 28 or 30"),
    (
        "robot weights",
        "spec",
        {"access": {"robotWeights": {"arm-7": 3, "arm-8": 0.5}}},
        {"access": {"robotWeights": {"arm-7": 0}}},
        "each of robotWeights must be above 0",
    ),
    ("tolerance", "spec.rollout.parity.tolerance", 0, -0.1, "tolerance must not be negative"),
    ("tolerances", "spec.rollout.parity.tolerances", [0, 1], [0, -1], "no tolerance may be negative"),
    ("agreement", "spec.rollout.parity.minAgreement", 1, 0, "must lie above 0"),
    ("ascending steps", "spec.rollout.steps", [5, 100], [50, 5, 100], "steps must be strictly ascending"),
    ("whole rollout", "spec.rollout.steps", [100], [5, 50], "end with 100"),
    (
        "cost",
        "spec.pools",
        [{"name": "p", "accelerator": "a40", "costPerHour": 0}],
        [{"name": "p", "accelerator": "a40", "costPerHour": -1}],
        "costPerHour must not be negative",
    ),
    ("one scaler", "spec", SCALED, SCALED | {"replicas": 3}, "let no other autoscaler set them"),
    (
        "one scaler in pools",
        "spec",
        SCALED,
        SCALED | {"pools": [{"name": "p", "accelerator": "a40", "maxReplicas": 4, "replicas": 2}]},
        "let no other autoscaler",
    ),
    (
        "recommending leaves replicas alone",
        "spec",
        SCALED | {"replicas": 3, "scaling": {"mode": "Recommend"}},
        SCALED | {"replicas": 3, "scaling": {"mode": "Automatic"}},
        "let no other autoscaler",
    ),
    (
        "MIG slices",
        "spec.pools.0",
        {"name": "a", "accelerator": "h100", "migProfile": "1g.10gb"},
        {"name": "a", "accelerator": "rtx-5090", "migProfile": "1g.10gb"},
        "migProfile cuts a GPU into slices",
    ),
    (
        "Ray runs planners",
        "spec",
        SCALED | engine_of("vjepa2-ac", runtime="ray"),
        SCALED | engine_of("pi05", runtime="ray"),
        "spreads a planner's search over a Ray cluster",
    ),
    (
        "KEDA begins with a number",
        "spec",
        SCALED | {"replicas": 1, "scaling": {"mode": "Recommend", "keda": {"serverAddress": "http://p:9090"}}},
        SCALED | {"scaling": {"mode": "Recommend", "keda": {"serverAddress": "http://p:9090"}}},
        "scaling.keda lets KEDA set spec.replicas",
    ),
    (
        "one autoscaler",
        "spec",
        SCALED | {"replicas": 1, "scaling": {"mode": "Recommend", "keda": {"serverAddress": "http://p:9090"}}},
        SCALED | {"replicas": 1, "scaling": {"mode": "Automatic", "keda": {"serverAddress": "http://p:9090"}}},
        "one autoscaler decides; with scaling.keda",
    ),
    ("room", "spec", SCALED, SCALED | {"pools": [{"name": "p", "accelerator": "a40"}]}, "needs room"),
    ("wait", "spec.batching", {"maxWaitMs": 0}, {"maxWaitMs": -1}, "must not be negative"),
    (
        "minimum and maximum",
        "spec.pools.0",
        {"name": "a", "accelerator": "cpu", "minReplicas": 2, "maxReplicas": 2},
        {"name": "a", "accelerator": "cpu", "minReplicas": 3, "maxReplicas": 2},
        "minReplicas must not be greater than maxReplicas",
    ),
    (
        "replicas between",
        "spec.pools.0",
        {"name": "a", "accelerator": "cpu", "minReplicas": 1, "maxReplicas": 3, "replicas": 3},
        {"name": "a", "accelerator": "cpu", "minReplicas": 1, "maxReplicas": 3, "replicas": 4},
        "must lie between",
    ),
    (
        "one owner of replicas",
        "spec",
        {"replicas": 2, "pools": [{"name": "a", "accelerator": "cpu", "maxReplicas": 2}]},
        {"replicas": 2, "pools": [{"name": "a", "accelerator": "cpu", "replicas": 1}]},
        "not both",
    ),
    (
        "families with quantised weights",
        "spec",
        engine_of("pi0", quantisation={"expert": "int8"}) | A40,
        engine_of("gr00t-n1.7", quantisation={"expert": "int8"}) | A40,
        "the action expert of pi0 and pi05",
    ),
    (
        "pools that read quantised weights",
        "spec",
        engine_of("pi05", quantisation={"expert": "int8"}) | A40,
        engine_of("pi05", quantisation={"expert": "fp8"}) | A40,
        "engine.quantisation is read on a GPU",
    ),
    (
        "bf16 of quantised weights",
        "spec",
        engine_of("pi05", precision="bf16", quantisation={"expert": "int8"}) | A40,
        engine_of("pi05", precision="fp32", quantisation={"expert": "int8"}) | A40,
        "set precision bf16 or fp8",
    ),
    (
        "a bucket of quantised weights",
        "spec",
        engine_of("pi05", buckets=[2, 8], quantisation={"expert": "int8", "maxBatch": 2}) | A40,
        engine_of("pi05", buckets=[2, 8], quantisation={"expert": "int8", "maxBatch": 1}) | A40,
        "nothing would read the quantised weights",
    ),
    (
        "steps to fall back on",
        "spec",
        {"engine": {"cheaperSteps": [5]}, "degrade": {"minSolverSteps": 5}},
        {"engine": {"cheaperSteps": [5]}, "degrade": {"minSolverSteps": 6}},
        "workers that are ready for fewer steps",
    ),
    (
        "shorter chunks to fall back on",
        "spec",
        {"engine": {"shorterHorizons": [25]}, "degrade": {"minActionHorizon": 25}},
        {"engine": {"shorterHorizons": [25]}, "degrade": {"minActionHorizon": 26}},
        "workers that are ready for shorter chunks",
    ),
    (
        "searching families",
        "spec",
        engine_of("vjepa2-ac", search={}),
        engine_of("pi05", search={}),
        "only family vjepa2-ac is one",
    ),
    (
        "planners have no tail",
        "spec",
        engine_of("pi0", rtc={}),
        engine_of("vjepa2-ac", rtc={}),
        "a planner (vjepa2-ac)",
    ),
    (
        "trained tails",
        "spec",
        engine_of("pi05", rtc={"mode": "trained"}),
        engine_of("pi0", rtc={"mode": "trained"}),
        "which only family pi05 has",
    ),
    (
        "one schedule",
        "spec",
        engine_of("gr00t-n1.7", rtc={"schedule": "exp"}),
        engine_of("gr00t-n1.7", rtc={"schedule": "linear"}),
        "leave engine.rtc.schedule out",
    ),
    (
        "families that imagine",
        "spec",
        engine_of("cosmos3-nano", worldAction={"imagine": True}),
        engine_of("pi05", worldAction={}),
        "only the cosmos3 families are such",
    ),
    (
        "families with cheaper steps",
        "spec",
        engine_of("pi0", cheaperSteps=[5]),
        engine_of("gr00t-n1.7", cheaperSteps=[2]),
        "works for families pi0 and pi05",
    ),
    (
        "families with shorter chunks",
        "spec",
        engine_of("pi0", shorterHorizons=[25]),
        engine_of("gr00t-n1.7", shorterHorizons=[16]),
        "this one has a single length",
    ),
    (
        "families that share a search",
        "spec",
        engine_of("vjepa2-ac", parallel={"search": 4}),
        engine_of("pi05", parallel={"search": 2}),
        "only family vjepa2-ac searches",
    ),
    (
        "families with guidance",
        "spec",
        engine_of("cosmos3-nano", parallel={"cfg": 2}),
        engine_of("pi05", parallel={"cfg": 2}),
        "only the cosmos3 families have that",
    ),
    (
        "families that can be cut",
        "spec",
        engine_of("cosmos3-edge", parallel={"tp": 4, "cfg": 2}),
        engine_of("gr00t-n1.7", parallel={"tp": 2}),
        "only the cosmos3 families allow",
    ),
    (
        "one GPU beside the robot",
        "spec",
        engine_of("pi05", parallel={"dp": 1}) | JETSON,
        engine_of("pi05", parallel={"dp": 2}) | JETSON,
        "a jetson-thor has one GPU",
    ),
    (
        "cheaper and a divisor",
        "spec.engine",
        {"solverSteps": 10, "cheaperSteps": [5, 2]},
        {"solverSteps": 10, "cheaperSteps": [4]},
        "smaller than solverSteps and divide it",
    ),
    (
        "shorter than the policy's own",
        "spec.engine",
        {"actionHorizon": 50, "shorterHorizons": [25, 10]},
        {"actionHorizon": 50, "shorterHorizons": [50]},
        "smaller than actionHorizon",
    ),
    (
        "one horizon",
        "spec",
        engine_of("vjepa2-ac", search={"horizon": 3}),
        engine_of("vjepa2-ac", search={}, actionHorizon=3),
        "set search.horizon",
    ),
    (
        "enough candidates",
        "spec",
        engine_of("vjepa2-ac", search={"candidates": 10}),
        engine_of("vjepa2-ac", search={"candidates": 9}),
        "elites must not be more than candidates",
    ),
    (
        "candidates within the limit",
        "spec",
        engine_of("vjepa2-ac", search={"candidates": 800, "maxCandidates": 800}),
        engine_of("vjepa2-ac", search={"maxCandidates": 399}),
        "candidates must not be more than maxCandidates",
    ),
    (
        "rounds within the limit",
        "spec",
        engine_of("vjepa2-ac", search={"rounds": 200, "maxRounds": 200}),
        engine_of("vjepa2-ac", search={"rounds": 200}),
        "rounds must not be more than maxRounds",
    ),
    (
        "horizon within the limit",
        "spec",
        engine_of("vjepa2-ac", search={"maxHorizon": 2}),
        engine_of("vjepa2-ac", search={"maxHorizon": 1}),
        "horizon must not be more than maxHorizon",
    ),
    (
        "closing within the plan",
        "spec",
        engine_of("vjepa2-ac", search={"closeGripper": 2}),
        engine_of("vjepa2-ac", search={"closeGripper": 3}),
        "closeGripper is a step of the plan",
    ),
    (
        "convergence where there is any",
        "spec",
        engine_of("vjepa2-ac", search={"optimiser": "mppi", "temperature": 0.1, "convergence": 0}),
        engine_of("vjepa2-ac", search={"optimiser": "mppi", "convergence": 0.1}),
        "optimiser mppi keeps its standard deviation",
    ),
    (
        "pinned dimensions",
        "spec",
        engine_of("vjepa2-ac", search={"pins": {"z": 0, "gripper": -0.5}}),
        engine_of("vjepa2-ac", search={"pins": {"yaw": 0}}),
        "pins takes the dimensions x, y, z and gripper",
    ),
    (
        "side by side or together",
        "spec",
        engine_of("vjepa2-ac", parallel={"dp": 2}),
        engine_of("vjepa2-ac", parallel={"dp": 2, "search": 2}),
        "set one of the two to 1",
    ),
    (
        "ranks divide heads",
        "spec",
        engine_of("cosmos3-nano", parallel={"tp": 8}),
        engine_of("cosmos3-nano", parallel={"tp": 3}),
        "parallel.tp must be 1, 2, 4 or 8",
    ),
    (
        "one node",
        "spec",
        engine_of("cosmos3-nano", parallel={"dp": 2, "cfg": 2, "tp": 4}),
        engine_of("cosmos3-nano", parallel={"dp": 3, "cfg": 2, "tp": 4}),
        "more than the 16 GPUs",
    ),
]


def with_field(make: Any, path: str, value: Any) -> Json:
    base: Json = make.body()
    if path == "spec":
        return changed(base, "spec", base["spec"] | value)
    return changed(base, path, value)


@pytest.mark.parametrize(("path", "right"), [(r[1], r[2]) for r in RULES], ids=[r[0] for r in RULES])
def test_rule_accepts(make: Any, path: str, right: object) -> None:
    schema.validated(with_field(make, path, right))


@pytest.mark.parametrize(("path", "wrong", "says"), [(r[1], r[3], r[4]) for r in RULES], ids=[r[0] for r in RULES])
def test_rule_rejects_with_a_message_for_people(make: Any, path: str, wrong: object, says: str) -> None:
    with pytest.raises(TaktlineError) as caught:
        schema.validated(with_field(make, path, wrong))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert says in caught.value.message


def test_every_cel_rule_has_a_case_in_the_table() -> None:
    said = " | ".join(rule[4] for rule in RULES)
    for path, part in walk(schema.object_schema()):
        for rule in part.get("x-kubernetes-validations", []):
            assert any(words in rule["message"] for words in said.split(" | ")), f"{path}: {rule['message']}"


@pytest.mark.parametrize(
    ("path", "wrong", "says"),
    [
        ("spec.model.family", "gpt", "is not one of pi0, pi05"),
        ("spec.model", {"family": "pi05"}, "spec.model.source: required"),
        ("spec.engin", {}, "spec.engin: unknown field"),
        ("spec.slo.controlBudgetMs", "fast", "must be a number, not string"),
        ("spec.slo.controlBudgetMs", True, "must be a number, not boolean"),
        ("spec.pools", [], "needs at least 1 item"),
        ("spec.pools", [{"name": "a", "accelerator": "cpu"}] * 2, "duplicate name 'a'"),
        ("spec.pools.0.name", "A", "does not match"),
        ("spec.engine", {"buckets": [0]}, "below the minimum 1"),
        ("spec.engine", {"solverSteps": 1.5}, "must be an integer, not number"),
        ("spec.pools.0.resources", {"requests": {"cpu": "lots"}}, "not a quantity"),
        ("spec.engine", {"parallel": {"dp": 0}}, "spec.engine.parallel.dp: 0 is below the minimum 1"),
        ("spec.engine", {"parallel": {"cfg": 3}}, "spec.engine.parallel.cfg: 3 is above the maximum 2"),
        (
            "spec.engine",
            {"parallel": {"gpus": 2}},
            "spec.engine.parallel.gpus: unknown field (known: cfg, dp, search, searchModel, tp)",
        ),
        ("spec.access", {"robotWeights": {"a": 1001}}, "above the maximum 1000"),
        ("spec.access", {"priorityCeilings": {"lab": "urgent"}}, "is not one of safety, production"),
        ("spec.engine", {"frameCacheMb": -1}, "below the minimum 0"),
        ("spec.engine", {"quantisation": {}}, "spec.engine.quantisation.expert"),
        ("spec.engine", {"quantisation": {"expert": "int4"}}, "is not one of fp8, int8"),
        ("spec.engine", {"maxImagePixels": 0}, "below the minimum 1"),
        ("spec.engine", {"rtc": {"mode": "on"}}, "is not one of auto, guided, trained, off"),
        ("spec.engine", {"rtc": {"maxGuidanceWeight": 0}}, "below the minimum"),
        ("spec.engine", {"worldAction": {"guidance": 0.5}}, "below the minimum 1"),
        ("spec.engine", {"worldAction": {"guidanceInterval": [1]}}, "needs at least 2 item"),
        ("spec.engine", {"search": {"pins": {"x": 2}}}, "spec.engine.search.pins.x: 2.0 is above the maximum 1"),
        ("spec.engine", {"search": {"anytime": "yes"}}, "must be a boolean, not string"),
        (
            "spec.clients",
            [{"protocol": "openpi", "metadata": {"a": {}}}],
            "spec.clients[0].metadata.a: must be a boolean,",
        ),
        ("spec.clients", [{"protocol": "openpi", "metadata": {"a": [1, "b"]}}], "or a list of numbers"),
        ("spec.slo", None, "spec.slo: required"),
        ("metadata.name", None, "metadata.name: required"),
    ],
)
def test_structure_rejects(make: Any, path: str, wrong: object, says: str) -> None:
    with pytest.raises(TaktlineError) as caught:
        schema.validated(changed(make.body(), path, wrong))
    assert says in caught.value.message


def test_all_problems_are_named_at_once(make: Any) -> None:
    wrong = changed(changed(make.body(), "spec.slo.controlBudgetMs", 0), "spec.engine", {"buckets": [2, 1]})
    with pytest.raises(TaktlineError, match=r"controlBudgetMs.*buckets"):
        schema.validated(wrong)


@pytest.mark.parametrize("wrong", [{"apiVersion": "v1", "kind": "Pod"}, {}, {"kind": "PolicyDeployment"}])
def test_another_kind_is_refused_with_how_to_start(wrong: Json) -> None:
    with pytest.raises(TaktlineError) as caught:
        schema.validated(wrong)
    assert "kind: PolicyDeployment" in caught.value.next_step


def test_validation_leaves_its_input_alone(make: Any) -> None:
    before = make.body()
    given = copy.deepcopy(before)
    schema.validated(given)
    assert given == before


def walk(part: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Every schema node with its path."""
    yield path, part
    for name, inner in part.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    for keyword, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(part.get(keyword), dict):
            yield from walk(part[keyword], path + mark)


def test_every_field_is_described_for_kubectl_explain() -> None:
    for path, part in walk(schema.object_schema()):
        if path == ".metadata" or path.endswith("{}"):
            continue  # the API server describes the one; a map's values are described by the map
        described = part.get("description", "")
        assert described.endswith("."), f"{path}: {described!r}"


def test_schema_is_closed_and_bounded() -> None:
    for path, part in walk(schema.object_schema()["properties"]["spec"], "spec"):
        # No structural schema says "a boolean, a number, a string or a list of numbers"; the operator checks those.
        assert "x-kubernetes-preserve-unknown-fields" not in part or path == "spec.clients[].metadata{}", path
        if part.get("type") == "array":
            assert "maxItems" in part, f"{path}: an unbounded list makes CEL rules too costly for the API server"
            assert "x-kubernetes-list-type" in part, path


def struct_of(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct inside `X`, `X | None` or `tuple[X, ...]`."""
    for inner in (annotation, *typing.get_args(annotation)):
        if isinstance(inner, type) and not isinstance(inner, types.GenericAlias) and issubclass(inner, msgspec.Struct):
            return inner
    return None


def assert_agrees(struct: type[msgspec.Struct], part: Json, path: str) -> None:
    part = part.get("items", part)
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    assert fields.keys() == part["properties"].keys(), path
    hints = typing.get_type_hints(struct)
    for name, inner in part["properties"].items():
        field, where = fields[name], f"{path}.{name}"
        assert field.required == (name in part.get("required", [])), where
        annotation = hints[field.name]
        if "enum" in inner:
            literals = [value for value in flat_literals(annotation) if value]
            assert literals == inner["enum"], where
        nested = struct_of(annotation)
        if nested is not None:
            assert_agrees(nested, inner, where)
        elif "default" in inner:
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            assert default == inner["default"], where


def flat_literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [value for inner in typing.get_args(annotation) for value in flat_literals(inner)]


def test_typed_spec_and_schema_have_the_same_fields_enums_and_defaults() -> None:
    assert_agrees(spec.Spec, schema.object_schema()["properties"]["spec"], "spec")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (engine_spec.Search, SearchOptions),
        (engine_spec.Rtc, RtcOptions),
        (engine_spec.Parallel, ParallelOptions),
        (engine_spec.WorldAction, WorldActionOptions),
    ],
    ids=["search", "rtc", "parallel", "world_action"],
)
def test_parts_of_the_engine_have_the_workers_fields_and_defaults(
    ours: type[msgspec.Struct], theirs: type[msgspec.Struct]
) -> None:
    found, expected = ({f.name: f.default for f in msgspec.structs.fields(part)} for part in (ours, theirs))
    if ours is engine_spec.Parallel:  # the operator's own: it chooses `search` by it
        assert found.pop("search_model") is None
    factories = {f.name: f.default_factory for part in (ours, theirs) for f in msgspec.structs.fields(part)}
    assert found == expected
    assert {name for name, factory in factories.items() if factory is not msgspec.NODEFAULT} <= {"pins"}


def test_every_engine_field_of_the_worker_but_the_device_is_in_the_spec() -> None:
    decided = {*engine_spec.ALWAYS, *engine_spec.WHERE_SET}
    assert decided | {"device"} == set(EngineOptions.__struct_fields__)
    assert decided | {"runtime"} == set(engine_spec.Engine.__struct_fields__), "which runtime is the operator's affair"


def test_defaults_reach_the_typed_spec(make: Any) -> None:
    found = make.policy().spec
    assert found.engine.buckets == (1, 2, 4, 8)
    assert found.batching.max_wait_ms == 5.0
    assert found.slo.on_time_objective == 0.999
    assert found.pools[0].min_replicas == 1


def test_manifests_carry_this_very_crd() -> None:
    assert (ROOT / "deploy/manifests/policydeployments.yaml").read_text() == schema.crd_text()


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_is_valid(path: Path) -> None:
    from taktline_operator import planfile

    parsed = [spec.parse(document) for document in planfile.read_policies(path)]
    assert path.stem in {found.name for found in parsed}


def test_there_is_an_example_for_every_family_and_accelerator_class() -> None:
    from taktline_operator import planfile

    paths = sorted((ROOT / "deploy/examples").glob("*.yaml"))
    parsed = [spec.parse(document).spec for path in paths for document in planfile.read_policies(path)]
    properties = schema.object_schema()["properties"]["spec"]["properties"]
    families = properties["model"]["properties"]["family"]["enum"]
    classes = properties["pools"]["items"]["properties"]["accelerator"]["enum"]
    assert {found.model.family for found in parsed} == set(families)
    assert {pool.accelerator for found in parsed for pool in found.pools} == set(classes)


def replicas_case(pools: list[Json], total: int | None, expected: dict[str, int]) -> Callable[[Any], None]:
    def check(make: Any) -> None:
        parts: Json = {"pools": [{"accelerator": "cpu"} | pool for pool in pools]}
        if total is not None:
            parts["replicas"] = total
        assert make.policy(**parts).spec.desired_replicas() == expected

    return check


@pytest.mark.parametrize(
    "check",
    [
        replicas_case([{"name": "a"}], None, {"a": 1}),
        replicas_case([{"name": "a", "minReplicas": 0}], None, {"a": 0}),
        replicas_case([{"name": "a", "maxReplicas": 4, "replicas": 3}], None, {"a": 3}),
        replicas_case([{"name": "a", "replicas": 3}], None, {"a": 3}),
        replicas_case([{"name": "a", "maxReplicas": 2}, {"name": "b", "maxReplicas": 5}], 5, {"a": 2, "b": 3}),
        replicas_case([{"name": "a", "maxReplicas": 2}, {"name": "b", "maxReplicas": 5}], 99, {"a": 2, "b": 5}),
        replicas_case([{"name": "a", "minReplicas": 2}, {"name": "b"}], 0, {"a": 2, "b": 1}),
    ],
)
def test_replicas_by_pool(make: Any, check: Callable[[Any], None]) -> None:
    check(make)
