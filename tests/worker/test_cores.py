"""Processors that a control group lets a process use, of both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from taktline_worker import cores, jpeg_threads, server
from taktline_worker.cores import usable_cores


def machine(root: Path, groups: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "12:cpuset:/a\n4:cpu,cpuacct:/pods/one\n1:name=systemd:/x\n0::/x\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/pods/one\n", {"pods/one/cpu.max": "max 100000\n", "pods/cpu.max": "200000 100000\n"}, 2),
        ("0::/pods/one\n", {"pods/one/cpu.max": "400000 100000\n", "pods/cpu.max": "900000 100000\n"}, 4),
        ("0::/of/the/host\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "what\n"}, 16),
        ("0::/\n", {}, 16),
        (V1, {"cpu/pods/one/cpu.cfs_quota_us": "250000\n", "cpu/pods/one/cpu.cfs_period_us": "50000\n"}, 5),
        (V1, {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        (V1, {"cpu/pods/one/cpu.cfs_quota_us": "-1\n", "cpu/pods/one/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
def test_a_quota_is_kept_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert usable_cores(machine(tmp_path, groups, **files)) == expected


def test_without_control_groups_all_that_it_may_run_on_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_native_threads_keep_to_it() -> None:
    assert jpeg_threads.usable_cores is cores.usable_cores


def test_arithmetic_keeps_to_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(server, "run", lambda *_: seen.append(torch.get_num_threads()))
    config: Any = SimpleNamespace(policy="arms")
    options: Any = None
    try:
        torch.set_num_threads(2)
        for allowed in (16, 1):
            monkeypatch.setattr(server, "usable_cores", lambda allowed=allowed: allowed)
            server.serve(config, options)
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 1]
