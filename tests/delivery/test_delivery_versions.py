"""What is published is one version of a file, and all of it: also where the source changes, or says little."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import msgspec
import pytest
from taktline_protocol.delivery import DeliveryConfig, HttpSource
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_worker.delivery.cache import Cache
from taktline_worker.delivery.fetch import fetch
from taktline_worker.delivery.origins import HttpOrigin
from taktline_worker.delivery.progress import Progress
from taktline_worker.delivery.remote import Remote
from taktline_worker.delivery.transfer import Part, RemoteFile, Transfer

from tests.delivery.conftest import HASTE, content
from tests.delivery.mirror import BLOCK

OLD, NEW = content(300_000, 1), content(300_000, 2)
SHARD = "/m/model-1.safetensors"
WEAK = 'W/"1"'


def sharded(mirror, shard: bytes, **more) -> DeliveryConfig:
    """A source that states no digest of its one shard."""
    mirror.files["/m/model.safetensors.index.json"] = b'{"weight_map": {"a": "model-1.safetensors"}}'
    mirror.files[SHARD] = shard
    return DeliveryConfig(source=HttpSource(url=f"{mirror.url}/m", layout="Index"), **more)


def published(cache, config) -> bytes:
    record = fetch(config, cache, patience=HASTE, spare_bytes=0)
    return (cache.model(record.key) / "model-1.safetensors").read_bytes()


def changes_after(mirror, cut: int, new: bytes):
    """The first request for the shard is cut; from the second on another version lies there."""
    mirror.tags[SHARD] = WEAK

    def fault(asked):
        if (asked.method, asked.path) != ("GET", SHARD):
            return None
        if len(mirror.gets(SHARD)) == 1:
            return {"cut": cut}
        mirror.files[SHARD] = new
        return None

    mirror.fault = fault


def test_what_neither_a_digest_nor_the_source_identifies_is_begun_anew(mirror, cache):
    """Half of each version, with a record that calls it whole, is what going on at the same byte would give."""
    config = sharded(mirror, OLD)
    changes_after(mirror, 100_000, NEW)
    assert published(cache, config) == NEW
    assert "range" not in mirror.gets(SHARD)[1].headers


def test_an_answer_without_a_length_is_whole_only_with_as_many_bytes_as_were_announced(mirror, cache):
    config = sharded(mirror, OLD)

    def fault(asked):
        unsized = (asked.method, asked.path) == ("GET", SHARD)
        return {"unsized": True, "cut": 1_000 if len(mirror.gets(SHARD)) == 1 else len(OLD)} if unsized else None

    mirror.fault = fault
    assert published(cache, config) == OLD


def test_a_pinned_file_is_fetched_once_its_source_is_corrected(mirror, cache):
    """What was begun of a shorter, wrong file bounded the right one, and it was refused for ever."""
    wrong, right = content(200_000, 3), content(300_000, 4)
    mirror.files["/m/w"], mirror.tags["/m/w"] = wrong, WEAK
    pin = hashlib.sha256(right).hexdigest()
    config = DeliveryConfig(source=HttpSource(url=f"{mirror.url}/m", layout="Listed"), sha256={"w": pin})
    mirror.fault = lambda asked: (
        None if asked.method == "HEAD" else {"cut": 100_000} if len(mirror.gets("/m/w")) == 1 else {"status": 403}
    )
    with pytest.raises(TaktlineError):
        fetch(config, cache, patience=HASTE, spare_bytes=0)
    mirror.fault, mirror.files["/m/w"] = lambda asked: None, right
    record = fetch(config, cache, patience=HASTE, spare_bytes=0)
    assert (cache.model(record.key) / "w").read_bytes() == right


# ----- a file that is taken up


def begun(cache, mirror, have: bytes, tag: str) -> Transfer:
    """A transfer of the shard, of which an earlier process left `have` of the version `tag`."""
    file = RemoteFile("model-1.safetensors", HttpOrigin(f"{mirror.url}/m"), "model-1.safetensors")
    remote = Remote(deadline=float("inf"), patience=HASTE)
    transfer = Transfer(cache, remote, Progress(), "key", file, 1 << 20)
    transfer._path.write_bytes(have)
    transfer._note.write_bytes(msgspec.json.encode(Part(url=file.url, validator=tag, size=len(OLD))))
    return transfer


def test_a_partial_file_goes_on_only_in_the_version_it_is_of(mirror, cache):
    """The request names the version; a server that sends a part of another one all the same is not believed."""
    mirror.files[SHARD], mirror.tags[SHARD] = NEW, '"new"'

    def ignorant(asked):
        if "range" in asked.headers:
            asked.headers.pop("if-range")
        return

    mirror.fault = ignorant
    record = begun(cache, mirror, OLD[:100_000], '"old"').fetch()
    assert cache.blob(record.sha256).read_bytes() == NEW
    assert [asked.headers.get("range") for asked in mirror.gets(SHARD)] == ["bytes=100000-", None]


def test_a_partial_file_of_no_known_version_is_not_taken_up(mirror, cache):
    mirror.files[SHARD], mirror.tags[SHARD] = NEW, WEAK
    record = begun(cache, mirror, OLD[:100_000], "").fetch()
    assert cache.blob(record.sha256).read_bytes() == NEW
    assert mirror.served_bytes == len(NEW)


def test_the_request_for_the_rest_names_the_version(mirror, cache):
    mirror.files[SHARD], mirror.tags[SHARD] = OLD, '"old"'
    record = begun(cache, mirror, OLD[:100_000], '"old"').fetch()
    assert cache.blob(record.sha256).read_bytes() == OLD
    (asked,) = mirror.gets(SHARD)
    assert (asked.headers["range"], asked.headers["if-range"]) == ("bytes=100000-", '"old"')


def test_bytes_do_not_go_through_a_link_in_the_cache(mirror, cache, tmp_path):
    """Whoever may write to the cache must not have us write elsewhere."""
    mirror.files[SHARD] = OLD
    victim = tmp_path / "victim"
    transfer = begun(cache, mirror, b"", "")
    transfer._begin_anew = lambda: None  # which would take the link away; it may be put there just behind it
    transfer._path.unlink()
    os.symlink(victim, transfer._path)
    with pytest.raises(OSError, match="symbolic links"):
        transfer.fetch()
    assert not victim.exists()


# ----- after a kill


@pytest.mark.parametrize("at", ["before its name", "after it was pruned"])
def test_what_a_killed_fetch_held_is_the_caches_again(mirror, cache, monkeypatch, at):
    """It was accepted, and is in no other place: the next fetch found it held, and could not hold it."""
    files = {"w": OLD}
    config = DeliveryConfig(source=HttpSource(url=f"{mirror.url}/m", sha256=mirror.put("m", files)))

    def killed(*_):
        raise KeyboardInterrupt

    def killed_before_its_name(path, target):
        return killed() if target.parent.name == "blobs" else rename(path, target)

    rename = Path.rename
    with monkeypatch.context() as patched:
        if at == "before its name":
            patched.setattr(Path, "rename", killed_before_its_name)
        else:
            patched.setattr(Cache, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch(config, cache, patience=HASTE, spare_bytes=0)
    cache.blob(hashlib.sha256(OLD).hexdigest()).unlink(missing_ok=True)
    served = mirror.served_bytes
    record = fetch(config, cache, patience=HASTE, spare_bytes=0)
    assert (cache.model(record.key) / "w").read_bytes() == OLD
    assert mirror.served_bytes - served == len(mirror.files["/m/SHA256SUMS"])
    assert cache.blob(record.files[0].sha256).is_file()


# ----- ends


def test_a_file_that_is_not_there_ends_the_asking_for_sizes(mirror, cache):
    """One of two files is absent, the other's server is busy for good: the answer does not wait for the deadline."""
    config = sharded(mirror, OLD, deadline_s=40.0)
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    mirror.files["/m/model.safetensors.index.json"] = index
    mirror.fault = lambda asked: {"status": 503} if asked.path == SHARD else None
    begun = time.monotonic()
    with pytest.raises(TaktlineError) as caught:
        fetch(config, cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_ABSENT
    assert time.monotonic() - begun < config.deadline_s


def test_a_manifest_that_drips_ends_at_the_deadline(mirror):
    """A byte now and then is no silence, which would be noticed by itself."""
    mirror.files["/m/SHA256SUMS"], mirror.pace_s = bytes(50 * BLOCK), 0.02
    remote = Remote(deadline=time.monotonic() + 0.2, patience=HASTE)
    with pytest.raises(TaktlineError, match="still on its way") as caught:
        remote.document(HttpOrigin(f"{mirror.url}/m"), "SHA256SUMS", 1 << 30)
    assert caught.value.code is ErrorCode.MODEL_UNREACHABLE
