"""Model families: which this release's workers load, and what of a family decides how it may be spread over GPUs."""

from __future__ import annotations

import msgspec


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One model family.

    Attributes:
        loaded: whether this release's worker has a loader for it; a test compares this with the worker's registry.
        heads: query heads and key-value heads of the part that `parallel.tp` cuts; empty where it cuts none.
        guided: whether inference has the two branches of classifier-free guidance, which `parallel.cfg` splits.
    """

    loaded: bool = True
    heads: tuple[int, ...] = ()
    guided: bool = False


FAMILIES: dict[str, Family] = {
    "pi0": Family(),
    "pi05": Family(),
    "gr00t-n1.7": Family(),
    "cosmos3-nano": Family(heads=(32, 8), guided=True),
    "cosmos3-edge": Family(heads=(16, 8), guided=True),
    "minicpm-robot": Family(),
    "vjepa2-ac": Family(),
}
"""Every family that a PolicyDeployment may name."""


def loaded() -> tuple[str, ...]:
    """Families that this release's workers load, in order of their names."""
    return tuple(sorted(name for name, family in FAMILIES.items() if family.loaded))
