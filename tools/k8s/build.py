"""Builds the local control plane (etcd, kube-apiserver and companions, kubectl) from the pinned Go modules, once.

The programs land in `$XDG_CACHE_HOME/taktline/k8s/<version>` (default `~/.cache`), outside the repository: every
checkout shares them. A second call finds them and returns at once. A lock keeps two builds apart, and the folder is
renamed into place only when complete, so that an interrupted build leaves nothing half-made.

    python tools/k8s/build.py                        build what is missing, print the folder
    python tools/k8s/build.py --where                print the folder; exit 3 where it is not built yet
    python tools/k8s/build.py --controllers          the same for all controllers of other products, and manifests
    python tools/k8s/build.py --controllers=kueue    the same for one of them

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

from recipes import (
    ALL,
    CONTROL_PLANE,
    CONTROLLERS,
    BuildError,
    Recipe,
    cache_root,
    pinned_version,
    target_folder,
    wanted,
)

NOT_BUILT = 3
NOT_FETCHED = "Go could not fetch the pinned modules (its message is above); check GOPROXY and the network"
INSTALL_GO = "install Go {version} or newer (https://go.dev/dl), then run `make control-plane`"


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


def module_folder(recipe: Recipe, go: str, module: str, flags: list[str]) -> Path:
    """Where the source of a module is; this also downloads it."""
    listing = subprocess.run(
        [go, "list", *flags, "-m", "-f", "{{.Dir}}", module],
        cwd=recipe.module, env=go_environment(), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if listing.returncode != 0:
        raise BuildError(NOT_FETCHED)
    return Path(listing.stdout.strip())


def trimmed(recipe: Recipe, go: str, work: Path) -> list[str]:
    """Flags of Go by which it builds from a trimmed copy of a module, made in `work`; none where nothing is trimmed."""
    if recipe.trim is None:
        return []
    module, trim = recipe.trim
    # Downloaded first: a module that is only pinned has no folder.
    count_packages(recipe, go, [])
    source, pins = work / "source", work / "pins.mod"
    shutil.copytree(module_folder(recipe, go, module, []), source, copy_function=shutil.copyfile)
    for folder in (source, *(path for path in source.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    trim(source)
    shutil.copyfile(recipe.module / "go.mod", pins)
    shutil.copyfile(recipe.module / "go.sum", work / "pins.sum")
    subprocess.run([go, "mod", "edit", "-replace", f"{module}={source}", str(pins)], check=True, env=go_environment())
    return [f"-modfile={pins}"]


def count_packages(recipe: Recipe, go: str, flags: list[str]) -> int:
    """How many packages the programs consist of; this also downloads the modules."""
    listing = subprocess.run(
        [go, "list", *flags, "-deps", *recipe.programs.values()],
        cwd=recipe.module, env=go_environment(), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if listing.returncode != 0:
        raise BuildError(NOT_FETCHED)
    return len(listing.stdout.split())


def compile_programs(
    recipe: Recipe, go: str, folder: Path, parallel: int, flags: list[str], total: int, started: float
) -> None:
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
                go, "build", *flags, "-trimpath", "-v", "-p", str(parallel), "-ldflags", link_flags(recipe),
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


def copy_manifests(recipe: Recipe, go: str, folder: Path, flags: list[str]) -> None:
    """Puts the manifests that the modules hold into a folder beside each program, `NAME-manifests`."""
    for name, (module, parts) in recipe.manifests.items():
        root = module_folder(recipe, go, module, flags)
        target = folder / f"{name}-manifests"
        target.mkdir()
        for part in parts:
            source = root / part
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
        work = Path(tempfile.mkdtemp(prefix="building-", dir=cache_root()))
        source = work / "trimmed"
        source.mkdir()
        try:
            flags = trimmed(recipe, go, source)
            total = count_packages(recipe, go, flags)
            compile_programs(recipe, go, work, parallel, flags, total, started)
            check_programs(recipe, work)
            copy_manifests(recipe, go, work, flags)
            shutil.rmtree(source)
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
        "--controllers",
        nargs="?",
        const=ALL,
        choices=(ALL, *CONTROLLERS),
        help="not the control plane but the controllers of other products, for the tests beside them (default: all)",
    )
    parser.add_argument("-p", "--parallel", type=int, default=os.cpu_count() or 1, help="compilers at once")
    options = parser.parse_args()
    try:
        if options.where:
            folders = {target_folder(recipe): recipe for recipe in wanted(options.controllers)}
            print(*folders, sep="\n")
            return 0 if all(is_built(recipe, folder) for folder, recipe in folders.items()) else NOT_BUILT
        for recipe in wanted(options.controllers):
            print(build(recipe, options.parallel), flush=True)
    except BuildError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; what Go has compiled so far is kept in its own cache, the next build goes on from there")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
