"""Compiled kernels on disk: found again by what decides them, whole or not at all, and never a reason not to start."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from taktline_kernels import store

PARTS = [b"13.0", b"--std=c++17", b"source"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store of this test's own."""
    path = tmp_path / "a" / "kernels"
    monkeypatch.setenv(store.VARIABLE, str(path))
    monkeypatch.setattr(store, "_warned", [])
    store.folder.cache_clear()
    store.scratch.cache_clear()
    yield path
    store.folder.cache_clear()
    store.scratch.cache_clear()


def files(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file()]


def refuses() -> bytes:
    raise AssertionError("compiled again")


def test_what_is_kept_is_found_by_all_that_decides_it(folder: Path) -> None:
    assert store.kept(PARTS, lambda: b"cubin") == b"cubin"
    assert store.kept(PARTS, refuses) == b"cubin"
    for index in range(len(PARTS)):
        other = [part + b"x" if at == index else part for at, part in enumerate(PARTS)]
        assert store.kept(other, lambda: b"another") == b"another"
    # Where one part ends and the next begins decides, too.
    assert store.kept([b"13.0-", b"-std=c++17", b"source"], lambda: b"moved") == b"moved"
    assert len(files(folder)) == 5
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in files(folder)} == {0o600}


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_made_again(folder: Path, damage: bytes | None) -> None:
    store.kept(PARTS, lambda: b"cubin")
    (path,) = files(folder)
    path.write_bytes(path.read_bytes()[:-1] + b"?" if damage is None else damage)
    assert store.kept(PARTS, lambda: b"again") == b"again"
    assert store.kept(PARTS, refuses) == b"again"


def test_a_compiler_that_refuses_leaves_nothing(folder: Path) -> None:
    def fails() -> bytes:
        raise RuntimeError("few_tokens.cu: error")

    with pytest.raises(RuntimeError, match="few_tokens"):
        store.kept(PARTS, fails)
    assert files(folder) == []


def test_a_full_disk_costs_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert store.kept(PARTS, lambda: b"cubin") == b"cubin"
    assert [record.getMessage() for record in caplog.records] == [
        "compiled kernels are not kept, so the next start compiles them again: [Errno 28] No space left on device"
    ]
    assert files(folder) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("part", ["", "cuda"])
def test_a_folder_that_others_may_write_to_is_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture, mode: int, part: str
) -> None:
    folder.mkdir(mode=0o700, parents=True)
    (folder / part).mkdir(exist_ok=True)
    (folder / part).chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert store.kept(PARTS, lambda: b"cubin") == b"cubin"
    assert files(folder) == []
    assert "others may write to it" in caplog.text
    assert store.folder("cuda") == store.scratch() != folder


def test_a_link_in_the_folder_leads_nowhere(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.mkdir(mode=0o700, parents=True)
    (folder / "cuda").symlink_to(elsewhere)
    with caplog.at_level(logging.WARNING):
        assert store.kept(PARTS, lambda: b"cubin") == b"cubin"
    assert list(elsewhere.iterdir()) == []
    assert "no folder of its own" in caplog.text


def test_what_nobody_asks_for_goes(folder: Path) -> None:
    def aged(path: Path, days: float) -> Path:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(b"content")
        os.utime(path, (time.time() - days * 86400,) * 2)
        return path

    store.kept(PARTS, lambda: b"cubin")
    (asked,) = files(folder)
    os.utime(asked, (time.time() - 29 * 86400,) * 2)
    (folder / "triton").mkdir(mode=0o700)
    stay = [aged(folder / "cuda" / "young", 29), aged(folder / "cuda" / ".tmp-young", 0.5)]
    gone = [aged(folder / "cuda" / "old", 31), aged(folder / "cuda" / ".tmp-left", 1.5)]
    gone += [aged(folder / "triton" / "KEY" / "k.cubin", 31), aged(folder / "triton" / "KEY" / "k.json", 31)]
    mixed = [aged(folder / "triton" / "OTHER" / "k.cubin", 2), aged(folder / "triton" / "OTHER" / "k.json", 40)]
    store.folder.cache_clear()  # the next start
    store.folder("triton")
    assert store.kept(PARTS, refuses) == b"cubin"
    assert not any(path.exists() for path in gone)
    assert not (folder / "triton" / "KEY").exists()
    assert all(path.exists() for path in stay)
    assert [path.exists() for path in mixed] == [True, False]
    assert time.time() - asked.stat().st_mtime < 60  # it stays another 30 days


def test_a_folder_that_cannot_be_tidied_costs_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(30, "Read-only file system")

    for part in (PARTS, [b"other"]):
        store.kept(part, lambda: b"cubin")
    for path in files(folder):
        os.utime(path, (0, time.time() - 31 * 86400))
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    store.folder.cache_clear()
    with caplog.at_level(logging.WARNING):
        for part in (PARTS, [b"other"]):
            assert store.kept(part, refuses) == b"cubin"
    assert [record.getMessage() for record in caplog.records] == [
        "old kernels are not dropped: [Errno 30] Read-only file system",
        "kept kernels are not marked as used, so they may go after 30 days: [Errno 30] Read-only file system",
    ]


def test_a_file_is_on_the_disk_before_it_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def noted(name: str) -> None:
        real = getattr(os, name)

        def call(*given: Any) -> None:
            happened.append(name)
            real(*given)

        monkeypatch.setattr(os, name, call)

    noted("fsync")
    noted("replace")
    store.kept(PARTS, lambda: b"cubin")
    assert happened == ["fsync", "replace"]


def test_another_build_of_the_compiler_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("taktline_kernels.cuda.nvrtc")
    versions = []
    for build in ("13.0.88", "13.0.96"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, build=build: build)
        versions.append(nvrtc._version.__wrapped__())
    assert versions[0] != versions[1]
    assert "13.0.88" in versions[0]


def test_a_place_that_cannot_be_made_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.write_bytes(b"a file")
    with caplog.at_level(logging.WARNING):
        assert store.kept(PARTS, lambda: b"cubin") == b"cubin"
    assert "not kept" in caplog.text


def test_without_the_variable_it_is_in_the_users_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.folder() == tmp_path / ".cache" / "taktline" / "kernels"
    store.folder.cache_clear()
    monkeypatch.delenv("HOME")
    assert store.folder() == store.scratch()


def test_many_write_one_file_at_once(folder: Path) -> None:
    content = os.urandom(1 << 20)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: store.kept(PARTS, lambda: content), range(32)))
    assert set(found) == {content}
    assert len(files(folder)) == 1


def test_a_lost_folder_is_made_again(folder: Path) -> None:
    store.kept(PARTS, lambda: b"cubin")
    (path,) = files(folder)
    path.unlink()
    path.parent.rmdir()
    assert store.kept(PARTS, lambda: b"cubin") == b"cubin"
    assert files(folder) == [path]
