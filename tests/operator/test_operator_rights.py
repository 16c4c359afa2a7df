"""Rights that come and go while the operator runs: what it may do no more stops nothing else, and is tried again."""

from __future__ import annotations

from typing import Any

import pytest
from taktline_operator import groups, keda, naming
from taktline_operator.api_errors import ApiError, is_without_rights
from taktline_operator.reconcile import Controller
from taktline_operator.surveying import FORBIDDEN_S, Existence
from taktline_protocol.errors import TaktlineError

Json = dict[str, Any]
KEY = ("line-1", "reach")
PROMETHEUS = frozenset({"PrometheusRule", "PodMonitor"})
WITH_KEDA: Json = {
    "replicas": 1,
    "pools": [{"name": "cpu", "accelerator": "cpu", "maxReplicas": 3}],
    "scaling": {"mode": "Recommend", "keda": {"serverAddress": "http://prometheus:9090"}},
}


def refused(kind: str, verb: str) -> ApiError:
    """As the API server's authorizer words it."""
    message = f'x is forbidden: User "system:serviceaccount:t:operator" cannot {verb} resource "{kind.lower()}s"'
    return ApiError(403, "Forbidden", message, kind=kind)


def guarded(make: Any, *objects: Json) -> Any:
    """An API whose `forbidden` pairs of verb and kind are refused."""

    class Guarded(make.Api):
        def __init__(self) -> None:
            super().__init__(*objects)
            self.forbidden: set[tuple[str, str]] = set()
            self.asked: list[tuple[str, str]] = []

        def _check(self, verb: str, kind: str) -> None:
            self.asked.append((verb, kind))
            if (verb, kind) in self.forbidden:
                raise refused(kind, verb)

        async def exists(self, kind: str, namespace: str, name: str) -> bool:
            self._check("get", kind)
            return await super().exists(kind, namespace, name)

        async def list(self, kind: str, *arguments: Any, **named: Any) -> Any:
            self._check("list", kind)
            return await super().list(kind, *arguments, **named)

        async def apply(self, desired: Json, subresource: str = "") -> Json:
            self._check("patch", desired["kind"])
            return await super().apply(desired, subresource)

    return Guarded()


class Clock:
    """Monotonic time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_kind_that_was_forbidden_is_asked_for_again(make: Any) -> None:
    policy = make.policy(model={"family": "pi05", "source": {"pvc": {"claimName": "models"}}, "revision": "a"})
    api, clock = guarded(make), Clock()
    api.forbidden = {("get", "PersistentVolumeClaim")}
    existence = Existence(api, clock)
    for _ in range(3):
        assert await existence.absent(policy) == frozenset(), "what may not be read is not said to be missing"
    assert len(api.asked) == 1, "not at every look"
    api.forbidden.clear()
    clock.now += FORBIDDEN_S
    (missing,) = await existence.absent(policy)
    assert missing.name == "models"


@pytest.mark.parametrize("verb", ["list", "patch"])
async def test_rights_that_are_withdrawn_meanwhile_stop_nothing_else(make: Any, verb: str) -> None:
    """Discovery asks for one object of one namespace: it sees neither rights of writing nor those elsewhere."""
    api = guarded(make, make.body())
    api.monitoring = PROMETHEUS
    controller = Controller(api, make.settings, clock=lambda: make.now)
    await controller.resync(everything=True)
    api.forbidden = {(verb, "PrometheusRule")}
    await controller.handle(KEY)  # found out; the key comes back at once
    await controller.handle(KEY)
    kinds = {kind for kind, _, _ in api.objects}
    assert "PrometheusRule" not in kinds
    assert {"Deployment", "PodMonitor"} <= kinds
    (live,) = api.of_kind("PolicyDeployment")
    said = {found["type"]: found for found in live["status"]["conditions"]}
    assert (said["Monitored"]["status"], said["Monitored"]["reason"]) == ("False", "KindsAbsent")
    assert "no PrometheusRule (Prometheus operator), or the operator may not use it" in said["Monitored"]["message"]
    assert said["Degraded"]["status"] == "False", "its workers are as they should be"
    writes = len(api.writes)
    await controller.handle(KEY)
    assert len(api.writes) == writes


async def test_rights_that_come_back_are_used(make: Any) -> None:
    api, clock = guarded(make, make.body()), Clock()
    api.monitoring = PROMETHEUS
    controller = Controller(api, make.settings, clock=lambda: make.now, monotonic=clock)
    await controller.resync(everything=True)
    api.forbidden = {("patch", "PrometheusRule")}
    for _ in range(2):
        await controller.handle(KEY)
    api.forbidden.clear()
    await controller.handle(KEY)
    assert not api.of_kind("PrometheusRule"), "not at every turn"
    clock.now += 600.0
    await controller.handle(KEY)
    assert len(api.of_kind("PrometheusRule")) == 1


def test_other_refusals_are_no_missing_rights() -> None:
    assert is_without_rights(refused("Pod", "list"))
    assert not is_without_rights(ApiError(403, "Forbidden", "pods x is forbidden: exceeded quota: q"))
    assert not is_without_rights(ApiError(404, "NotFound", "cannot find it"))
    ends = frozenset({"NamespaceTerminating"})
    assert not is_without_rights(ApiError(403, "Forbidden", "x cannot be created", causes=ends))


def test_groups_of_a_kind_that_may_not_be_used_any_more_get_no_twins(make: Any) -> None:
    policy = make.policy(
        model={"family": "vjepa2-ac", "source": {"path": "/srv/x"}, "revision": "a"},
        engine={"parallel": {"search": 16}},
        pools=[{"name": "line", "accelerator": "h100", "gpusPerNode": 8}],
    )
    pod = make.pod("a", owner=policy, pool="line")
    pod["metadata"]["labels"] |= {groups.LWS_NAME_LABEL: "reach-line", groups.LWS_INDEX_LABEL: "0"}
    observed = make.Observed(live=make.body(), now=make.now, pods=[pod], kinds=frozenset())
    result = make.plan(policy, observed, make.settings)
    accepted = result.status["conditions"][0]
    assert (accepted["type"], accepted["status"], accepted["reason"]) == ("Accepted", "False", "KindsAbsent")
    assert "LeaderWorkerSet" in accepted["message"]
    assert not result.writes
    pod["metadata"]["deletionTimestamp"] = make.now  # its set is gone: another kind takes over
    assert make.plan(policy, observed, make.settings).writes


async def test_a_field_taken_back_before_any_status_was_stored_leaves_nothing_behind(make: Any) -> None:
    """The operator ends after it made a ScaledObject and before it said so; meanwhile the field is taken back."""
    api = make.Api(make.body(**WITH_KEDA))
    api.installed = {"keda.sh/v1alpha1": frozenset({keda.KIND})}
    plain = {name: part for name, part in make.body(**WITH_KEDA)["spec"].items() if name != "scaling"}
    api.objects["PolicyDeployment", *KEY]["spec"] = plain
    first = Controller(api, make.settings, clock=lambda: make.now)
    await first.resync(everything=True)
    await first.handle(KEY)  # a status without a word of KEDA
    api.objects["PolicyDeployment", *KEY]["spec"] = make.body(**WITH_KEDA)["spec"]
    api.objects["PolicyDeployment", *KEY]["metadata"]["generation"] = 2
    apply = api.apply

    async def ends_before_the_status(desired: Json, subresource: str = "") -> Json:
        if subresource == "status":
            raise TaktlineError("internal", "the operator ends here", "")  # type: ignore[arg-type]
        return await apply(desired, subresource)

    api.apply = ends_before_the_status
    with pytest.raises(TaktlineError):
        await first.handle(KEY)
    assert len(api.of_kind(keda.KIND)) == 1
    api.apply = apply
    api.objects["PolicyDeployment", *KEY]["spec"] = plain
    api.objects["PolicyDeployment", *KEY]["metadata"]["generation"] = 3
    # The same process remembers; a new one finds it.
    for controller in (first, Controller(api, make.settings, clock=lambda: make.now)):
        kept = dict(api.objects)
        await controller.resync(everything=True)
        await controller.handle(KEY)
        assert not api.of_kind(keda.KIND)
        api.objects = kept
    # Once there is none, nobody is asked about them any more.
    api.objects = {key: found for key, found in api.objects.items() if key[0] != keda.KIND}
    await controller.handle(KEY)
    before = api.calls
    await controller.handle(KEY)
    listed = 1 + 1 + len(("Deployment", "Service", "ConfigMap", "PodDisruptionBudget", "ControllerRevision"))
    assert api.calls - before == listed, naming.CHILD_SELECTOR
