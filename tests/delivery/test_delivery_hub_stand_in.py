"""The listing and the redirects of a model hub, from a stand-in on loopback: no hub is reachable from tests."""

from __future__ import annotations

import hashlib
import json

import pytest
from taktline_protocol.delivery import DeliveryConfig, HubSource
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_worker.delivery.fetch import fetch

from tests.delivery.conftest import HASTE, content
from tests.delivery.mirror import Mirror, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TREE = f"/api/models/org/reach/tree/{COMMIT}"
RESOLVE = f"/org/reach/resolve/{COMMIT}"
WEIGHTS = content(100_000)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path: str, data: bytes, *, large: bool) -> dict[str, object]:
    found: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
    if large:
        found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return found


@pytest.fixture
def hub(mirror: Mirror) -> Mirror:
    files = {"config.json": b'{"a": 1}', "onnx/model.onnx": b"no", "model.safetensors": WEIGHTS}
    tree = [
        {"type": "directory", "path": "onnx", "oid": "0" * 40, "size": 0},
        entry(".gitattributes", b"x", large=False),
        entry("config.json", files["config.json"], large=False),
        entry("onnx/model.onnx", files["onnx/model.onnx"], large=False),
        entry("model.safetensors", WEIGHTS, large=True),
    ]
    mirror.files[TREE] = json.dumps(tree).encode()
    mirror.files |= {f"{RESOLVE}/{name}": data for name, data in files.items()}
    return mirror


def config(hub: Mirror, **more) -> DeliveryConfig:
    source = HubSource(repo="org/reach", revision=COMMIT, endpoint=hub.url, include=("*.json", "*.safetensors"))
    return DeliveryConfig(source=source, **more)


def test_the_files_of_a_commit_come_with_the_hubs_digests_and_large_ones_from_its_store(hub, cache, monkeypatch):
    monkeypatch.setenv("TAKTLINE_MODEL_TOKEN", "hf_test")
    with serving(Mirror(files=hub.files)) as store:
        hub.fault = lambda asked: (
            {"status": 302, "headers": {"location": store.url + asked.path}} if "safetensors" in asked.path else None
        )
        record = fetch(config(hub), cache, patience=HASTE, spare_bytes=0)
        assert [file.name for file in record.files] == ["config.json", "model.safetensors"]
        assert (cache.model(record.key) / "model.safetensors").read_bytes() == WEIGHTS
        assert {asked.headers["authorization"] for asked in hub.asked} == {"Bearer hf_test"}
        assert store.asked
        assert not any("authorization" in asked.headers for asked in store.asked)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_not_the_commits_is_refused(hub, cache, name):
    hub.files[f"{RESOLVE}/{name}"] = hub.files[f"{RESOLVE}/{name}"][:-1] + b"!"
    with pytest.raises(TaktlineError) as caught:
        fetch(config(hub), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_MISMATCH
    assert name in caught.value.message


@pytest.mark.parametrize(("status", "code"), [(401, ErrorCode.MODEL_DENIED), (404, ErrorCode.MODEL_ABSENT)])
def test_a_closed_or_unknown_repository_says_what_to_do(hub, cache, status, code):
    hub.fault = lambda asked: {"status": status}
    with pytest.raises(TaktlineError) as caught:
        fetch(config(hub), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is code
    assert "hub.tokenSecret" in caught.value.next_step


def test_an_answer_that_is_no_listing_is_refused(hub, cache):
    hub.files[TREE] = b"<html>sign in</html>"
    with pytest.raises(TaktlineError) as caught:
        fetch(config(hub), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_UNSAFE


@pytest.mark.parametrize("scheme_and_port", ["same host, another port", "https instead of http"])
def test_a_listing_that_goes_on_elsewhere_gets_no_token(hub, cache, monkeypatch, scheme_and_port):
    """A host is not all of an address: another port, or another scheme, may be somebody else's."""
    monkeypatch.setenv("TAKTLINE_MODEL_TOKEN", "hf_test")
    with serving(Mirror(files=hub.files)) as other:
        there = other.url if "port" in scheme_and_port else hub.url.replace("http://", "https://")
        link = {"link": f'<{there}{TREE}?cursor=2>; rel="next"'}
        hub.fault = lambda asked: {"headers": link} if asked.path.startswith(TREE) else None
        with pytest.raises(TaktlineError) as caught:
            fetch(config(hub), cache, patience=HASTE, spare_bytes=0)
        assert caught.value.code is ErrorCode.MODEL_UNSAFE
        assert "goes on at another place" in caught.value.message
        assert not other.asked


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("digest", ["", "../../victim", "A" * 64, "0" * 63, None])
def test_a_listing_names_its_files_by_digests_and_by_nothing_else(hub, cache, large, digest):
    """A large file's digest is its name in the cache: with a path for it, the bytes went to another file."""
    victim = cache.folder / "victim.part"
    victim.write_text("precious")
    found = entry("config.json", b"{}", large=large)
    (found["lfs"] if large else found)["oid"] = digest
    hub.files[TREE] = json.dumps([found]).encode()
    with pytest.raises(TaktlineError) as caught:
        fetch(config(hub), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_UNSAFE
    assert victim.read_text() == "precious"
    assert not hub.gets(f"{RESOLVE}/config.json")
