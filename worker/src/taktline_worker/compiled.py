"""C files of the worker, compiled when it starts, by the compiler that Triton needs, too."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_LIMIT_S = 60.0
_FLAGS = ("-O3", "-std=gnu11", "-fwrapv", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w")


@contextmanager
def library_of(source: Path) -> Iterator[Path]:
    """The library of one C file, there for as long as it is being loaded.

    Raises:
        OSError: it cannot be made, or lacks what is looked for in it.
    """
    path = _compiled(source)
    try:
        yield path
    except AttributeError as error:
        raise OSError(f"the C compiler's library is another one: {error}") from error
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


def _compiled(source: Path) -> Path:
    """The library, alone in a folder."""
    compiler = _compiler()
    folder = Path(tempfile.mkdtemp(prefix="taktline-c-"))
    said = ""
    for tuned in (["-march=native"], []):  # not every compiler knows what it runs on
        command = [*compiler, *_FLAGS, *tuned, "-o", str(folder / "library.so"), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            said = "it does not end"
            break
        except OSError as error:
            said = str(error)
            break
        if done.returncode == 0:
            return folder / "library.so"
        said = done.stderr.decode(errors="replace")[-300:]
    shutil.rmtree(folder, ignore_errors=True)
    raise OSError(f"{shlex.join(compiler)} fails on {source.name}: {said}")


def _compiler() -> list[str]:
    """The command that CC is, split as a shell does; where that is not there, which is logged, the usual ones."""
    named = os.environ.get("CC", "")
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise OSError(f"CC is {named!r}, which is no command: {error}") from error
    usual = [["cc"], ["gcc"], ["clang"]]
    found = next((one for one in ([words] if words else []) + usual if shutil.which(one[0])), None)
    if found is None:
        raise OSError(f"there is no C compiler: {', '.join([named] * bool(words) + ['cc, gcc, clang'])}")
    if words and found is not words:
        logger.warning("CC is %r, which is not there; C files are compiled by %s", named, found[0])
    return found
