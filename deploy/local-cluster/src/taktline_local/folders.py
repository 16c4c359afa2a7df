"""Temporary folders that go with their process, or with the next process where theirs was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def owned_folder(prefix: str) -> Path:
    """A new temporary folder named `prefix...`; abandoned ones of the same prefix are removed first."""
    _sweep(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    (folder / "owner.pid").write_text(str(os.getpid()))
    return folder


def _sweep(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            os.kill(int((folder / "owner.pid").read_text()), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError):
            continue  # another user's, or one that is being made right now
