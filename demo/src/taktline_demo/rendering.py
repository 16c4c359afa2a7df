"""Camera images without a GPU: picks MuJoCo's software OpenGL library and renders the workcell's cameras.

MuJoCo reads MUJOCO_GL when it is first imported, so every module here that needs MuJoCo imports it from this one.
"""

from __future__ import annotations

import atexit
import ctypes
import ctypes.util
import os
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from taktline_protocol.errors import ErrorCode, TaktlineError

_LIBRARIES = {"osmesa": "OSMesa", "egl": "EGL"}
_PACKAGES = {"osmesa": "libosmesa6", "egl": "libegl1 and libegl-mesa0"}


def _loads(library: str) -> bool:
    name = ctypes.util.find_library(library)
    if name is None:
        return False
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def select_backend(requested: str | None) -> str:
    """The OpenGL backend to use: `requested` (MUJOCO_GL) where set, else the first software library that loads.

    Returns "disable" where there is none, so that MuJoCo can still be imported for its physics.
    """
    if requested:
        return requested
    return next((backend for backend, library in _LIBRARIES.items() if _loads(library)), "disable")


os.environ["MUJOCO_GL"] = select_backend(os.environ.get("MUJOCO_GL"))
os.environ.setdefault("LP_NUM_THREADS", "1")  # Mesa's threads would take the cores that the policy runs on

import mujoco  # noqa: E402

__all__ = ["Cameras", "mujoco", "require_backend", "select_backend"]


def require_backend(backend: str) -> None:
    """Raises TaktlineError (config_invalid) naming the package to install where `backend` cannot render."""
    if backend == "disable":
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "the simulated cameras found no software OpenGL library (libOSMesa or libEGL)",
            "install one: sudo apt-get install libosmesa6 (or libegl1 and libegl-mesa0)",
        )
    library = _LIBRARIES.get(backend)
    if library and not _loads(library):
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"MUJOCO_GL={backend} asks for lib{library}, which is not installed",
            f"install it: sudo apt-get install {_PACKAGES[backend]}; or unset MUJOCO_GL",
        )


class Cameras:
    """Renders the cameras of one model; belongs to the thread that made it."""

    def __init__(self, model: mujoco.MjModel, pixels: int) -> None:
        """`pixels` is the edge of the square frames. Raises TaktlineError where no OpenGL library loads."""
        require_backend(os.environ["MUJOCO_GL"])
        self._renderer = mujoco.Renderer(model, pixels, pixels)
        # An OpenGL context that outlives the interpreter's modules cannot be freed any more.
        atexit.register(self.close)

    def frames(self, data: mujoco.MjData, names: Iterable[str]) -> dict[str, NDArray[np.uint8]]:
        """One RGB frame a camera, uint8, shape (pixels, pixels, 3)."""
        frames: dict[str, NDArray[np.uint8]] = {}
        for name in names:
            self._renderer.update_scene(data, camera=name)
            frames[name] = self._renderer.render().copy()
        return frames

    def close(self) -> None:
        """Frees the OpenGL context."""
        atexit.unregister(self.close)
        self._renderer.close()
