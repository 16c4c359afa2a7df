"""Files over HTTP: resumed where they were cut, checked while they stream, refused with the reason."""

from __future__ import annotations

import hashlib
import time

import httpx
import msgspec
import pytest
from taktline_local.pki import Authority
from taktline_protocol.delivery import RECORD_FILE, DeliveryConfig, HttpSource, HubSource, StatisticsFile
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_worker.delivery import catalogue
from taktline_worker.delivery.fetch import fetch
from taktline_worker.delivery.progress import Progress
from taktline_worker.delivery.remote import Patience

from tests.delivery.conftest import HASTE, content
from tests.delivery.mirror import Mirror, serving

FILES = {"config.json": b"{}", "model.safetensors": content(300_000), "assets/x/norm_stats.json": b"[1]"}
BIG = "/m/model.safetensors"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(mirror: Mirror, files: dict[str, bytes] = FILES, **more: object) -> DeliveryConfig:
    sha256 = mirror.put("m", files)
    return DeliveryConfig(source=HttpSource(url=f"{mirror.url}/m", sha256=sha256), **more)


def listed(mirror: Mirror, files: dict[str, bytes], **more: object) -> DeliveryConfig:
    mirror.put("m", files)
    pins = {name: digest(data) for name, data in files.items()}
    return DeliveryConfig(source=HttpSource(url=f"{mirror.url}/m", layout="Listed"), sha256=pins, **more)


def read(cache, record) -> dict[str, bytes]:
    folder = cache.model(record.key)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != RECORD_FILE
    }


def once(fault: dict[str, object], method: str = "GET", path: str = BIG):
    """A fault of the first request for a path."""
    left = [1]

    def decide(asked):
        if asked.method == method and asked.path == path and left[0]:
            left[0] = 0
            return fault
        return None

    return decide


def refused(config, cache, **options) -> TaktlineError:
    with pytest.raises(TaktlineError) as caught:
        fetch(config, cache, patience=HASTE, spare_bytes=0, **options)
    return caught.value


def test_a_manifest_brings_every_file_and_the_second_time_none(mirror, cache):
    config = manifest(mirror)
    record = fetch(config, cache, patience=HASTE)
    assert read(cache, record) == FILES
    assert record.fetched_bytes == sum(map(len, FILES.values()))
    asked = len(mirror.asked)
    assert fetch(config, cache, patience=HASTE).key == record.key
    assert len(mirror.asked) == asked, "a checkpoint that is here costs no request"


def test_a_cut_file_goes_on_where_it_was(mirror, cache):
    mirror.fault = once({"cut": 100_000})
    record = fetch(manifest(mirror), cache, patience=HASTE)
    assert read(cache, record) == FILES
    first, second = mirror.gets(BIG)
    assert "range" not in first.headers
    assert int(second.headers["range"].removeprefix("bytes=").removesuffix("-")) > 0
    assert second.headers["if-range"] == mirror.tag(BIG)
    assert record.fetched_bytes == sum(map(len, FILES.values())), "no byte came twice"


def test_a_server_that_stalls_is_left_and_asked_again(mirror, cache):
    mirror.fault = once({"cut": 50_000, "stall": True})
    patience = Patience(connect_s=5.0, stall_s=0.3, base_s=0.001, cap_s=0.01)
    record = fetch(manifest(mirror), cache, patience=patience)
    assert read(cache, record) == FILES
    assert len(mirror.gets(BIG)) >= 2


def test_an_interrupted_fetch_leaves_what_the_next_one_goes_on_with(mirror, cache):
    pins = {"model.safetensors": FILES["model.safetensors"]}
    config = listed(mirror, pins)

    def cut_then_refuse(asked):
        if asked.method == "HEAD":
            return None
        return {"cut": 120_000} if len(mirror.gets(BIG)) == 1 else {"status": 403}

    mirror.fault = cut_then_refuse
    assert refused(config, cache).code is ErrorCode.MODEL_DENIED
    mirror.fault = lambda asked: None
    assert read(cache, fetch(config, cache, patience=HASTE)) == pins
    assert mirror.served_bytes == 300_000, "no byte came twice"


def test_416_for_a_part_that_is_whole_already_ends_the_file(mirror, cache):
    whole = FILES["model.safetensors"]
    config = listed(mirror, {"model.safetensors": whole})
    name = digest(whole)
    cache.partial(f"{name}.part").write_bytes(whole)
    # Its size was never noted, so only the server can say that nothing is behind it.
    cache.partial(f"{name}.json").write_text(f'{{"url":"{mirror.url}{BIG}","validator":"","size":null}}')
    record = fetch(config, cache, patience=HASTE)
    assert read(cache, record) == {"model.safetensors": whole}
    assert mirror.served_bytes == 0


def test_416_for_a_part_that_is_too_long_begins_anew(mirror, cache):
    whole = FILES["model.safetensors"]
    config = listed(mirror, {"model.safetensors": whole})
    name = digest(whole)
    cache.partial(f"{name}.part").write_bytes(whole + b"more")
    cache.partial(f"{name}.json").write_text(f'{{"url":"{mirror.url}{BIG}","validator":"","size":null}}')
    assert read(cache, fetch(config, cache, patience=HASTE)) == {"model.safetensors": whole}
    assert mirror.served_bytes == len(whole)


def test_a_file_that_changes_mid_way_is_fetched_whole_in_its_new_version(mirror, cache):
    old, new = content(300_000, 1), content(280_000, 2)
    config = manifest(mirror, {"model.safetensors": new})
    mirror.files[BIG] = old

    def change(asked):
        if asked.path == BIG and asked.method == "GET" and mirror.files[BIG] is old:
            if len(mirror.gets(BIG)) == 1:
                return {"cut": 90_000}
            mirror.files[BIG] = new
        return None

    mirror.fault = change
    record = fetch(config, cache, patience=HASTE)
    assert read(cache, record) == {"model.safetensors": new}


def test_a_server_without_ranges_is_read_from_the_start(mirror, cache):
    mirror.ranges = False
    mirror.fault = once({"cut": 100_000})
    progress = Progress()
    record = fetch(manifest(mirror), cache, progress, patience=HASTE)
    assert read(cache, record) == FILES
    assert progress.now().done_bytes == progress.now().total_bytes, "bytes that were thrown away do not count"


def test_a_lost_page_in_a_partial_file_costs_one_whole_download_and_no_alarm(mirror, cache):
    whole = FILES["model.safetensors"]
    config = listed(mirror, {"model.safetensors": whole})
    name = digest(whole)
    cache.partial(f"{name}.part").write_bytes(bytes(4096) + whole[4096:200_000])
    cache.partial(f"{name}.json").write_text(f'{{"url":"{mirror.url}{BIG}","validator":"","size":300000}}')
    assert read(cache, fetch(config, cache, patience=HASTE)) == {"model.safetensors": whole}
    assert mirror.served_bytes == 100_000 + 300_000


def test_a_corrupt_byte_is_refused_with_both_digests_and_set_aside(mirror, cache):
    config = manifest(mirror)
    wrong = bytearray(FILES["model.safetensors"])
    wrong[123_456] ^= 1
    mirror.files[BIG] = bytes(wrong)
    error = refused(config, cache)
    assert error.code is ErrorCode.MODEL_MISMATCH
    assert digest(bytes(wrong)) in error.message
    assert digest(FILES["model.safetensors"]) in error.message
    assert not cache.records()
    (aside,) = cache.quarantine(".").glob("*.bin")
    assert aside.read_bytes() == bytes(wrong)

    served = mirror.served_bytes
    again = refused(config, cache)
    assert again.code is ErrorCode.MODEL_MISMATCH
    assert "still holds" in again.message
    assert mirror.served_bytes - served < 300_000, "a file that is known to be wrong is not fetched at each restart"

    mirror.files[BIG] = FILES["model.safetensors"]
    assert read(cache, fetch(config, cache, patience=HASTE)) == FILES


def test_another_manifest_than_the_named_one_is_refused(mirror, cache):
    config = manifest(mirror)
    mirror.put("m", FILES | {"extra.json": b"{}"})
    error = refused(config, cache)
    assert error.code is ErrorCode.MODEL_MISMATCH
    assert "SHA256SUMS" in error.message


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, ErrorCode.MODEL_DENIED), (403, ErrorCode.MODEL_DENIED), (404, ErrorCode.MODEL_ABSENT)],
)
def test_a_refusal_is_final_and_says_which_file(mirror, cache, status, code):
    config = manifest(mirror)
    mirror.fault = lambda asked: {"status": status} if asked.path == BIG else None
    error = refused(config, cache)
    assert error.code is code
    assert "/m/model.safetensors" in error.message


def test_a_busy_server_is_asked_again_when_it_says(mirror, cache):
    mirror.fault = once({"status": 503, "headers": {"retry-after": "0"}})
    assert read(cache, fetch(manifest(mirror), cache, patience=HASTE)) == FILES


def test_the_deadline_ends_it_with_the_last_failure(mirror, cache):
    config = manifest(mirror, deadline_s=0.4)
    mirror.fault = lambda asked: {"status": 503}
    began = time.monotonic()
    error = refused(config, cache)
    assert error.code is ErrorCode.MODEL_UNREACHABLE
    assert "503" in error.message
    assert time.monotonic() - began < 60


def test_a_token_goes_to_its_own_host_and_not_along_a_redirect(mirror, cache, monkeypatch):
    monkeypatch.setenv("TAKTLINE_MODEL_TOKEN", "sesame")
    with serving(Mirror()) as elsewhere:
        elsewhere.files = mirror.files
        config = manifest(mirror)
        mirror.fault = lambda asked: (
            {"status": 302, "headers": {"location": f"{elsewhere.url}{asked.path}?signed=1"}}
            if asked.path == BIG
            else None
        )
        assert read(cache, fetch(config, cache, patience=HASTE)) == FILES
        assert {asked.headers["authorization"] for asked in mirror.asked} == {"Bearer sesame"}
        assert elsewhere.gets(BIG)
        assert all("authorization" not in asked.headers for asked in elsewhere.asked)


def test_a_private_authority_is_trusted_where_it_is_named_and_else_said_to_be_missing(cache, tmp_path):
    authority = Authority(tmp_path)
    with serving(Mirror(), authority.issue("mirror", addresses=["127.0.0.1"])) as mirror:
        config = manifest(mirror)
        error = refused(config, cache)  # at once: asking again cures nothing
        assert error.code is ErrorCode.MODEL_UNREACHABLE
        assert "not trusted" in error.message
        assert "caConfigMap" in error.next_step
        assert read(cache, fetch(config, cache, patience=HASTE, authority=authority.certificate)) == FILES
        # What began encrypted stays so.
        mirror.fault = lambda asked: {"status": 302, "headers": {"location": "http://127.0.0.1:9/x"}}
        other = DeliveryConfig(source=HttpSource(url=f"{mirror.url}/other", sha256="a" * 64))
        assert refused(other, cache, authority=authority.certificate).code is ErrorCode.MODEL_UNSAFE


def test_redirects_in_a_circle_and_to_other_schemes_are_not_followed(mirror, cache):
    config = manifest(mirror)
    mirror.fault = lambda asked: {"status": 302, "headers": {"location": asked.path}} if asked.path == BIG else None
    assert refused(config, cache).code is ErrorCode.MODEL_UNREACHABLE
    mirror.fault = lambda asked: {"status": 302, "headers": {"location": "file:///etc/passwd"}}
    assert refused(config, cache).code is ErrorCode.MODEL_UNSAFE


def test_a_proxy_of_the_environment_is_used(mirror, cache, monkeypatch):
    config = manifest(mirror)
    with serving(Mirror()) as proxy:
        # A proxy is asked with the whole address; this one serves the same files under it.
        proxy.files = {f"http://mirror.invalid{path}": data for path, data in mirror.files.items()}
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "")
        through = DeliveryConfig(source=HttpSource(url="http://mirror.invalid/m", sha256=config.source.sha256))
        assert read(cache, fetch(through, cache, patience=HASTE)) == FILES


def test_more_than_is_allowed_is_refused_before_it_is_fetched(mirror, cache):
    error = refused(manifest(mirror, max_bytes=100_000), cache)
    assert error.code is ErrorCode.MODEL_UNSAFE
    assert "100,000" in error.message
    assert not mirror.gets(BIG)


def test_an_index_brings_its_shards(mirror, cache):
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": index,
        "model-1.safetensors": content(1000, 1),
        "model-2.safetensors": content(1000, 2),
    }
    mirror.put("m", files)
    pins = {"config.json": digest(b"{}"), "model.safetensors.index.json": digest(index)}
    config = DeliveryConfig(source=HttpSource(url=f"{mirror.url}/m", layout="Index"), sha256=pins)
    assert read(cache, fetch(config, cache, patience=HASTE)) == files


def test_statistics_may_come_from_elsewhere_and_weights_are_not_fetched_again_for_them(mirror, cache):
    config = manifest(mirror)
    fetch(config, cache, patience=HASTE)
    own = b'{"norm": 2}'
    mirror.files["/statistics/line-7.json"] = own
    changed = DeliveryConfig(
        source=config.source,
        statistics_file=StatisticsFile(
            source=HttpSource(url=f"{mirror.url}/statistics/line-7.json"),
            sha256=digest(own),
            path="assets/x/norm_stats.json",
        ),
    )
    assert changed.key != config.key
    served = mirror.served_bytes
    record = fetch(changed, cache, patience=HASTE)
    assert read(cache, record) == FILES | {"assets/x/norm_stats.json": own}
    assert mirror.served_bytes - served == len(own) + len(mirror.files["/m/SHA256SUMS"])


@pytest.mark.parametrize("hub", [False, True])
def test_the_token_of_the_checkpoint_is_not_shown_to_whoever_has_the_statistics(mirror, cache, monkeypatch, hub):
    monkeypatch.setenv("TAKTLINE_MODEL_TOKEN", "sesame")
    with serving(Mirror()) as elsewhere:
        for place in (mirror, elsewhere):
            place.files["/line-7.json"] = b"[7]"
        config = manifest(mirror)
        if hub:
            config = msgspec.structs.replace(
                config, source=HubSource(repo="a/b", revision="0" * 40, endpoint=mirror.url)
            )
        shown = []
        for place in (mirror, elsewhere):
            statistics = HttpSource(url=f"{place.url}/line-7.json")
            file = StatisticsFile(source=statistics, sha256=digest(b"[7]"), path="norm_stats.json")
            found = catalogue.statistics_of(msgspec.structs.replace(config, statistics_file=file))
            assert found is not None
            shown.append(dict(found.origin.headers("GET", httpx.URL(found.url))))
        assert shown == [{"authorization": "Bearer sesame"}, {}]


def test_a_file_that_fails_ends_the_wait_for_one_that_another_process_fetches(mirror, cache):
    config = listed(mirror, {"big.bin": b"big", "gone.bin": b"gone"}, deadline_s=40.0)
    del mirror.files["/m/gone.bin"]
    mirror.fault = lambda asked: {"status": 405} if asked.method == "HEAD" else None
    begun = time.monotonic()
    with cache.lock(f"file-{digest(b'big')[:32]}", begun + 5), pytest.raises(TaktlineError) as caught:
        fetch(config, cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_ABSENT
    assert time.monotonic() - begun < config.deadline_s


def test_pinned_content_is_known_again_at_another_address(mirror, cache):
    config = manifest(mirror)
    fetch(config, cache, patience=HASTE)
    moved = DeliveryConfig(source=HttpSource(url="http://other.invalid/m", sha256=config.source.sha256))
    assert moved.key == config.key
    assert fetch(moved, cache, patience=HASTE).key == config.key


def test_progress_is_shared_and_ends_at_all_bytes(mirror, cache):
    told = []
    progress = Progress(told.append)
    fetch(manifest(mirror), cache, progress, patience=HASTE)
    last = progress.now()
    assert (last.state, last.percent, last.done_files) == ("published", 100, 3)
    assert next(found.state for found in told) == "preparing"
    assert not list(cache.folder.glob("progress/*")), "nothing is left of it"
