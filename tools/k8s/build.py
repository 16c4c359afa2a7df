"""Builds the local control plane (etcd, kube-apiserver and companions, kubectl) from the pinned Go modules, once.

The programs land in `$XDG_CACHE_HOME/taktline/k8s/<version>` (default `~/.cache`), outside the repository: every
checkout shares them. A second call finds them and returns at once. A lock keeps two builds apart, and the folder is
renamed into place only when complete, so that an interrupted build leaves nothing half-made.

    python tools/k8s/build.py                  build what is missing, print the folder
    python tools/k8s/build.py --where          print the folder; exit 3 where it is not built yet
    python tools/k8s/build.py --controllers    the same for the controllers of other products, with their manifests

Standard library only: it also runs outside the project's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent

NOT_BUILT = 3
INSTALL_GO = "install Go {version} or newer (https://go.dev/dl), then run `make control-plane`"


class BuildError(Exception):
    """The build cannot go on; the text is one line with the next step."""


class Recipe(NamedTuple):
    """What is built together; one build of all programs shares the compiled packages.

    Attributes:
        name: in progress lines.
        module: folder of the go.mod that pins everything.
        programs: program name -> Go package.
        versions: name in the folder's name (may be empty) -> module whose pinned version stands there.
        takes: how long the first build takes, for people.
        manifests: program name -> (module, folders and files of it) to copy beside the programs.
        answers: whether each program says its version.
    """

    name: str
    module: Path
    programs: dict[str, str]
    versions: dict[str, str]
    takes: str
    manifests: dict[str, tuple[str, tuple[str, ...]]]
    answers: bool = False


CONTROL_PLANE = Recipe(
    name="control plane",
    module=HERE,
    programs={
        "etcd": "go.etcd.io/etcd/server/v3",
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    },
    versions={"": "k8s.io/kubernetes", "etcd": "go.etcd.io/etcd/server/v3"},
    takes="10 to 15 minutes on 2 cores",
    manifests={},
    answers=True,
)
CONTROLLERS = Recipe(
    name="controllers",
    module=HERE / "controllers",
    programs={"lws": "sigs.k8s.io/lws/cmd", "kuberay": "github.com/ray-project/kuberay/ray-operator"},
    versions={"lws": "sigs.k8s.io/lws", "kuberay": "github.com/ray-project/kuberay/ray-operator"},
    takes="5 to 10 minutes on 2 cores",
    manifests={
        "lws": ("sigs.k8s.io/lws", ("config/crd/bases", "config/webhook/manifests.yaml")),
        "kuberay": ("github.com/ray-project/kuberay/ray-operator", ("config/crd/bases",)),
    },
)


def pinned_version(recipe: Recipe, module: str) -> str:
    """Version of `module` in the recipe's go.mod, for example `v1.36.3`."""
    pins = recipe.module / "go.mod"
    match = re.search(rf"^\s*{re.escape(module)} (v[0-9][^\s]*)", pins.read_text(), re.MULTILINE)
    if match is None:
        raise BuildError(f"{pins} pins no {module}")
    return match.group(1)


def cache_root() -> Path:
    """Folder that holds all built versions."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "taktline" / "k8s"


def target_folder(recipe: Recipe) -> Path:
    """Folder of the pinned versions; it exists only when the build is complete."""
    parts = [part for name, module in recipe.versions.items() for part in (name, pinned_version(recipe, module))]
    return cache_root() / "-".join(filter(None, parts))


def is_built(recipe: Recipe, folder: Path) -> bool:
    """Whether every program is there."""
    return all(os.access(folder / name, os.X_OK) for name in recipe.programs)


def require_go(recipe: Recipe) -> str:
    """Path of a Go new enough for go.mod; raises BuildError with what to install."""
    match = re.search(r"^go ([0-9]+)\.([0-9]+)", (recipe.module / "go.mod").read_text(), re.MULTILINE)
    assert match is not None
    wanted = (int(match.group(1)), int(match.group(2)))
    next_step = INSTALL_GO.format(version=f"{wanted[0]}.{wanted[1]}")
    go = shutil.which("go")
    if go is None:
        raise BuildError(f"no Go toolchain on PATH; {next_step}")
    # Asked outside the module, where a too old `go` would otherwise fetch or refuse a toolchain instead of answering.
    reply = subprocess.run([go, "env", "GOVERSION"], cwd="/", capture_output=True, text=True, check=False).stdout
    found = re.match(r"go([0-9]+)\.([0-9]+)", reply)
    if found is None:
        raise BuildError(f"`go env GOVERSION` answered {reply.strip()!r}; {next_step}")
    fetches_toolchains = subprocess.run(
        [go, "env", "GOTOOLCHAIN"], cwd="/", capture_output=True, text=True, check=False
    ).stdout.strip()
    if (int(found.group(1)), int(found.group(2))) < wanted and fetches_toolchains == "local":
        raise BuildError(f"{reply.strip()} is too old; {next_step}")
    return go


@contextlib.contextmanager
def build_lock(root: Path) -> Iterator[None]:
    """Waits until no other process builds into `root`. The lock falls with its process, however that ends."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """One line of progress on stderr; stdout carries the folder alone."""
    print(f"build: {text}", file=sys.stderr, flush=True)


def link_flags(recipe: Recipe) -> str:
    """Strips symbols and stamps the version that `kubectl version` and `/version` report."""
    if recipe is not CONTROL_PLANE:
        return "-s -w"
    version = pinned_version(recipe, "k8s.io/kubernetes")
    major, minor = version.removeprefix("v").split(".")[:2]
    stamps = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    flags = ["-s", "-w"]
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
        flags += [f"-X {package}.{key}={value}" for key, value in stamps.items()]
    return " ".join(flags)


def go_environment() -> dict[str, str]:
    """Static programs from the modules in go.sum, whatever the caller's own Go settings."""
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}


def count_packages(recipe: Recipe, go: str) -> int:
    """How many packages the programs consist of; this also downloads the modules."""
    listing = subprocess.run(
        [go, "list", "-deps", *recipe.programs.values()],
        cwd=recipe.module, env=go_environment(), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if listing.returncode != 0:
        raise BuildError("Go could not fetch the pinned modules (its message is above); check GOPROXY and the network")
    return len(listing.stdout.split())


def compile_programs(recipe: Recipe, go: str, folder: Path, parallel: int, total: int, started: float) -> None:
    """Runs `go build` for each program into `folder`, with a progress line every ten seconds."""
    done = 0
    finished = threading.Event()

    def report() -> None:
        while not finished.wait(10):
            say(f"{min(done, total)} of about {total} packages compiled, {minutes(time.monotonic() - started)}")

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        for name, package in recipe.programs.items():
            say(f"building {name}")
            command = [
                go, "build", "-trimpath", "-v", "-p", str(parallel), "-ldflags", link_flags(recipe),
                "-o", str(folder / name), package,
            ]  # fmt: skip
            # Low priority: a person goes on working while this takes all cores.
            if nice := shutil.which("nice"):
                command = [nice, "-n", "10", *command]
            output: list[str] = []
            with subprocess.Popen(
                command, cwd=recipe.module, env=go_environment(), stderr=subprocess.PIPE, text=True
            ) as process:
                assert process.stderr is not None
                try:
                    for line in process.stderr:
                        output.append(line)
                        done += 1
                except BaseException:
                    process.terminate()
                    raise
            if process.returncode != 0:
                raise BuildError(f"go build {package} failed:\n{''.join(output[-30:])}")
    finally:
        finished.set()
        reporter.join()


def copy_manifests(recipe: Recipe, go: str, folder: Path) -> None:
    """Puts the manifests that the modules hold into a folder beside each program, `NAME-manifests`."""
    for name, (module, wanted) in recipe.manifests.items():
        listing = subprocess.run(
            [go, "list", "-m", "-f", "{{.Dir}}", module],
            cwd=recipe.module, env=go_environment(), stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        target = folder / f"{name}-manifests"
        target.mkdir()
        for part in wanted:
            source = Path(listing.stdout.strip()) / part
            for file in sorted(source.glob("*.yaml")) if source.is_dir() else [source]:
                (target / file.name).write_bytes(file.read_bytes())


def check_programs(recipe: Recipe, folder: Path) -> None:
    """Each program answers with the version it was built from."""
    if not recipe.answers:
        return
    kubernetes = pinned_version(recipe, "k8s.io/kubernetes")
    etcd = pinned_version(recipe, "go.etcd.io/etcd/server/v3").removeprefix("v")
    for name in recipe.programs:
        arguments = ["version", "--client"] if name == "kubectl" else ["--version"]
        answer = subprocess.run([folder / name, *arguments], capture_output=True, text=True, check=False).stdout
        if (etcd if name == "etcd" else kubernetes) not in answer:
            raise BuildError(f"{name} was built but answers {answer.strip()!r} to {' '.join(arguments)}")


def minutes(seconds: float) -> str:
    """A duration for people."""
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def build(recipe: Recipe, parallel: int) -> Path:
    """Builds what is missing and returns the folder; raises BuildError."""
    folder = target_folder(recipe)
    if is_built(recipe, folder):
        return folder
    go = require_go(recipe)
    with build_lock(cache_root()):
        if is_built(recipe, folder):
            return folder
        started = time.monotonic()
        for leftover in cache_root().glob("building-*"):
            shutil.rmtree(leftover)
        versions = folder.name
        say(f"first build of {versions} with {parallel} parallel compilers; {recipe.takes}, then cached")
        total = count_packages(recipe, go)
        work = Path(tempfile.mkdtemp(prefix="building-", dir=cache_root()))
        try:
            compile_programs(recipe, go, work, parallel, total, started)
            check_programs(recipe, work)
            copy_manifests(recipe, go, work)
            seconds = round(time.monotonic() - started, 1)
            (work / "build.json").write_text(json.dumps({"versions": versions, "build_s": seconds, "cores": parallel}))
            work.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        say(f"built {versions} in {minutes(seconds)}")
    return folder


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", action="store_true", help="print the folder, build nothing; exit 3 if not built")
    parser.add_argument(
        "--controllers", action="store_true", help="the controllers of LeaderWorkerSet and KubeRay, for their tests"
    )
    parser.add_argument("-p", "--parallel", type=int, default=os.cpu_count() or 1, help="compilers at once")
    options = parser.parse_args()
    recipe = CONTROLLERS if options.controllers else CONTROL_PLANE
    try:
        if options.where:
            folder = target_folder(recipe)
            print(folder)
            return 0 if is_built(recipe, folder) else NOT_BUILT
        print(build(recipe, options.parallel))
    except BuildError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; what Go has compiled so far is kept in its own cache, the next build goes on from there")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
