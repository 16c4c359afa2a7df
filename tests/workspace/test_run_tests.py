"""`make test` runs every folder in one of two lanes, fails with either, and gives few failures a second chance."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import BLOCK, BLOCKS, PortBlock, free_port
from tools.run_tests import FEW, FEW_FILES, WAITING, run, split

ROOT = Path(__file__).resolve().parents[2]
PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    assert False\n"
PASSES_AT_LAST = """
from pathlib import Path
def test_passes_at_last():
    seen = Path(__file__).with_name("seen")
    known = seen.exists()
    seen.touch()
    assert known
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a folder for each lane."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for folder in ("cluster", "other"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(PASSES)
    return tmp_path


def test_every_folder_is_in_one_lane() -> None:
    lanes = split(ROOT / "tests")
    assert sorted(lanes) == ["waiting", "working"]
    assert {f"tests/{name}" for name in WAITING} == set(lanes["waiting"])
    folders = [path for paths in lanes.values() for path in paths]
    assert len(folders) == len(set(folders))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        assert sum(path.is_relative_to(ROOT / folder) for folder in folders) == 1, path


def test_a_failure_of_either_lane_fails(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(root, []) == 0
    told = capfd.readouterr().out
    assert "waiting | " in told
    assert "working | " in told
    assert "by themselves" not in told
    for folder in ("cluster", "other"):
        path = root / "tests" / folder / f"test_{folder}.py"
        path.write_text(PASSES + FAILS)
        assert run(root, []) == 1
        assert f"run once more by themselves:\ntests/{folder}/test_{folder}.py::test_fails\n" in capfd.readouterr().out
        path.write_text(PASSES)


def test_what_passes_the_second_time_is_named(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for folder in ("cluster", "other"):
        (root / "tests" / folder / f"test_{folder}.py").write_text(PASSES_AT_LAST)
    assert run(root, []) == 0
    names = [f"tests/{folder}/test_{folder}.py::test_passes_at_last" for folder in ("cluster", "other")]
    assert "should not need it):\n" + "\n".join(names) in capfd.readouterr().out


def test_many_failures_and_tests_that_cannot_be_run_get_no_second_chance(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    many = "import pytest\n@pytest.mark.parametrize('number', range({}))\ndef test_fails(number):\n    assert False\n"
    # Those of one file may have one cause.
    (root / "tests" / "other" / "test_other.py").write_text(many.format(FEW + 1))
    assert run(root, []) == 1
    assert "by themselves" in capfd.readouterr().out
    for number in range(FEW_FILES + 1):
        (root / "tests" / "other" / f"test_{number}.py").write_text(many.format(FEW))
    (root / "tests" / "other" / "test_other.py").write_text(PASSES)
    assert run(root, []) == 1
    told = capfd.readouterr()
    assert f"{FEW * (FEW_FILES + 1)} tests of {FEW_FILES + 1} files failed: too many" in told.err
    assert "by themselves" not in told.out
    (root / "tests" / "other" / "test_other.py").write_text("import no_such_module\n")
    assert run(root, []) == 2
    assert "by themselves" not in capfd.readouterr().out


def test_arguments_are_those_of_one_pytest(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(root, ["tests/other", "-q"]) == 0
    told = capfd.readouterr().out
    assert "1 passed" in told
    assert " | " not in told


def test_blocks_of_ports_are_shared_by_nobody(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        blocks = [PortBlock(tmp_path) for _ in range(BLOCKS)]
        for block in blocks:
            stack.callback(block.release)
        firsts = [block.first for block in blocks]
        assert len(set(firsts)) == BLOCKS
        assert min(second - first for first, second in itertools.pairwise(firsts)) == BLOCK
        with pytest.raises(RuntimeError, match="taken"):
            PortBlock(tmp_path)
        # A block goes back with its process, however that ends.
        blocks[3].release()
        code = f"""
import os, pathlib, signal
from tests.ports import PortBlock
block = PortBlock(pathlib.Path({str(tmp_path)!r}))
print(block.first, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert int(done.stdout) == firsts[3], done.stderr
        again = PortBlock(tmp_path)
        stack.callback(again.release)
        assert again.first == firsts[3]


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    with socket.socket() as listener:
        port = free_port()
        listener.bind(("127.0.0.1", port))
        listener.listen()
        others = [free_port() for _ in range(BLOCK - 1)]
    assert port not in others
    assert all(port // BLOCK == other // BLOCK for other in others)
    assert len({*others[:10]}) == 10
