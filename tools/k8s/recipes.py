"""What can be built for the local cluster: which programs, from which pinned Go module, into which folder."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


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
        trim: (module, what takes parts away from a copy of its source) where most of it is of no use here.
    """

    name: str
    module: Path
    programs: dict[str, str]
    versions: dict[str, str]
    takes: str
    manifests: dict[str, tuple[str, tuple[str, ...]]]
    answers: bool = False
    trim: tuple[str, Callable[[Path], None]] | None = None


def only_prometheus(source: Path) -> None:
    """KEDA that asks Prometheus and no other event source: the clients of some seventy are most of its packages."""
    for scaler in (source / "pkg" / "scalers").glob("*_scaler.go"):
        if scaler.name != "prometheus_scaler.go":
            scaler.unlink()
    # Declared beside one of those, and used by all.
    (source / "pkg" / "scalers" / "shared.go").write_text('package scalers\n\nconst externalMetricType = "External"\n')
    builder = source / "pkg" / "scaling" / "scalers_builder.go"
    parts = re.split(r'(?m)^(?=\tcase "|\tdefault:)', builder.read_text())
    kept = [part for part in parts if not part.startswith('\tcase "') or part.startswith('\tcase "prometheus"')]
    builder.write_text("".join(kept))


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
# Each product keeps the versions of Kubernetes' libraries that it was released with, so each has a go.mod of its own.
GROUPS = Recipe(
    name="controllers of groups",
    module=HERE / "controllers",
    programs={"lws": "sigs.k8s.io/lws/cmd", "kuberay": "github.com/ray-project/kuberay/ray-operator"},
    versions={"lws": "sigs.k8s.io/lws", "kuberay": "github.com/ray-project/kuberay/ray-operator"},
    takes="5 to 10 minutes on 2 cores",
    manifests={
        "lws": ("sigs.k8s.io/lws", ("config/crd/bases", "config/webhook/manifests.yaml")),
        "kuberay": ("github.com/ray-project/kuberay/ray-operator", ("config/crd/bases",)),
    },
)
KUEUE = Recipe(
    name="Kueue",
    module=HERE / "kueue",
    programs={"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
    versions={"kueue": "sigs.k8s.io/kueue"},
    takes="5 to 10 minutes on 2 cores",
    manifests={
        "kueue": ("sigs.k8s.io/kueue", ("config/components/crd/bases", "config/components/webhook/manifests.yaml"))
    },
)
KEDA = Recipe(
    name="KEDA",
    module=HERE / "keda",
    programs={
        "keda": "github.com/kedacore/keda/v2/cmd/operator",
        "keda-adapter": "github.com/kedacore/keda/v2/cmd/adapter",
    },
    versions={"keda-prometheus": "github.com/kedacore/keda/v2"},
    takes="5 to 10 minutes on 2 cores",
    manifests={"keda": ("github.com/kedacore/keda/v2", ("config/crd/bases", "config/metrics-server/api_service.yaml"))},
    trim=("github.com/kedacore/keda/v2", only_prometheus),
)
CONTROLLERS = {"lws": GROUPS, "kuberay": GROUPS, "kueue": KUEUE, "keda": KEDA}
"""What builds each controller."""
ALL = "all"


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
    if recipe.trim is not None:  # what is taken away decides as much as the version does
        parts.append(hashlib.sha256(inspect.getsource(recipe.trim[1]).encode()).hexdigest()[:8])
    return cache_root() / "-".join(filter(None, parts))


def wanted(controllers: str | None) -> tuple[Recipe, ...]:
    """What `--controllers` asks for, each once; without it the control plane."""
    if controllers is None:
        return (CONTROL_PLANE,)
    found = CONTROLLERS.items() if controllers == ALL else [(controllers, CONTROLLERS[controllers])]
    return tuple({recipe.name: recipe for _, recipe in found}.values())
