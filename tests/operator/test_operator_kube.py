"""The API client against a scripted HTTP server: pages, absence, errors with their causes, and what it sends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes import client
from taktline_operator.kube import ApiError, KubeApi, path_of

Json = dict[str, Any]


class Script:
    """Answers in order, and keeps the requests."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Json, dict[str, str]]] = []
        self.requests: list[tuple[str, str, dict[str, str], str]] = []
        self.bodies: list[str] = []

    def answer(self, status: int, body: Json, **headers: str) -> None:
        self.answers.append((status, body, {name.replace("_", "-"): value for name, value in headers.items()}))

    async def handle(self, request: web.Request) -> web.Response:
        accept = request.headers["Accept"]
        self.requests.append((request.method, request.path, dict(request.query), accept))
        self.bodies.append(await request.text())
        status, body, headers = self.answers.pop(0)
        return web.json_response(body, status=status, headers=headers)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def api(script: Script) -> AsyncIterator[KubeApi]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", script.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    settings = client.Configuration()
    settings.host = f"http://127.0.0.1:{port}"
    found = KubeApi(settings)
    yield found
    await found.close()
    await runner.cleanup()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("Pod", None), "/api/v1/pods"),
        (("Pod", "n"), "/api/v1/namespaces/n/pods"),
        (("Deployment", "n", "d"), "/apis/apps/v1/namespaces/n/deployments/d"),
        (("PolicyDeployment", "n", "p"), "/apis/taktline.dev/v1alpha1/namespaces/n/policydeployments/p"),
    ],
)
def test_paths(arguments: tuple[Any, ...], expected: str) -> None:
    assert path_of(*arguments) == expected


async def test_a_long_list_is_read_page_by_page(api: KubeApi, script: Script) -> None:
    script.answer(200, {"metadata": {"continue": "next"}, "items": [{"metadata": {"name": "a"}}]})
    script.answer(200, {"metadata": {}, "items": [{"metadata": {"name": "b"}}]})
    found = await api.list("Pod", "n", "a=b")
    assert [(item["kind"], item["metadata"]["name"]) for item in found] == [("Pod", "a"), ("Pod", "b")]
    assert [query.get("continue") for _, _, query, _ in script.requests] == [None, "next"]
    assert all(query["labelSelector"] == "a=b" for _, _, query, _ in script.requests)


async def test_who_wrote_which_field_is_not_kept(api: KubeApi, script: Script) -> None:
    """It is half of what a pod's metadata is in memory, thousands of times."""
    about = {"name": "a", "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]}
    script.answer(200, {"metadata": {}, "items": [{"metadata": about, "spec": {}}]})
    assert await api.list("Pod", "n") == [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {}}]
    script.answer(200, {"kind": "Pod", "metadata": about | {"managedFields": []}})
    assert await api.get("Pod", "n", "a") == {"kind": "Pod", "metadata": {"name": "a"}}


async def test_a_list_of_metadata_says_so(api: KubeApi, script: Script) -> None:
    script.answer(200, {"metadata": {}, "items": []})
    await api.list("Pod", None, metadata_only=True)
    assert "PartialObjectMetadataList" in script.requests[0][3]


async def test_what_is_absent_is_no_error(api: KubeApi, script: Script) -> None:
    for _ in range(3):
        script.answer(404, {"reason": "NotFound", "message": "no"})
    assert await api.get("Pod", "n", "p") is None
    await api.delete("Pod", "n", "p", "u")
    await api.annotate("Pod", "n", "p", {"a": "b"})


async def test_only_the_object_that_was_seen_is_deleted(api: KubeApi, script: Script) -> None:
    script.answer(200, {})
    await api.delete("Deployment", "n", "d", "uid-1")
    script.answer(200, {})
    await api.delete("Pod", "n", "p", "uid-2", "17")
    first, second = (json.loads(body)["preconditions"] for body in script.bodies)
    assert (first, second) == ({"uid": "uid-1"}, {"uid": "uid-2", "resourceVersion": "17"})
    script.answer(409, {"reason": "Conflict", "message": "Precondition failed: UID in precondition: uid-1"})
    with pytest.raises(ApiError, match="409 Conflict"):
        await api.delete("Deployment", "n", "d", "uid-1")


async def test_server_side_apply_forces_under_our_manager(api: KubeApi, script: Script) -> None:
    script.answer(200, {})
    body = {"kind": "PolicyDeployment", "metadata": {"name": "p", "namespace": "n"}}
    await api.apply(body, "status")
    method, path, query, _ = script.requests[0]
    assert (method, path.rsplit("/", 2)[1:]) == ("PATCH", ["p", "status"])
    assert query == {"fieldManager": "taktline-operator", "force": "true"}


async def test_an_existing_object_is_told_from_a_failure(api: KubeApi, script: Script) -> None:
    script.answer(409, {"reason": "AlreadyExists", "message": "there"})
    body = {"kind": "Event", "metadata": {"name": "e", "namespace": "n"}}
    assert await api.create(body) is False
    script.answer(409, {"reason": "Conflict", "message": "no"})
    with pytest.raises(ApiError):
        await api.create(body)


async def test_an_error_carries_what_the_queue_needs(api: KubeApi, script: Script) -> None:
    causes = {"causes": [{"reason": "NamespaceTerminating", "message": "bye"}]}
    script.answer(429, {"reason": "TooManyRequests", "message": "slow", "details": causes}, Retry_After="7")
    with pytest.raises(ApiError) as caught:
        await api.get("Pod", "n", "p")
    error = caught.value
    assert (error.status, error.reason, error.retry_after_s) == (429, "TooManyRequests", 7.0)
    assert error.causes == {"NamespaceTerminating"}


async def test_an_answer_that_is_no_json_object_is_still_an_api_error(api: KubeApi, script: Script) -> None:
    script.answer(502, ["bad gateway"])  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="502"):
        await api.get("Pod", "n", "p")


async def test_no_answer_is_an_api_error() -> None:
    settings = client.Configuration()
    settings.host = "http://127.0.0.1:1"
    api = KubeApi(settings)
    with pytest.raises(ApiError, match="no answer") as caught:
        await api.get("Pod", "n", "p")
    await api.close()
    assert caught.value.status == 0
