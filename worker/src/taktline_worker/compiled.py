"""C files of the worker, compiled when it starts, by the compiler that Triton needs, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    named = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, (named,) if named else ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise OSError(f"there is no C compiler{f' {named!r}' if named else ''}")
    folder = Path(tempfile.mkdtemp(prefix="taktline-c-"))
    said = ""
    for tuned in (["-march=native"], []):  # not every compiler knows what it runs on
        command = [compiler, *_FLAGS, *tuned, "-o", str(folder / "library.so"), str(source)]
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
    raise OSError(f"{compiler} fails on {source.name}: {said}")
