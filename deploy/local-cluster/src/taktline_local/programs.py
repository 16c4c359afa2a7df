"""Where the control plane's programs and other products' controllers are: the build's cache, or TAKTLINE_K8S_BIN."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from taktline_protocol.errors import ErrorCode, TaktlineError

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
BUILD_SCRIPT = Path(__file__).resolve().parents[4] / "tools" / "k8s" / "build.py"


def find_programs() -> Path | None:
    """Folder with all programs, None where they are not built yet."""
    given = os.environ.get("TAKTLINE_K8S_BIN")
    if given:
        folder = Path(given)
        missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
        if missing:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"TAKTLINE_K8S_BIN={given} lacks {', '.join(missing)}",
                "point it at a folder with all of them, or unset it to use `make control-plane`",
            )
        return folder
    if not BUILD_SCRIPT.exists():
        return None
    reply = subprocess.run([sys.executable, BUILD_SCRIPT, "--where"], capture_output=True, text=True, check=False)
    return Path(reply.stdout.strip()) if reply.returncode == 0 else None


def can_build() -> bool:
    """Whether a build could start here: the repository's pinned modules and a Go toolchain are present."""
    return BUILD_SCRIPT.exists() and shutil.which("go") is not None


def build_programs() -> Path:
    """Build (or find) all programs, with progress on stderr; raises TaktlineError with the build's last words above."""
    found = find_programs()
    if found is not None:
        return found
    reply = subprocess.run([sys.executable, BUILD_SCRIPT], stdout=subprocess.PIPE, text=True, check=False)
    if reply.returncode != 0:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "the local control plane could not be built (the reason is in the lines above)",
            "install Go 1.26 or newer and run `make control-plane`, or set TAKTLINE_KUBECONFIG to a cluster for tests",
        )
    return Path(reply.stdout.strip())


def find_controllers(name: str) -> Path | None:
    """Folder with a controller of another product and its manifests, None where it is not built yet.

    Args:
        name: lws, kuberay, kueue or keda.
    """
    if not BUILD_SCRIPT.exists():
        return None
    command = [sys.executable, str(BUILD_SCRIPT), "--where", f"--controllers={name}"]
    reply = subprocess.run(command, capture_output=True, text=True, check=False)
    return Path(reply.stdout.strip()) if reply.returncode == 0 else None
