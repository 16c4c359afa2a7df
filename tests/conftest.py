"""What has to be decided before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Triton's own library and our kernels are made for its interpreter, or for a GPU, when they are first imported; oracles
# of other tests import Triton, too. Without NVIDIA's driver it is the interpreter.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# An example's time says how busy the machine is: no test asserts on it.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
