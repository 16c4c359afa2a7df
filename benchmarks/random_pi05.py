"""Random full-size π0 and π0.5 weights, from the engine's own synthetic policies."""

from __future__ import annotations

from taktline_worker.models.pi.synthetic import PI0, PI05, conventions, random_tensors

__all__ = ["PI0", "PI05", "conventions", "random_tensors"]
