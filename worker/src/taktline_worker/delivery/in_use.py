"""Marks a delivered checkpoint as in use for as long as this process lives, so that no prune takes it away."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from taktline_protocol.delivery import RECORD_FILE

_held: list[int] = []  # descriptors; the kernel lets go of them with the process


def hold(folder: Path) -> bool:
    """Holds the checkpoint in `folder`; False where it was not delivered by us, so that nobody prunes it either.

    The folder may be mounted read-only.
    """
    try:
        descriptor = os.open(folder / RECORD_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # no record; or a folder that cannot be read, of which the loader says more
    # A prune holds it for an instant only, to find out whether it is free.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    _held.append(descriptor)
    return True
