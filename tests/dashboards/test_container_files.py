"""The container files hold our rules, and the build stage's own commands make a component that starts.

There is no container engine on a developer's machine here, so the build stage is carried out step by step in a folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import cpython_tags
from packaging.utils import parse_wheel_filename

from .conftest import ROOT

FOLDER = ROOT / "deploy/containers"
FILES = sorted(FOLDER.glob("*.Dockerfile"))
NAMES = [path.stem for path in FILES]
BIN = Path(sys.executable).parent


def stages(path: Path) -> list[str]:
    """The text of each stage, continuation lines joined and comments left out."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]


def test_there_is_one_for_each_component():
    assert NAMES == ["gateway", "operator", "worker"]


def test_the_linter_finds_nothing():
    found = subprocess.run([BIN / "hadolint", *FILES], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_the_linter_would_find_something(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && apt-get install curl\n")
    assert subprocess.run([BIN / "hadolint", bad], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_an_image_is_multi_stage_exact_and_not_root(path):
    text, found = path.read_text(), stages(path)
    assert len(found) == 2
    base = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", text, re.MULTILINE)
    assert base
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", base[1])
    assert [stage.split()[0] for stage in found] == ["${PYTHON_IMAGE}", "${PYTHON_IMAGE}"]
    final = found[-1]
    users = re.findall(r"^USER (\S+)$", final, re.MULTILINE)
    assert users == ["10001:10001"]
    assert final.index("USER 10001") > final.rindex("COPY")
    assert not re.search(r"^(ADD|RUN pip)", final, re.MULTILINE), "build tools stay in the build stage"
    assert not re.search(r"curl|wget|https?://", text)
    assert re.search(r'^ENTRYPOINT \["taktline-\w+"\]$', final, re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_an_image_takes_the_locked_packages_and_every_members_project_file(path):
    build = stages(path)[0]
    members = re.search(r"^members = \[(.+)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert members
    for member in re.findall(r'"([^"]+)"', members[1]):
        assert f"COPY {member}/pyproject.toml {member}/pyproject.toml" in build
    syncs = re.findall(r"^RUN (uv sync .+)$", build, re.MULTILINE)
    assert len(syncs) == 2
    assert all("--frozen --no-dev" in sync for sync in syncs)
    assert re.search(r"RUN pip install uv==\d+\.\d+\.\d+$", build, re.MULTILINE)


def test_the_workers_extras_reach_its_packages_and_its_bill(tmp_path):
    build = stages(FOLDER / "worker.Dockerfile")[0]
    assert build.index('ARG WORKER_EXTRAS=""') < build.index("RUN uv sync ${WORKER_EXTRAS} ")
    assert build.count("RUN uv sync ${WORKER_EXTRAS} ") == 2
    settings = {**os.environ, "WORKER_EXTRAS": "--extra=video"}
    subprocess.run([ROOT / "tools/sbom", tmp_path], check=True, capture_output=True, env=settings)
    with_video = {
        name: "av"
        in {part["name"] for part in json.loads((tmp_path / f"taktline-{name}.cdx.json").read_text())["components"]}
        for name in NAMES
    }
    assert with_video == {"gateway": False, "operator": False, "worker": True}


EXTRAS = "--extra=video --extra=ray"
LIBC_MINOR = 36  # glibc 2.36 of Debian bookworm, on which the base image is built


def environment_of(machine: str) -> dict[str, str]:
    """What markers of requirements see in an image for `machine`."""
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": "3.11.13",
        "python_version": "3.11",
        "sys_platform": "linux",
        "extra": "",
    }


def supported_tags(machine: str) -> set[str]:
    """Tags of the wheels that Python 3.11 of the base image takes on `machine`."""
    oldest = 5 if machine == "x86_64" else 17  # of glibc, for which there ever were wheels of that machine
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(LIBC_MINOR, oldest - 1, -1)]
    platforms += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    found = {str(tag) for tag in cpython_tags((3, 11), ["cp311"], platforms)}
    found |= {f"py{version}-none-{platform}" for version in ("3", "311") for platform in [*platforms, "any"]}
    return found | {"py2-none-any", "py311-none-any"}


def without_wheel(name: str, machine: str) -> list[str]:
    """Locked packages of an image for which no wheel fits `machine`: they would have to be compiled in the build."""
    selection = re.findall(r"^RUN uv sync .*--no-editable (.+)$", (FOLDER / f"{name}.Dockerfile").read_text(), re.M)
    uv = subprocess.run([ROOT / "tools/find-uv"], capture_output=True, text=True, check=True).stdout.strip()
    command = [uv, "export", "--quiet", "--frozen", "--no-dev", "--no-emit-workspace", "--no-hashes", "--no-annotate"]
    command += ["--format=requirements.txt", *selection[0].split(), *(EXTRAS.split() if name == "worker" else [])]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = [Requirement(line) for line in listed if line and not line.startswith("#")]
    assert len(wanted) > 30
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    wheels = {
        (package["name"], package["version"]): [one["url"].rpartition("/")[2] for one in package.get("wheels", [])]
        for package in locked
        if "version" in package
    }
    tags, missing = supported_tags(machine), []
    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate(environment_of(machine)):
            continue
        version = str(requirement.specifier).removeprefix("==")
        names = wheels[requirement.name, version]
        if not any(tags & {str(tag) for tag in parse_wheel_filename(found)[3]} for found in names):
            missing.append(f"{requirement.name} {version}")
    return missing


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("name", NAMES)
def test_every_locked_package_has_a_wheel_for_both_machines(name, machine):
    assert without_wheel(name, machine) == []


def test_a_package_without_a_wheel_for_a_machine_would_be_found():
    assert "torch 2.11.0" in without_wheel("worker", "riscv64")


def test_what_is_sent_to_the_engine_is_what_the_files_copy():
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert allowed[1] == "*"
    for path in FILES:
        for source in re.findall(r"^COPY (?!--from)(.+) \S+$", stages(path)[0], re.MULTILINE):
            for part in source.split():
                kept = [line[1:] for line in allowed if line.startswith("!")]
                assert any(part == line or re.fullmatch(line.replace("*", "[^/]+"), part) for line in kept), part


@pytest.mark.parametrize("name", ["operator", "gateway"])
def test_the_build_stage_makes_a_component_that_starts_and_has_no_torch(name, tmp_path):
    source, environment = tmp_path / "src", tmp_path / "opt"
    source.mkdir()
    uv = subprocess.run([ROOT / "tools/find-uv"], capture_output=True, text=True, check=True).stdout.strip()
    settings = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(environment), "UV_PYTHON": sys.executable}
    settings.pop("VIRTUAL_ENV", None)
    for line in stages(FOLDER / f"{name}.Dockerfile")[0].splitlines():
        if line.startswith("COPY "):
            *parts, target = line.split()[1:]
            for part in parts:
                place = source / target / (Path(part).name if target == "./" else "")
                place.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
                copy(ROOT / part, place)
        elif line.startswith("RUN uv sync "):
            command = [uv, *line.split()[2:], "--quiet"]
            done = subprocess.run(command, cwd=source, env=settings, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    shutil.rmtree(source)  # --no-editable: the image has no sources beside the environment
    said = subprocess.run(
        [environment / f"bin/taktline-{name}", "--version"], capture_output=True, text=True, check=True
    )
    assert "0.1.0" in said.stdout
    packages = {path.name.split("-")[0] for path in environment.glob("lib/python*/site-packages/*.dist-info")}
    assert {"torch", "transformers", "pytest", "ruff"} & packages == set()
    assert f"taktline_{name}" in packages


def test_a_bill_of_materials_lists_what_each_image_installs(tmp_path):
    subprocess.run([ROOT / "tools/sbom", tmp_path], check=True, capture_output=True)
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(found) == {f"taktline-{name}.cdx.json" for name in NAMES}
    for name in NAMES:
        bill = found[f"taktline-{name}.cdx.json"]
        assert bill["bomFormat"] == "CycloneDX"
        parts = {part["name"]: part for part in bill["components"]}
        assert ("torch" in parts) == (name == "worker")
        assert "pytest" not in parts
        assert all("version" in part for part in parts.values())
        assert parts["prometheus-client"]["purl"].startswith("pkg:pypi/prometheus-client@")


@pytest.mark.parametrize(("there", "says"), [((), "no buildah here"), (("buildah",), "no debootstrap here")])
def test_trying_the_images_says_what_is_missing(tmp_path: Path, there: tuple[str, ...], says: str):
    for program in (*there, "dirname", "id"):
        found = shutil.which(program) or shutil.which("true")
        (tmp_path / program).symlink_to(found)
    script = ["/bin/sh", ROOT / "tools/try-images", "operator"]
    reply = subprocess.run(script, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert reply.returncode == 1
    assert says in reply.stderr
    assert "apt-get install buildah debootstrap" in reply.stderr
