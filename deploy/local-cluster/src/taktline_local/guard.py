"""Becomes the command it is given, after asking the kernel to kill it when its parent dies.

Run as a script by `child.py`, in the child process: `guard.py PARENT_PID COMMAND...`. It imports nothing of this
package, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Sets the parent-death signal (Linux) and executes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the request took effect
            os._exit(137)
    try:
        os.execvp(command[0], command)  # noqa: S606 (becoming the command is what this script is for)
    except OSError as error:
        print(f"cannot execute {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
