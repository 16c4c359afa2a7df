"""What has to be decided before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

# Triton's own library and our kernels are made for its interpreter, or for a GPU, when they are first imported; oracles
# of other tests import Triton, too. Without NVIDIA's driver it is the interpreter.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ["TRITON_INTERPRET"] = "1"
