"""Volume content is swapped whole: no reader ever sees a mixture or a missing file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from taktline_local.fields import ContainerConfigError
from taktline_local.volumes import checked_host_path, select_items, swap_content


def files(value: str, names: tuple[str, ...] = ("a", "b")) -> dict[str, tuple[bytes, int]]:
    return {name: (value.encode(), 0o640) for name in names}


def test_readers_never_see_half_an_update(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    swap_content(folder, files("0"))
    stop = threading.Event()
    mixed: list[tuple[str, str]] = []
    reads = 0

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            # The link is resolved once, as a reader must that wants both files of one version.
            version = (folder / "..data").resolve()
            try:
                pair = ((version / "a").read_text(), (version / "b").read_text())
            except FileNotFoundError:
                continue  # this version was swapped out between the two lines
            reads += 1
            if pair[0] != pair[1]:
                mixed.append(pair)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 200):
        swap_content(folder, files(str(number)))
    stop.set()
    reader.join()
    assert not mixed
    assert reads
    assert (folder / "a").read_text() == "199"


def test_names_come_and_go_and_nothing_old_stays(tmp_path: Path) -> None:
    swap_content(tmp_path, files("1", ("a", "deep/b")))
    assert (tmp_path / "deep" / "b").read_text() == "1"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    swap_content(tmp_path, files("2", ("c",)))
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("..")) == ["c"]
    assert len([path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]) == 1


def test_chosen_keys_get_their_paths_and_absent_ones_are_named() -> None:
    body = {"items": [{"key": "k", "path": "sub/name", "mode": 0o600}]}
    assert select_items({"k": b"v", "other": b""}, body, 0o644, "configMap n/c", str.upper) == {
        "sub/name": (b"V", 0o600)
    }
    with pytest.raises(ContainerConfigError, match="configMap n/c has no key k"):
        select_items({}, body, 0o644, "configMap n/c", str)
    assert select_items({}, {**body, "optional": True}, 0o644, "configMap n/c", str) == {}


def test_binary_content_is_left_alone() -> None:
    assert select_items({"k": b"\xff\xfe"}, {}, 0o644, "secret n/s", str.upper) == {"k": (b"\xff\xfe", 0o644)}


def test_host_paths_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ContainerConfigError, match="does not exist"):
        checked_host_path({"path": str(tmp_path / "none")})
    made = checked_host_path({"path": str(tmp_path / "made"), "type": "DirectoryOrCreate"})
    assert made.is_dir()
    with pytest.raises(ContainerConfigError, match="no File"):
        checked_host_path({"path": str(made), "type": "File"})
