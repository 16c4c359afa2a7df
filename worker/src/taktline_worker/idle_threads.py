"""How the threads of a CPU's arithmetic wait for each other; to be said before torch is loaded."""

from __future__ import annotations

import os


def let_others_run() -> None:
    """Has OpenMP's threads sleep while they wait, where nobody has said otherwise.

    Threads that spin make every step tens of times slower where others share the cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
