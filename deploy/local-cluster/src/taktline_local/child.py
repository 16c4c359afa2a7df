"""Child processes: started in their own group, logged to a file, ended whole, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.05


class Child:
    """One running command and the process group it leads.

    The kernel kills the command when the *thread* that started it ends, so start children from a thread that lives as
    long as they should: the main thread or the one that runs the event loop.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start `command`, with stdout and stderr appended to `log`, or shared with us where `log` is None.

        `env` None inherits ours.

        Raises OSError where the folder is missing or no process can be made. A command that cannot be executed shows
        as exit code 127 or 126 with the reason in the log.
        """
        self.command = list(command)
        self.log = log
        with contextlib.ExitStack() as stack:
            output = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=None if env is None else dict(env),
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while the command runs, else its code; death by signal N is 128 + N, as containers report it.

        When the command has ended, whatever it left running in its group is killed.
        """
        if self._process.returncode is None:
            # Looked at without reaping first: until then the group id cannot have been given to a stranger.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self.send(signal.SIGKILL)
            self._process.wait()
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def send(self, number: signal.Signals) -> None:
        """Signal the whole group; nothing happens when it is gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def wait(self) -> int:
        """Exit code, once there is one."""
        # Polled: a waiting thread for every container would need a pool of its own.
        while (code := self.exit_code()) is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return code

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, `grace_s` seconds of patience, SIGKILL; returns the exit code."""
        self.send(signal.SIGTERM)
        try:
            # Not wait_for, which before Python 3.12 may lose a cancellation that comes as the process ends.
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            return await self.wait()

    def stop_blocking(self, grace_s: float) -> int:
        """`stop` for callers without an event loop."""
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while (code := self.exit_code()) is None:
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
            time.sleep(POLL_S)
        return code


def tail(path: Path | None, *, max_bytes: int = 2048, max_lines: int = 80) -> str:
    """The end of a log file; empty where there is none."""
    if path is None:
        return ""
    try:
        with path.open("rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - max_bytes))
            text = handle.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-max_lines:])
