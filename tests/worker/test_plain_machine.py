"""Policies on a machine without CUDA's bindings and Triton."""

from __future__ import annotations

import subprocess
import sys

_IMPORTED = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from taktline_worker.models.registry import FAMILIES

for module in FAMILIES.values():
    importlib.import_module(module)
    importlib.import_module(module.removesuffix("adapter") + "runner")
"""


def test_every_family_is_imported_without_cuda_bindings_and_triton() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORTED], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
