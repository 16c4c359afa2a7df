"""Runs the tests in two lanes side by side, and what failed in a handful of places once more by itself.

Much of the tests' time is waiting: for a cluster's controllers, for alerts, for leases. The first lane holds the
folders that wait most, the second all others, so that one computes while the other waits. Lanes share no port
(tests/ports.py), no cluster and no folder that they write to. With arguments there is one lane: pytest with these.

Many tests drive real processes against real clocks; on a machine that stalls, one may miss its moment, or a whole file
whose tests share what missed it. So up to FEW failed tests, or those of up to FEW_FILES files, are run a second time,
with nothing beside them, and named at the end. What fails twice, or in numbers, fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

FEW = 5
FEW_FILES = 2
FAILED = 1  # pytest's exit status when tests failed; larger ones say that it could not run them
NEVER_ENDED = 3  # as pytest calls an error of its own
WAITING = (
    "chaos",
    "client",
    "cluster",
    "cosmos3",
    "dashboards",
    "delivery",
    "e2e",
)


class Lane:
    """One pytest process over some of the tests, with a cache of its own."""

    def __init__(self, root: Path, name: str, arguments: list[str]) -> None:
        """`root` is the folder that pytest runs in; `arguments` are pytest's."""
        self.name = name
        self._root = root
        self._arguments = arguments
        self._cache = Path(".pytest_cache") / name
        self.status = NEVER_ENDED

    def run(self, *more: str, prefix: str = "") -> None:
        """Run to the end, with `more` arguments, printing each line after `prefix`; sets `status`."""
        pytest = str(Path(sys.executable).with_name("pytest"))
        # Unbuffered, so that lines come as they are written; by a flag, which the tests' own processes do not inherit.
        command = [sys.executable, "-u", pytest, "-o", f"cache_dir={self._cache}", *more, *self._arguments]
        if prefix:  # of a whole lane, what to make faster
            command += ["--durations=40", "--durations-min=4"]
        # The tests' models are tiny: more threads spend their time waiting for each other, here and in every process.
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        if not prefix:
            self.status = subprocess.run(command, cwd=self._root, env=environment, check=False).returncode
            return
        process = subprocess.Popen(
            command, cwd=self._root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        reader = threading.Thread(target=relay, args=(process.stdout, prefix.encode()), daemon=True)
        reader.start()
        self.status = process.wait()
        reader.join(10)  # and no longer: a process that a test left behind may hold the pipe

    def failed(self) -> list[str]:
        """Names of the tests that failed at last."""
        path = self._root / self._cache / "v" / "cache" / "lastfailed"
        return sorted(json.loads(path.read_text())) if path.exists() else []

    def again(self) -> bool:
        """Run what failed once more; whether it passed."""
        self.run("--last-failed", "--last-failed-no-failures", "none")
        return self.status == 0


def relay(source: IO[bytes], prefix: bytes) -> None:
    """Print the lines of `source` as they come, each after `prefix`."""
    for line in source:
        sys.stdout.buffer.write(prefix + line)
        sys.stdout.buffer.flush()


def split(tests: Path) -> dict[str, list[str]]:
    """Lanes by name, each with its folders and files, relative to the parent of `tests`."""
    here = tests.parent
    entries = sorted(path for path in tests.iterdir() if path.is_dir() or path.name.startswith("test_"))
    others = [path for path in entries if path.name not in WAITING and not path.name.startswith(("__", "."))]
    waiting = [tests / name for name in WAITING if (tests / name).is_dir()]
    lanes = {"waiting": waiting, "working": others}
    return {name: [str(path.relative_to(here)) for path in paths] for name, paths in lanes.items() if paths}


def run(root: Path, arguments: list[str]) -> int:
    """Run all tests below `root`/tests, or pytest with `arguments`; returns the exit status."""
    if arguments:
        lanes = [Lane(root, "asked", arguments)]
        lanes[0].run("--cache-clear")
    else:
        lanes = [Lane(root, name, paths) for name, paths in split(root / "tests").items()]
        width = max(len(lane.name) for lane in lanes)
        threads = [
            threading.Thread(target=lane.run, args=("--cache-clear",), kwargs={"prefix": f"{lane.name:{width}} | "})
            for lane in lanes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    broken = [lane.status for lane in lanes if lane.status not in (0, FAILED)]
    if broken:
        return broken[0] if broken[0] > 0 else FAILED
    behind = [lane for lane in lanes if lane.status == FAILED]
    failed = [name for lane in behind for name in lane.failed()]
    if not behind:
        return 0
    if not all(lane.failed() for lane in behind):
        return FAILED
    files = {name.partition("::")[0] for name in failed}
    if len(failed) > FEW and len(files) > FEW_FILES:
        print(f"{len(failed)} tests of {len(files)} files failed: too many to run a second time", file=sys.stderr)
        return FAILED
    names = "\n".join(failed)
    print(f"\n{len(failed)} of the tests failed, and run once more by themselves:\n{names}\n", flush=True)
    if sum(lane.again() for lane in behind) < len(behind):
        return FAILED
    print(f"\nPassed only when run by themselves (look into them: a test should not need it):\n{names}")
    return 0


if __name__ == "__main__":
    sys.exit(run(Path(__file__).resolve().parents[1], sys.argv[1:]))
