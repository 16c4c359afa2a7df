"""The planner as a function: tables of what it decides, and properties that hold for every PolicyDeployment."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_operator import diff, naming, spec
from taktline_operator.plan import Ref, ref_of
from taktline_protocol.deployment import EngineConfig

Json = dict[str, Any]

# Rules are evaluated by a slow interpreter, and a slow machine is no failure.
few = settings(max_examples=30, deadline=None)
accelerator = st.sampled_from(["cpu", "jetson-thor", "rtx-5090", "a40", "a100", "h100", "h200"])


@st.composite
def specs(draw: st.DrawFn) -> Json:
    """Parts of valid specs."""
    pools = []
    for name in draw(st.lists(st.sampled_from(["a", "b-1", "c", "d"]), min_size=1, max_size=3, unique=True)):
        low = draw(st.integers(0, 3))
        pools.append(
            {
                "name": name,
                "accelerator": draw(accelerator),
                "minReplicas": low,
                "maxReplicas": low + draw(st.integers(0, 3)),
                **draw(
                    st.sampled_from([{}, {"nodeSelector": {"zone": "x"}}, {"tolerations": [{"operator": "Exists"}]}])
                ),
            }
        )
    source = draw(
        st.sampled_from([{"path": "/srv/p"}, {"pvc": {"claimName": "c"}}, {"pvc": {"claimName": "c", "path": "d"}}])
    )
    model: Json = {"family": "pi05", "source": source, "revision": draw(st.sampled_from(["", "a", "b.2"]))}
    engine: Json = {"precision": draw(st.sampled_from(["fp32", "bf16"]))}
    engine |= draw(st.sampled_from([{}, {"frameCacheMb": 0}, {"rtc": {"mode": "off"}}, {"cheaperSteps": [1]}]))
    if all(pool["accelerator"] != "jetson-thor" for pool in pools):  # it has one GPU
        engine |= draw(st.sampled_from([{}, {"parallel": {"dp": 2}}]))
    steps = draw(st.none() | st.integers(2, 20))
    return {"model": model, "engine": engine | ({"solverSteps": steps} if steps else {}), "pools": pools}


def observe(make: Any, found: spec.PolicyDeployment, live: Json, **more: Any) -> Any:
    return make.Observed(**({"live": live, "now": make.now} | more))


@few
@given(parts=specs())
def test_planning_is_deterministic(make: Any, parts: Json) -> None:
    found, live = make.policy(**parts), make.body(**parts)
    first, second = (make.plan(found, observe(make, found, live), make.settings) for _ in range(2))
    assert first == second
    assert json.dumps(first.desired) == json.dumps(second.desired)


@few
@given(parts=specs())
def test_every_object_has_owner_labels_and_namespace(make: Any, parts: Json) -> None:
    found = make.policy(**parts)
    for child in make.plan(found, observe(make, found, make.body(**parts)), make.settings).desired:
        metadata = child["metadata"]
        assert metadata["namespace"] == "line-1"
        assert [owner["uid"] for owner in metadata["ownerReferences"]] == ["uid-1"]
        assert metadata["labels"][naming.LABEL_MANAGED_BY] == naming.MANAGER
        assert metadata["labels"][naming.LABEL_POLICY] == "reach"
        assert len(metadata["name"]) <= 63 + 11


@few
@given(parts=specs())
def test_nothing_is_written_once_everything_is_applied(make: Any, parts: Json) -> None:
    found, live = make.policy(**parts), make.body(**parts)
    first = make.plan(found, observe(make, found, live), make.settings)
    assert first.writes == first.desired
    assert first.status_changed
    after = live | {"status": first.status}
    children = {ref_of(child): child for child in first.desired}
    second = make.plan(found, observe(make, found, after, children=children, now=make.later), make.settings)
    assert (second.writes, second.deletions, second.status_changed) == ((), (), False)


@few
@given(parts=specs(), data=st.data())
def test_any_missing_or_drifted_object_and_no_other_is_written(make: Any, parts: Json, data: st.DataObject) -> None:
    found = make.policy(**parts)
    children = make.applied(found)
    ref = data.draw(st.sampled_from(sorted(children)))
    if data.draw(st.booleans()):
        del children[ref]
    else:
        children[ref] = copy.deepcopy(children[ref])
        children[ref]["metadata"]["labels"][naming.LABEL_PART_OF] = "somebody-else"
    result = make.plan(found, observe(make, found, make.body(**parts), children=children), make.settings)
    assert [ref_of(child) for child in result.writes] == [ref]


@few
@given(parts=specs())
def test_engine_json_is_what_the_worker_reads(make: Any, parts: Json) -> None:
    found = make.policy(**parts)
    for ref, child in make.applied(found).items():
        if ref.kind == "ConfigMap":
            config = msgspec.json.decode(child["data"]["engine.json"], type=EngineConfig)
            assert config.policy == "reach"
            assert config.model.revision == found.spec.revision()
            assert config.engine.precision == found.spec.engine.precision


def test_pod_hash_of_a_known_spec_is_golden(make: Any) -> None:
    """An upgrade of the operator that changes this hash restarts every worker of every cluster.

    If that is intended, say so in the commit that changes the value here.
    """
    found = make.policy(
        pools=[
            {"name": "line", "accelerator": "h100", "minReplicas": 2},
            {"name": "edge", "accelerator": "jetson-thor", "image": "registry.example/worker:1-arm64"},
            {"name": "spare", "accelerator": "cpu"},
        ]
    )
    hashes = {
        child["metadata"]["name"]: child["spec"]["template"]["metadata"]["annotations"][naming.ANNOTATION_TEMPLATE]
        for ref, child in make.applied(found).items()
        if ref.kind == "Deployment"
    }
    assert hashes == {"reach-line": "4de8b87c99", "reach-edge": "b10285d4ac", "reach-spare": "a58f0cb440"}


def test_a_field_that_is_wanted_no_longer_is_written(make: Any) -> None:
    before = make.policy(pools=[{"name": "cpu", "accelerator": "cpu", "nodeSelector": {"zone": "a"}}])
    after = make.policy()
    writes = make.plan(after, observe(make, after, make.body(), children=make.applied(before)), make.settings).writes
    assert [ref_of(child).kind for child in writes] == ["Deployment"]
    assert "nodeSelector" not in writes[0]["spec"]["template"]["spec"]


def test_an_edit_of_the_engine_rolls_through_a_new_config_map(make: Any) -> None:
    before, after = make.policy(), make.policy(engine={"solverSteps": 5})
    children = make.applied(before)
    result = make.plan(after, observe(make, after, make.body(), children=children), make.settings)
    assert [ref_of(child).kind for child in result.writes] == ["ControllerRevision", "ConfigMap", "Deployment"]
    assert ref_of(result.writes[0]) not in children
    assert result.deletions == ()


def test_the_old_config_map_goes_only_when_no_pod_mounts_it(make: Any) -> None:
    before, after = make.policy(), make.policy(engine={"solverSteps": 5})
    old = next(ref for ref in make.applied(before) if ref.kind == "ConfigMap")
    children = make.applied(before) | make.applied(after)
    new_pod, old_pod = make.pod("new", owner=after), make.pod("old", "10.0.0.2", owner=before)
    for pods, expected in (([old_pod], ()), ([new_pod, old_pod], ()), ([new_pod], (old,))):
        result = make.plan(after, observe(make, after, make.body(), children=children, pods=pods), make.settings)
        assert result.deletions == expected


def test_a_removed_pool_goes_only_after_what_replaces_it_serves(make: Any) -> None:
    before = make.policy(pools=[{"name": "old", "accelerator": "cpu"}])
    after = make.policy(pools=[{"name": "new", "accelerator": "cpu"}])
    children = make.applied(before) | make.applied(after)
    old_pod = make.pod("o", owner=before, pool="old")
    waiting = make.plan(after, observe(make, after, make.body(), children=children, pods=[old_pod]), make.settings)
    assert waiting.deletions == ()
    assert [target.address for target in waiting.route.targets] == ["10.0.0.1:50051"]
    new_pod = make.pod("n", "10.0.0.2", owner=after, pool="new")
    pods = [old_pod, new_pod]
    done = make.plan(after, observe(make, after, make.body(), children=children, pods=pods), make.settings)
    assert Ref("Deployment", "reach-old") in done.deletions
    assert Ref("PodDisruptionBudget", "reach-old") in done.deletions


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": {"app": "mine"}},
        {"ownerReferences": [{"controller": True, "uid": "x", "kind": "Rollout", "name": "reach"}]},
        {"ownerReferences": [{"controller": True, "uid": "x", "kind": "PolicyDeployment", "name": "other"}]},
    ],
    ids=["made by hand", "of another controller", "of another PolicyDeployment"],
)
def test_an_object_of_somebody_else_is_never_taken_over(make: Any, metadata: Json) -> None:
    found = make.policy()
    ref = Ref("Deployment", "reach-cpu")
    stranger = {"kind": "Deployment", "metadata": {"name": "reach-cpu", "namespace": "line-1"} | metadata}
    result = make.plan(found, observe(make, found, make.body(), children={ref: stranger}), make.settings)
    accepted = result.status["conditions"][0]
    assert (accepted["type"], accepted["status"], accepted["reason"]) == ("Accepted", "False", "ObjectConflict")
    assert "Deployment reach-cpu" in accepted["message"]
    assert result.writes == ()


def test_children_of_a_deleted_namesake_are_waited_for(make: Any) -> None:
    gone, found = make.policy(uid="uid-0"), make.policy()
    result = make.plan(found, observe(make, found, make.body(), children=make.applied(gone)), make.settings)
    assert result.writes == ()
    assert result.deletions == ()
    assert result.status["conditions"][0]["status"] == "True"


def test_an_orphan_with_our_labels_is_adopted(make: Any) -> None:
    found = make.policy()
    children = make.applied(found)
    ref = Ref("Service", "reach-workers")
    children[ref] = copy.deepcopy(children[ref])
    del children[ref]["metadata"]["ownerReferences"]
    result = make.plan(found, observe(make, found, make.body(), children=children), make.settings)
    assert [ref_of(child) for child in result.writes] == [ref]


def test_a_policy_name_that_an_older_one_holds_is_refused_and_not_routed(make: Any) -> None:
    found = make.policy()
    result = make.plan(found, observe(make, found, make.body(), name_owner=("line-0", "reach")), make.settings)
    assert (result.writes, result.route) == ((), None)
    assert "line-0/reach" in result.status["conditions"][0]["message"]


def test_a_policy_that_is_being_deleted_is_left_to_the_garbage_collector(make: Any) -> None:
    found = msgspec.structs.replace(make.policy(), deleting=True)
    result = make.plan(found, observe(make, found, make.body(), pods=[make.pod("p")]), make.settings)
    assert (result.writes, result.deletions, result.status_changed, result.route) == ((), (), False, None)


def test_without_a_uid_there_is_no_owner_reference_to_a_nobody(make: Any) -> None:
    for child in make.applied(make.policy(uid="")).values():
        assert "ownerReferences" not in child["metadata"]


@pytest.mark.parametrize(
    ("desired", "live", "same"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 0}}, True),
        ({"a": 1}, {}, False),
        ({"a": [1, 2]}, {"a": [1, 2]}, True),
        ({"a": [1]}, {"a": [1, 2]}, False),
        ({"a": [{"name": "x", "v": 1}]}, {"a": [{"name": "injected"}, {"name": "x", "v": 1, "d": 2}]}, True),
        ({"a": [{"name": "x", "v": 1}]}, {"a": [{"name": "x", "v": 2}]}, False),
        ({"resources": {"limits": {"cpu": "1000m"}}}, {"resources": {"limits": {"cpu": "1"}}}, True),
        ({"resources": {"requests": {"memory": "1Gi"}}}, {"resources": {"requests": {"memory": "1G"}}}, False),
    ],
)
def test_what_counts_as_drift(desired: Json, live: Json, same: bool) -> None:
    assert diff.covers(desired, live) is same


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), (2, 2), ("500m", 0.5), ("1k", 1000), ("4Gi", 4 * 1024**3), ("1e3", 1000), ("2E", 2e18)],
)
def test_quantities(text: int | str, value: float) -> None:
    assert diff.quantity(text) == pytest.approx(value)


def test_a_wrong_quantity_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        diff.quantity("lots")
