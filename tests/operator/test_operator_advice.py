"""What is said of a PolicyDeployment beyond the CRD's rules: by the webhook and by the conditions in the same words."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from taktline_operator import accelerators, admission, advice, cel, engine_spec, schema, surveying
from taktline_operator.kube import ApiError
from taktline_protocol.families import FAMILIES, Family, loaded
from taktline_protocol.messages import BucketTime

Json = dict[str, Any]
H100 = {"name": "line", "accelerator": "h100"}
SLOW = [BucketTime(batch=1, median_ms=90.0, p99_ms=95.0)]


def said(policy: Any, **around: Any) -> advice.Advice:
    return advice.review(policy, advice.Surroundings(**around))


def only(findings: tuple[advice.Finding, ...]) -> advice.Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_nothing_is_said_of_what_is_right_or_not_known(make: Any) -> None:
    assert said(make.policy(pools=[H100])) == ((), ())


def test_requests_above_their_limit_are_refused_before_a_pod_is(make: Any) -> None:
    resources = {"requests": {"memory": "24Gi"}, "limits": {"memory": "24000Mi"}}
    finding = only(said(make.policy(pools=[H100 | {"resources": resources}])).refusals)
    assert finding == ("InvalidSpec", "pool line: resources.requests.memory 24Gi is more than its limit 24000Mi;"
                       " such pods are refused")  # fmt: skip
    equal = {"requests": {"memory": "24Gi"}, "limits": {"memory": "24576Mi"}}
    assert said(make.policy(pools=[H100 | {"resources": equal}])) == ((), ())


def test_a_time_zone_that_is_none_is_refused(make: Any) -> None:
    pools = [H100 | {"maxReplicas": 2}]
    assert "Europe/Berlin" in only(said(make.policy(pools=pools, scaling={"timeZone": "Berlin"})).refusals).message
    assert said(make.policy(pools=pools, scaling={"timeZone": "Europe/Berlin"})).refusals == ()


def test_a_policy_is_not_its_own_fallback(make: Any) -> None:
    assert "itself" in only(said(make.policy(degrade={"fallbackPolicy": "reach"})).refusals).message


def test_a_name_that_another_namespace_serves_is_refused(make: Any) -> None:
    finding = only(said(make.policy(), name_owner=("line-0", "reach")).refusals)
    assert finding.reason == "PolicyNameTaken"
    assert "line-0/reach" in finding.message


@pytest.mark.parametrize(
    ("family", "parallel", "says"),
    [
        ("cosmos3-nano", {"tp": 3}, "tp 3 does not divide the 32 and 8 attention heads of cosmos3-nano"),
        ("pi05", {"cfg": 2}, "cfg 2 splits classifier-free guidance, and pi05 has none"),
    ],
)
def test_a_mesh_that_the_family_cannot_take_is_refused_also_where_no_rule_of_the_crd_did(
    make: Any, family: str, parallel: Json, says: str
) -> None:
    policy = make.policy(pools=[H100])
    model = msgspec.structs.replace(policy.spec.model, family=family)
    engine = msgspec.structs.replace(policy.spec.engine, parallel=engine_spec.Parallel(**parallel))
    spec = msgspec.structs.replace(policy.spec, model=model, engine=engine)
    assert says in only(said(msgspec.structs.replace(policy, spec=spec)).refusals).message


@pytest.mark.parametrize(("split", "refused"), [("sequence", False), ("tensor", True), (None, True)])
def test_ranks_that_share_the_tokens_need_not_divide_the_heads(make: Any, split: str | None, refused: bool) -> None:
    policy = make.policy(pools=[H100])
    model = msgspec.structs.replace(policy.spec.model, family="cosmos3-nano")
    asked = {"parallel": engine_spec.Parallel(tp=3), "world_action": engine_spec.WorldAction(split=split)}
    spec = msgspec.structs.replace(
        policy.spec, model=model, engine=msgspec.structs.replace(policy.spec.engine, **asked)
    )
    refusals = said(msgspec.structs.replace(policy, spec=spec)).refusals
    assert any("does not divide" in finding.message for finding in refusals) == refused


def test_the_crds_rules_and_the_table_of_families_agree() -> None:
    enum = schema.object_schema()["properties"]["spec"]["properties"]["model"]["properties"]["family"]["enum"]
    assert set(enum) == set(FAMILIES)
    for name, family in FAMILIES.items():
        assert family.guided == name.startswith("cosmos3-"), "engine.parallel.cfg's rule goes by the name"
        assert bool(family.heads) == name.startswith("cosmos3-"), "engine.parallel.tp's rule goes by the name"
        assert not [tp for tp in (1, 2, 4, 8) if any(heads % tp for heads in family.heads)]


def test_families_that_are_said_to_be_loaded_are_those_of_the_worker() -> None:
    from taktline_worker.models.registry import FAMILIES as registry

    assert set(loaded()) == set(registry), "name a new loader in taktline_protocol.families, too"


@pytest.fixture
def no_loader(monkeypatch: pytest.MonkeyPatch) -> str:
    """A family that a worker image of this release would not load."""
    monkeypatch.setitem(FAMILIES, "minicpm-robot", Family(loaded=False))
    return "minicpm-robot"


def test_a_family_without_a_loader_is_a_caution(make: Any, no_loader: str) -> None:
    family = no_loader
    finding = only(said(make.policy(model={"family": family, "source": {"path": "/srv/x"}})).cautions)
    assert finding.reason == "FamilyNotLoaded"
    assert ", ".join(loaded()) in finding.message


def test_a_budget_below_the_measured_floor_is_a_caution_with_the_floor(make: Any) -> None:
    finding = only(said(make.policy(pools=[H100]), tables={"line": SLOW}).cautions)
    assert finding.reason == "BudgetBelowFloor"
    assert "slo.controlBudgetMs 100 is below its floor of 105 ms" in finding.message
    assert said(make.policy(pools=[H100], slo={"controlBudgetMs": 106}), tables={"line": SLOW}).cautions == ()


def test_a_declared_profile_stands_in_until_something_is_measured(make: Any) -> None:
    declared = H100 | {"profile": [{"batch": 1, "medianMs": 90, "p99Ms": 95}]}
    assert "declared in profile" in only(said(make.policy(pools=[declared])).cautions).message
    quick = [BucketTime(batch=1, median_ms=9.0, p99_ms=10.0)]
    assert said(make.policy(pools=[declared]), tables={"line": quick}).cautions == ()


def test_gpus_that_no_worker_uses_are_a_caution(make: Any) -> None:
    pool = H100 | {"resources": {"limits": {"nvidia.com/gpu": 4}}}
    assert only(said(make.policy(pools=[pool])).cautions).reason == "IdleGpus"


NODES = [{"kubernetes.io/arch": "arm64", "nvidia.com/gpu.product": "NVIDIA-Thor"}, {"zone": "a"}]


@pytest.mark.parametrize(
    ("pool", "fits"),
    [
        (H100, False),
        ({"name": "line", "accelerator": "jetson-thor"}, True),
        ({"name": "line", "accelerator": "cpu"}, True),
        (H100 | {"nodeSelector": {"zone": "a"}}, True),
        (H100 | {"nodeSelector": {"zone": "b"}}, False),
    ],
)
def test_a_pool_that_no_node_fits_is_a_caution(make: Any, pool: Json, fits: bool) -> None:
    cautions = said(make.policy(pools=[pool]), nodes=NODES).cautions
    assert [finding.reason for finding in cautions] == ([] if fits else ["NoNodeForPool"])


def test_a_node_in_quarantine_fits_nothing() -> None:
    labels = {"taktline.dev/accelerator": "h100"}
    assert accelerators.matches("h100", labels)
    assert not accelerators.matches("h100", labels | {"taktline.dev/quarantine": "xid-79"})


CLAIM = {"family": "pi05", "source": {"pvc": {"claimName": "checkpoints", "path": "x"}}}


def test_what_a_spec_names_and_nobody_made_is_a_caution(make: Any) -> None:
    policy = make.policy(model=CLAIM, degrade={"fallbackPolicy": "small"})
    wanted = advice.references(policy)
    assert [found.kind for found in wanted] == ["PersistentVolumeClaim", "PolicyDeployment"]
    messages = [finding.message for finding in said(policy, absent=frozenset(wanted)).cautions]
    assert messages == [
        "model.source.pvc: PersistentVolumeClaim checkpoints does not exist in namespace line-1; workers wait until it"
        " does",
        "degrade.fallbackPolicy: PolicyDeployment small does not exist in namespace line-1; robots have no fallback"
        " until it does",
    ]


def test_cautions_are_a_condition_and_refuse_nothing(make: Any, no_loader: str) -> None:
    body = make.body(model={"family": no_loader, "source": {"path": "/srv/x"}})
    observed = make.Observed(live=body, now=make.now)
    result = make.plan(make.policy(model=body["spec"]["model"]), observed, make.settings)
    found = {c["type"]: (c["status"], c["reason"]) for c in result.status["conditions"]}
    assert found["Accepted"] == ("True", "Valid")
    assert found["Cautioned"] == ("True", "FamilyNotLoaded")
    assert result.desired


def test_a_refusal_is_a_condition_and_touches_nothing(make: Any) -> None:
    resources = {"requests": {"cpu": 2}, "limits": {"cpu": 1}}
    pools = [{"name": "cpu", "accelerator": "cpu", "resources": resources}]
    result = make.plan(make.policy(pools=pools), make.Observed(live=make.body(), now=make.now), make.settings)
    assert result.status["conditions"][0]["reason"] == "InvalidSpec"
    assert result.desired == ()


# ----- the webhook's answers


class World:
    """A cluster to ask; `fails` is raised by every call, `forbidden` kinds answer 403."""

    def __init__(self, *objects: Json, forbidden: tuple[str, ...] = ()) -> None:
        self.objects = objects
        self.forbidden = forbidden
        self.fails: Exception | None = None
        self.hangs = False
        self.asked: list[str] = []

    async def _enter(self, kind: str) -> None:
        self.asked.append(kind)
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise self.fails
        if kind in self.forbidden:
            raise ApiError(403, "Forbidden", "no rights")

    async def exists(self, kind: str, namespace: str, name: str) -> bool:
        await self._enter(kind)
        return any(
            (found["kind"], found["metadata"].get("namespace"), found["metadata"]["name"]) == (kind, namespace, name)
            for found in self.objects
        )

    async def list(
        self, kind: str, namespace: str | None, selector: str = "", *, metadata_only: bool = False, name: str = ""
    ) -> list[Json]:
        await self._enter(kind)
        return [
            found
            for found in self.objects
            if found["kind"] == kind
            and namespace in (None, found["metadata"].get("namespace"))
            and name in ("", found["metadata"]["name"])
        ]


NODE = {"kind": "Node", "metadata": {"name": "n", "labels": {"taktline.dev/accelerator": "h100"}}}


def request(body: Json, operation: str = "CREATE", **parts: Any) -> Json:
    metadata = body["metadata"]
    asked = {"uid": "u", "operation": operation, "object": body, "namespace": metadata["namespace"],
             "name": metadata["name"], "kind": {"kind": "PolicyDeployment"}}  # fmt: skip
    return {"request": asked | parts}


async def answer(world: World, *arguments: Any, namespaces: tuple[str, ...] = (), **parts: Any) -> Json:
    reply = await admission.reviewed(request(*arguments, **parts), surveying.Surveyor(world, namespaces))
    response: Json = reply["response"]
    assert response.pop("uid") == "u"
    return response


INVERTED = [H100 | {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}]


async def test_a_right_object_passes_without_a_word(make: Any) -> None:
    assert await answer(World(NODE), make.body(pools=[H100])) == {"allowed": True}


async def test_a_wrong_object_is_refused_with_the_conditions_words(make: Any) -> None:
    response = await answer(World(NODE), make.body(pools=INVERTED))
    assert response["allowed"] is False
    assert response["status"]["message"] == only(said(make.policy(pools=INVERTED)).refusals).message


async def test_cautions_are_warnings_and_short_enough_for_kubectl(make: Any) -> None:
    response = await answer(World(), make.body(model=CLAIM, pools=[H100]))
    assert response["allowed"] is True
    assert len(response["warnings"]) == 2  # the claim, and a pool that no node fits
    assert all(len(warning) <= admission.MAX_WARNING for warning in response["warnings"])


async def test_a_name_is_taken_by_the_older_and_never_from_it(make: Any) -> None:
    older = make.body(namespace="line-0")
    world = World(older, NODE)
    fresh = make.body(namespace="line-1", pools=[H100])
    fresh["metadata"].pop("creationTimestamp")
    assert "line-0/reach" in (await answer(world, fresh))["status"]["message"]
    assert (await answer(world, make.body(namespace="line-0", pools=[H100]), "UPDATE"))["allowed"] is True
    # Namespaces that this operator does not serve are none of its business.
    assert (await answer(world, fresh, namespaces=("line-1",)))["allowed"] is True


async def test_an_object_that_was_wrong_before_can_still_be_edited(make: Any) -> None:
    old = make.body(pools=INVERTED)
    response = await answer(
        World(NODE), make.body(pools=INVERTED, slo={"controlBudgetMs": 50}), "UPDATE", oldObject=old
    )
    assert response["allowed"] is True
    assert "more than its limit" in response["warnings"][0]
    worse = make.body(pools=INVERTED, degrade={"fallbackPolicy": "reach"})
    response = await answer(World(NODE), worse, "UPDATE", oldObject=old)
    assert response["status"]["message"].startswith("degrade.fallbackPolicy")


@pytest.mark.parametrize(
    ("operation", "parts"),
    [("DELETE", {"object": None}), ("UPDATE", {"subResource": "status"}), ("UPDATE", {"subResource": "scale"})],
)
async def test_deletions_and_subresources_are_never_refused(make: Any, operation: str, parts: Json) -> None:
    assert await answer(World(), make.body(pools=INVERTED), operation, **parts) == {"allowed": True}


async def test_an_object_that_is_going_is_let_go(make: Any) -> None:
    body = make.body(pools=INVERTED)
    body["metadata"]["deletionTimestamp"] = "2026-03-01T00:00:00Z"  # a finalizer is taken off
    assert await answer(World(), body, "UPDATE") == {"allowed": True}


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_what_cannot_be_looked_up_lets_the_object_through_and_says_so(
    make: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "LOOKUP_S", 0.05)
    world = World()
    if how == "fails":
        world.fails = ApiError(500, "InternalError", "no")
    world.hangs = how == "hangs"
    response = await answer(world, make.body(pools=[H100]))
    assert response["allowed"] is True
    assert "could not look" in response["warnings"][0]
    assert (await answer(world, make.body(pools=INVERTED)))["allowed"] is False  # what needs no look is still said


async def test_what_may_not_be_read_is_not_known_and_asked_once(make: Any) -> None:
    world = World(forbidden=("PersistentVolumeClaim", "Node"))
    surveyor = surveying.Surveyor(world, ())
    for _ in range(3):
        reply = await admission.reviewed(request(make.body(model=CLAIM, pools=[H100])), surveyor)
        assert reply["response"] == {"uid": "u", "allowed": True}
    assert world.asked.count("PersistentVolumeClaim") == world.asked.count("Node") == 1


PINNED = {"sha256": "0" * 64}


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (
            {"http": {"url": "https://m.example/x", "sha256": "0" * 64, "tokenSecret": {"name": "key"}}},
            "http.tokenSecret",
        ),
        ({"s3": {"bucket": "abc", "sha256": "0" * 64, "credentialsSecret": {"name": "key"}}}, "s3.credentialsSecret"),
        ({"hub": {"repo": "a/b", "revision": "0" * 40, "tokenSecret": {"name": "key"}}}, "hub.tokenSecret"),
    ],
)
async def test_a_secret_that_does_not_exist_is_a_warning_and_its_content_is_never_asked_for(
    make: Any, source: Json, field: str
) -> None:
    model = {"family": "pi05", "source": source}
    response = await answer(World(NODE), make.body(model=model, pools=[H100]))
    assert response["warnings"] == [
        f"model.source.{field}: Secret key does not exist in namespace line-1; workers wait until it does"
    ]
    there = {"kind": "Secret", "metadata": {"name": "key", "namespace": "line-1"}}
    world = World(NODE, there)
    assert await answer(world, make.body(model=model, pools=[H100])) == {"allowed": True}
    assert "get" not in dir(world), "the surveyor has no call that reads an object"


async def test_a_mesh_that_no_pod_can_hold_is_refused_as_it_is_applied(make: Any) -> None:
    pool = H100 | {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    response = await answer(World(NODE), make.body(pools=[pool], engine={"parallel": {"dp": 2}}))
    assert "engine.parallel" in response["status"]["message"]


async def test_a_mesh_that_spans_nodes_is_let_through_as_reconciliation_takes_it(make: Any) -> None:
    model = {"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"}
    pool = H100 | {"resources": {"limits": {"nvidia.com/gpu": 4}}}
    body = make.body(model=model, pools=[pool], engine={"parallel": {"search": 8}})
    fours = NODE | {"status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    world = World(fours)
    surveyor = surveying.Surveyor(world, ())
    for _ in range(3):
        reply = await admission.reviewed(request(body), surveyor)
        assert reply["response"]["allowed"]
    assert world.asked.count("Node") == 2, "once for labels, once for GPUs"
    eights = NODE | {"status": {"allocatable": {"nvidia.com/gpu": "8"}}}
    for known in (World(eights), World(forbidden=("Node",))):
        refused = await answer(known, body)
        assert "8 ranks" in refused["status"]["message"]


async def test_a_review_repeats_no_check_of_the_api_servers(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CRD's rules take most of the time of a parse; a burst of edits must not hold up reconciliation."""

    def evaluated(rule: str, value: Any) -> bool:
        raise AssertionError(rule)

    monkeypatch.setattr(cel, "holds", evaluated)
    assert await answer(World(NODE), make.body(pools=[H100])) == {"allowed": True}


async def test_a_field_of_a_newer_crd_is_refused_with_what_to_upgrade(make: Any) -> None:
    response = await answer(World(NODE), make.body(pools=[H100], later=1))
    assert response["allowed"] is False
    assert "unknown field `later`" in response["status"]["message"]
    assert "taktline-operator crd" in response["status"]["message"]
