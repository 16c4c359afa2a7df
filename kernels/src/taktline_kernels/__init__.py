"""Kernels of the Taktline engines: operations with torch references, accelerated versions, and the selector."""

from taktline_kernels import ops
from taktline_kernels.selector import Choice, KernelSelector, default_selector

__all__ = ["Choice", "KernelSelector", "default_selector", "ops"]
