"""What manifests and archives may name: plain files inside the folder, and nothing else."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import tarfile
import tracemalloc

import pytest
from taktline_protocol.delivery import RECORD_FILE, DeliveryConfig, HttpSource
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_worker.delivery.archive import unpack
from taktline_worker.delivery.catalogue import parse_manifest
from taktline_worker.delivery.fetch import fetch
from taktline_worker.delivery.names import checked_names
from taktline_worker.delivery.progress import Progress

from tests.delivery.conftest import HASTE, content

DIGEST = "0" * 64


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "a//b",
        "a/./b",
        "",
        "a\\b",
        "x\x00y",
        "x\ny",
        "a/",
        "b" * 300,
        RECORD_FILE,
        "\ud800.bin",
    ],
)
def test_a_name_that_leaves_the_folder_is_refused(name):
    with pytest.raises(TaktlineError) as caught:
        checked_names([name])
    assert caught.value.code is ErrorCode.MODEL_UNSAFE


def test_names_that_clash_are_refused():
    assert checked_names(["a/b", "a/c", "d"]) == ["a/b", "a/c", "d"]
    for names in (["a", "a"], ["a", "a/b"], ["a/b/c", "a/b"]):
        with pytest.raises(TaktlineError):
            checked_names(names)


def test_a_manifest_is_what_sha256sum_writes():
    text = f"# ours\n{DIGEST}  ./a/b.json\n{DIGEST} *c.bin\n{DIGEST}  ./SHA256SUMS\n\n"
    assert parse_manifest(text.encode()) == {"a/b.json": DIGEST, "c.bin": DIGEST}
    for bad in (f"{DIGEST}  ../x", "nonsense", f"{DIGEST[:-1]}  x", f"{DIGEST}  x\n{DIGEST}  x"):
        with pytest.raises(TaktlineError) as caught:
            parse_manifest(bad.encode())
        assert caught.value.code is ErrorCode.MODEL_UNSAFE


def packed(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def archive(mirror, data: bytes, **more) -> DeliveryConfig:
    mirror.files["/m.tar.gz"] = data
    pin = hashlib.sha256(data).hexdigest()
    return DeliveryConfig(source=HttpSource(url=f"{mirror.url}/m.tar.gz", layout="Archive", sha256=pin), **more)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_an_archive_that_was_packed_badly_is_refused_in_words(mirror, cache, mode, where):
    text = [content(50_000, seed).hex().encode() for seed in (0, 1)]  # what does not compress is stored as it is
    data = bytearray(packed((member("a.txt"), text[0]), (member("b.txt"), text[1]), mode=mode))
    at = int(where * len(data))
    data[at : at + 64] = bytes(64)
    with pytest.raises(TaktlineError) as caught:
        fetch(archive(mirror, bytes(data)), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_UNSAFE
    assert not cache.records()


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_an_archive_that_was_cut_between_two_files_publishes_no_half(mirror, cache, mode):
    whole = packed((member("a.bin"), content(1024)), (member("b.bin"), content(1024, 1)), mode="w")
    data = {"w": bytes, "w:gz": gzip.compress, "w:xz": lzma.compress}[mode](whole[: 512 + 1024])
    with pytest.raises(TaktlineError) as caught:
        fetch(archive(mirror, data), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_UNSAFE
    assert "cut" in caught.value.message
    assert not cache.records()


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_an_archive_brings_its_files_without_the_folder_around_them(mirror, cache, mode):
    weights = content(50_000)
    files = ((member("reach"), b""), (member("reach/config.json"), b"{}"), (member("reach/w/m.bin"), weights))
    files[0][0].type = tarfile.DIRTYPE
    record = fetch(archive(mirror, packed(*files, mode=mode)), cache, patience=HASTE, spare_bytes=0)
    folder = cache.model(record.key)
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "w/m.bin").read_bytes() == weights
    assert {path.name for path in cache.blob("x").parent.iterdir()} == {file.sha256 for file in record.files}


@pytest.mark.parametrize(
    "bad",
    [
        member("../../etc/cron.d/x"),
        member("/etc/passwd"),
        member("x", tarfile.SYMTYPE, "/etc/passwd"),
        member("x", tarfile.LNKTYPE, "config.json"),
        member("x", tarfile.CHRTYPE),
        member("x", tarfile.FIFOTYPE),
    ],
    ids=["parent", "absolute", "symlink", "hard link", "device", "pipe"],
)
def test_an_archive_with_anything_but_plain_files_is_refused(mirror, cache, bad):
    config = archive(mirror, packed((member("config.json"), b"{}"), (bad, b"")))
    with pytest.raises(TaktlineError) as caught:
        fetch(config, cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_UNSAFE
    assert not cache.records()


def test_an_archive_that_unpacks_to_more_than_is_allowed_is_refused(mirror, cache):
    config = archive(mirror, packed((member("zeros"), bytes(5_000_000))), max_bytes=1_000_000)
    with pytest.raises(TaktlineError) as caught:
        fetch(config, cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_UNSAFE
    assert not list(cache.partial(".").glob("unpack-*"))


def test_a_truncated_archive_is_refused(mirror, cache):
    data = packed((member("m.bin"), content(100_000)))[:60_000]
    with pytest.raises(TaktlineError) as caught:
        fetch(archive(mirror, data), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_UNSAFE


def test_a_file_of_an_archive_with_another_digest_is_refused(mirror, cache):
    config = archive(mirror, packed((member("m.bin"), b"weights")), sha256={"m.bin": DIGEST})
    with pytest.raises(TaktlineError) as caught:
        fetch(config, cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_MISMATCH


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A block with any size, as base-256 numbers have them: also a negative one."""
    block = bytearray(member(name, kind).tobuf(tarfile.GNU_FORMAT))
    block[124:136] = (size % 256**12).to_bytes(12, "big")
    block[124] |= 0x80
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def latin() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        tar.addfile(member("caf\u00e9.bin"))
    return stream.getvalue()


ODD = {
    "negative": lambda: header("a", -(1 << 23)) + header("b", 0) + bytes(1024),
    "negative folder": lambda: header("a", -(1 << 23), tarfile.DIRTYPE) + bytes(1024),
    "no text": latin,
    "names about names": lambda: (header("x", 1, tarfile.GNUTYPE_LONGNAME) + b"n" + bytes(511)) * 2_000 + bytes(1024),
}


@pytest.mark.parametrize("name", ODD)
def test_an_archive_that_no_tool_writes_is_refused_in_words(mirror, cache, name):
    with pytest.raises(TaktlineError) as caught:
        fetch(archive(mirror, ODD[name]()), cache, patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.MODEL_UNSAFE
    assert not cache.records()


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_a_header_about_a_file_is_not_read_whatever_its_size(mirror, cache, kind):
    """It counts for no file: a few bytes that unpack to 300 MiB of it took three times that of memory."""
    size = 8 << 20
    data = gzip.compress(header("x", size, kind) + bytes(size) + header("f", 0) + bytes(1024))
    path = cache.folder / "packed"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(TaktlineError, match="a header of 8,388,608 bytes") as caught:
            unpack(cache, path, "key", {}, 1 << 30, Progress())
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
    assert caught.value.code is ErrorCode.MODEL_UNSAFE
