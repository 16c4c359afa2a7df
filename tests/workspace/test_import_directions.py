"""Imports point one way: nothing depends on the gateway, the operator or the worker, and heavy packages stay put."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MEMBERS = {
    "taktline_protocol": "protocol",
    "taktline": "client",
    "taktline_gateway": "gateway",
    "taktline_worker": "worker",
    "taktline_kernels": "kernels",
    "taktline_operator": "operator",
    "taktline_demo": "demo",
    "taktline_local": "deploy/local-cluster",
    "taktline_dashboards": "dashboards",
}

ALLOWED = {
    "taktline_protocol": set(),
    "taktline": {"taktline_protocol"},
    "taktline_gateway": {"taktline_protocol"},
    "taktline_worker": {"taktline_protocol", "taktline_kernels"},
    "taktline_kernels": set(),
    "taktline_operator": {"taktline_protocol"},
    "taktline_demo": {"taktline_protocol", "taktline"},
    "taktline_local": {"taktline_protocol", "taktline"},
    "taktline_dashboards": {"taktline_protocol"},
}

FORBIDDEN = {
    "taktline_protocol": {"torch", "kopf", "kubernetes", "fastapi"},
    "taktline": {"torch", "kopf", "kubernetes", "fastapi", "grpc"},
    "taktline_gateway": {"torch", "kopf", "kubernetes", "transformers"},
    "taktline_worker": {"kopf", "kubernetes", "fastapi"},
    "taktline_operator": {"torch", "transformers", "fastapi"},
}


def imported_modules(package: str) -> dict[str, set[str]]:
    """Top-level modules that each file of `package` imports, wherever in the file the import stands."""
    found: dict[str, set[str]] = {}
    source = ROOT / MEMBERS[package] / "src" / package
    for path in sorted(source.rglob("*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
        found[str(path.relative_to(ROOT))] = names
    assert found, f"no source files under {source}"
    return found


@pytest.mark.parametrize("package", MEMBERS)
def test_members_import_only_what_the_design_allows(package: str) -> None:
    others = set(MEMBERS) - {package}
    for path, names in imported_modules(package).items():
        wrong = (names & others) - ALLOWED[package]
        assert not wrong, f"{path} imports {sorted(wrong)}; {package} may import only {sorted(ALLOWED[package])}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_heavy_packages_stay_where_they_are_used(package: str) -> None:
    for path, names in imported_modules(package).items():
        wrong = names & FORBIDDEN[package]
        assert not wrong, f"{path} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", MEMBERS)
def test_declared_dependencies_follow_the_same_arrows(package: str) -> None:
    project = tomllib.loads((ROOT / MEMBERS[package] / "pyproject.toml").read_text())["project"]
    declared = {line.split("[")[0].split(">")[0].strip() for line in project["dependencies"]}
    ours = {name.replace("-", "_") for name in declared if name.startswith("taktline")}
    assert ours <= ALLOWED[package]
    assert not declared & FORBIDDEN.get(package, set())


def test_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert sys.modules["operator"].__file__ is None or "taktline" not in str(sys.modules["operator"].__file__)
