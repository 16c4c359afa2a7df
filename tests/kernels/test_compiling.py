"""Kernels that a start compiles side by side and keeps: NVRTC's and Triton's, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from taktline_kernels import compiling

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton and NVRTC are made for Linux"
)

# Triton of the tests' own process interprets kernels. This one has a Hopper GPU's driver made of paper.
PAPER = """
import sys
from unittest import mock
import torch
from triton import compile as compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

gpu = mock.MagicMock(
    get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: GPUTarget("cuda", 90, 32)
)
gpu.utils.get_device_properties = lambda _: {"max_shared_mem": 227 << 10}
gpu.utils.load_binary = lambda *_: (1, 2, 32, 0, 1024)
driver._active = gpu

from taktline_kernels import compiling
from taktline_kernels.triton_impl import norms

x, weight = torch.zeros(4, 1024, dtype=torch.bfloat16), torch.zeros(1024)
launched = gpu.launcher_cls.return_value

def work():
    for _ in range(3):  # as layers do
        norms.rms_norm(x, weight, 1e-6, {"num_warps": 4})
        norms.layer_norm(x, weight, weight, 1e-5, {"num_warps": 2})
"""


def run(script: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PAPER + script],
        env=environment | {"TAKTLINE_KERNEL_CACHE": str(folder), "HOME": str(folder.parent / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dry_batch_compiles_what_it_does_not_launch_and_the_next_process_finds_it(tmp_path: Path) -> None:
    script = """
made = []
backend = __import__("triton.backends.nvidia.compiler", fromlist=["CUDABackend"]).CUDABackend
cubin = backend.make_cubin
with mock.patch.object(backend, "make_cubin", lambda *a: made.append(1) or cubin(*a)):
    with compiling.together(dry=True):
        work()
assert launched.call_count == 0
with mock.patch.object(jit.JITFunction, "_do_compile", side_effect=AssertionError("compiled at its launch")):
    work()
print(len(made), launched.call_count)
"""
    assert run(script, tmp_path / "kernels").split() == ["2", "6"]
    moved = (tmp_path / "kernels").rename(tmp_path / "mounted elsewhere")
    assert run(script, moved).split() == ["0", "6"]


def test_what_fails_before_the_kernels_are_compiled_is_told(tmp_path: Path) -> None:
    script = """
try:
    with compiling.together(dry=True):
        work()
        raise ValueError("of the caller")
except ValueError as error:
    print(error)
work()
print(launched.call_count)
"""
    assert run(script, tmp_path).split("\n")[:2] == ["of the caller", "6"]


def test_damaged_files_of_tritons_are_made_again(tmp_path: Path) -> None:
    shared = tmp_path / "kernels"
    run("work()", shared)
    whole = {path: path.read_bytes() for path in shared.glob("triton/*/*")}
    assert {path.suffix for path in whole} >= {".json", ".cubin", ".sha256"}
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
    assert run("work(); print(launched.call_count)", shared).split() == ["6"]
    assert {path for path, content in whole.items() if path.read_bytes() != content} == set()


@pytest.mark.parametrize("suffix", ["json", "cubin"])
def test_one_damaged_file_of_tritons_is_made_again(tmp_path: Path, suffix: str) -> None:
    shared = tmp_path / "kernels"
    run("work()", shared)
    path = next(one for one in shared.glob(f"triton/*/*.{suffix}") if not one.name.startswith("__grp__"))
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))  # its size is right, as after a loss of power
    assert run("work(); print(launched.call_count)", shared).split() == ["6"]
    assert path.read_bytes() == content


def test_a_group_that_names_no_files_is_none(tmp_path: Path) -> None:
    script = """
from taktline_kernels.triton_impl.kept import KeptFiles
files = KeptFiles("KEY")
path = files.put(b"1", "k.json")
files.put_group("k.json", {"k.json": path})
print(files.get_group("k.json") == {"k.json": path})
for content in ("[]", "null", '{"child_paths": null}', '{"child_paths": [1]}', '{"a": 1}', "{", bytes([255, 254])):
    files.put(content, "__grp__k.json")
    print(files.get_group("k.json"))
"""
    assert run(script, tmp_path / "kernels").split() == ["True", *["None"] * 7]


def test_what_the_processor_runs_is_never_taken_from_a_shared_folder(tmp_path: Path) -> None:
    shared, home = tmp_path / "kernels", tmp_path / "home"
    script = """
import sysconfig
from triton.runtime.build import compile_module_from_src
code = '''#include <Python.h>
static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, 0};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&d); }'''
print(compile_module_from_src(code, "launcher", include_dirs=[sysconfig.get_paths()["include"]]).__file__)
"""
    (made,) = run(script, shared).split()
    launcher = Path(made)
    assert launcher.is_relative_to(home)
    assert list(shared.rglob("*.so*")) == []
    # One that another worker left there, digest and all.
    planted = shared / "triton" / launcher.parent.name
    launcher.parent.rename(planted)
    assert run(script, shared).split() == [made]
    # The home's own is found again: a worker whose container restarts builds none.
    built = launcher.stat().st_mtime_ns
    assert run(script, shared).split() == [made]
    assert launcher.stat().st_mtime_ns == built


def test_triton_compiles_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_bytes(b"a file")
    assert run("work(); work(); print(launched.call_count)", tmp_path / "kernels").split() == ["12"]


def test_triton_compiles_on_a_full_disk(tmp_path: Path) -> None:
    script = """
import errno
from taktline_kernels import store
write = store.write
def full(path, content):
    if "kept-here" in str(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    write(path, content)
store.write = full
work()
print(launched.call_count)
"""
    assert run(script, tmp_path / "kept-here").split() == ["6"]


def test_triton_keeps_a_folder_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    run("work()", tmp_path / "kernels")
    assert list((tmp_path / "own").glob("*/*.cubin"))
    assert not (tmp_path / "kernels" / "triton").exists()


def test_kernels_of_a_batch_are_compiled_at_once_and_loaded_by_who_waits() -> None:
    together = threading.Barrier(2, timeout=30)  # broken unless both are compiled at the same time
    loaded: list[Any] = []
    with compiling.together():
        batch = compiling.current()
        assert batch is not None
        assert not batch.dry
        for name in ("a", "b"):
            batch.add(together.wait, lambda name=name: loaded.append((name, threading.current_thread())))
        assert loaded == []
    assert loaded == [("a", threading.main_thread()), ("b", threading.main_thread())]
    assert compiling.current() is None


def test_a_kernel_that_cannot_be_compiled_is_an_error_of_its_batch() -> None:
    def fails() -> None:
        raise RuntimeError("few_tokens.cu: error")

    def add() -> None:
        batch = compiling.current()
        assert batch is not None
        batch.add(fails, lambda: None)

    with pytest.raises(RuntimeError, match=r"few_tokens\.cu"), compiling.together():
        add()
    assert compiling.current() is None


def test_progress_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_LINE_SECONDS", 0.0)
    with caplog.at_level("INFO"), compiling.together():
        batch = compiling.current()
        assert batch is not None
        for _ in range(3):
            batch.add(lambda: None, lambda: None)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"{done} of 3 kernels compiled or found" for done in (1, 2, 3)]
