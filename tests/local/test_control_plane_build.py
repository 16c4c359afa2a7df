"""The control plane's build script, with a stand-in for Go: built once, whole or not at all, one at a time."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "k8s" / "build.py"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
PIN_LINE = re.compile(r"^\s+(k8s\.io/kubernetes|go\.etcd\.io/etcd/server/v3) (v\S+)$", re.MULTILINE)
PINS = dict(PIN_LINE.findall((SCRIPT.parent / "go.mod").read_text()))

# Answers as Go does; "builds" a program that answers with both versions; counts its builds; fails or hangs on request.
STAND_IN_GO = """#!/bin/sh
case "$1 $2" in
  "env GOVERSION") echo "${FAKE_VERSION:-go1.26.8}"; exit 0;;
  "env GOTOOLCHAIN") echo local; exit 0;;
esac
case "$1" in
  list) echo a; echo b; exit 0;;
  build)
    echo build >> "$FAKE_FOLDER/builds"
    [ -n "$FAKE_FAIL" ] && { echo "no such module" >&2; exit 1; }
    [ -n "$FAKE_HANG" ] && exec sleep 600
    sleep "${FAKE_SLEEP:-0}"
    while [ "$1" != "-o" ]; do shift; done
    printf '#!/bin/sh\\necho "%s"\\n' "$FAKE_ANSWER" > "$2"; chmod +x "$2";;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "go").write_text(STAND_IN_GO)
    (tools / "go").chmod(0o755)
    for name in ("sh", "sleep", "chmod", "nice", "printf"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    return {
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "FAKE_FOLDER": str(tmp_path),
        "FAKE_ANSWER": " ".join(PINS.values()),
    }


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits that it is ignored
    )  # fmt: skip


def run(environment: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    process = start(environment, *arguments)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.strip(), err


def builds(environment: dict[str, str]) -> int:
    path = Path(environment["FAKE_FOLDER"]) / "builds"
    return len(path.read_text().splitlines()) if path.exists() else 0


def cache(environment: dict[str, str]) -> list[str]:
    folder = Path(environment["XDG_CACHE_HOME"]) / "taktline" / "k8s"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


VERSION = f"{PINS['k8s.io/kubernetes']}-etcd-{PINS['go.etcd.io/etcd/server/v3']}"


def test_builds_once_and_finds_it_afterwards(environment: dict[str, str]) -> None:
    assert run(environment, "--where")[0] == 3
    code, folder, said = run(environment)
    assert code == 0, said
    assert Path(folder).name == VERSION
    assert all(os.access(Path(folder) / name, os.X_OK) for name in PROGRAMS)
    assert "built" in said
    assert run(environment, "--where")[:2] == (0, folder)
    assert run(environment) == (0, folder, "")
    assert builds(environment) == len(PROGRAMS)


def test_without_go_says_what_to_install(environment: dict[str, str]) -> None:
    (Path(environment["PATH"]) / "go").unlink()
    code, _, said = run(environment)
    assert code == 1
    assert "install Go 1.26 or newer" in said
    assert "Traceback" not in said


def test_too_old_go_says_what_to_install(environment: dict[str, str]) -> None:
    code, _, said = run({**environment, "FAKE_VERSION": "go1.19.8"})
    assert code == 1
    assert "go1.19.8 is too old; install Go 1.26" in said


def test_failed_build_leaves_nothing_and_tells_why(environment: dict[str, str]) -> None:
    code, _, said = run({**environment, "FAKE_FAIL": "1"})
    assert code == 1
    assert "no such module" in said
    assert cache(environment) == [".lock"]


def test_program_of_another_version_is_not_accepted(environment: dict[str, str]) -> None:
    code, _, said = run({**environment, "FAKE_ANSWER": "v0.0.1"})
    assert code == 1
    assert "answers" in said
    assert cache(environment) == [".lock"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_build_is_not_taken_for_a_whole_one(environment: dict[str, str], number: signal.Signals) -> None:
    process = start({**environment, "FAKE_HANG": "1"})
    while not builds(environment):
        time.sleep(0.05)
    os.killpg(process.pid, number)
    process.communicate(timeout=180)
    assert process.returncode != 0
    assert run(environment, "--where")[0] == 3
    code, folder, said = run(environment)
    assert code == 0, said
    assert cache(environment) == [".lock", Path(folder).name]


def test_two_builds_at_once_are_one(environment: dict[str, str]) -> None:
    both = [start({**environment, "FAKE_SLEEP": "0.3"}) for _ in range(2)]
    replies = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len({out for out, _ in replies}) == 1
    assert builds(environment) == len(PROGRAMS)


@pytest.fixture
def recipes() -> ModuleType:
    """What the script builds, as a module."""
    found = importlib.util.spec_from_file_location("taktline_k8s_recipes", SCRIPT.with_name("recipes.py"))
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_controller_is_pinned_by_a_module_of_its_own(recipes: ModuleType) -> None:
    assert [recipe.name for recipe in recipes.wanted(None)] == [recipes.CONTROL_PLANE.name]
    every = recipes.wanted(recipes.ALL)
    assert len(every) == len({recipes.target_folder(recipe) for recipe in every}) == 3
    for name, recipe in recipes.CONTROLLERS.items():
        assert recipes.wanted(name) == (recipe,)
        assert name in recipe.programs
        pins = (recipe.module / "go.mod").read_text()
        assert all(package in pins for package in recipe.programs.values()), "`go mod tidy` would drop it"
        assert "replace " not in pins
    reply = subprocess.run([sys.executable, SCRIPT, "--controllers=other"], capture_output=True, text=True)
    assert reply.returncode == 2
    assert "invalid choice" in reply.stderr


def test_keda_is_built_with_one_scaler(recipes: ModuleType, tmp_path: Path) -> None:
    scalers = tmp_path / "pkg" / "scalers"
    scaling = tmp_path / "pkg" / "scaling"
    scalers.mkdir(parents=True)
    scaling.mkdir()
    for name in ("prometheus_scaler.go", "kafka_scaler.go", "scaler.go"):
        (scalers / name).write_text("package scalers\n")
    cases = [f'\tcase "{name}":\n\t\treturn scalers.New(config)\n' for name in ("kafka", "prometheus", "redis")]
    head, tail = "\tswitch triggerType {\n", "\tdefault:\n\t\treturn nil\n\t}\n"
    (scaling / "scalers_builder.go").write_text(head + "".join(cases) + tail)
    recipes.only_prometheus(tmp_path)
    assert sorted(path.name for path in scalers.iterdir()) == ["prometheus_scaler.go", "scaler.go", "shared.go"]
    assert (scaling / "scalers_builder.go").read_text() == head + cases[1] + tail


def test_what_is_taken_away_of_a_source_names_the_build_as_well(recipes: ModuleType) -> None:
    """A build that was trimmed otherwise is another one, of the same version."""
    keda, other = recipes.CONTROLLERS["keda"], lambda source: None
    changed = keda._replace(trim=(keda.trim[0], other))
    assert recipes.target_folder(changed) != recipes.target_folder(keda)
    assert recipes.target_folder(keda).name.startswith("keda-prometheus-v")
    assert recipes.target_folder(recipes.CONTROL_PLANE).name == VERSION
