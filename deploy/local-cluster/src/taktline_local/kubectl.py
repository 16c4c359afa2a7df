"""kubectl from Python: commands, objects in and out, and waiting until something holds."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from taktline_protocol.errors import ErrorCode, TaktlineError

Object = dict[str, Any]
Value = TypeVar("Value")

POLL_S = 0.2


class Kubectl:
    """kubectl with one kubeconfig.

    Attributes:
        kubeconfig: the credentials, also for programs that should act as the same user.
    """

    def __init__(self, program: Path, kubeconfig: Path, cache: Path) -> None:
        """`cache` takes kubectl's discovery cache, so that a short-lived cluster leaves nothing in the home folder."""
        self.kubeconfig = kubeconfig
        self._program = program
        self._cache = cache

    def __call__(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl and return its stdout; raises TaktlineError with its stderr when it fails and `check` is set."""
        command = [str(self._program), f"--cache-dir={self._cache}", *arguments]
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        # Its words may hold bytes that are no text, of an answer that it could not read: they are shown, not choked on.
        reply = subprocess.run(
            command,
            env=environment,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",
            check=False,
        )
        if check and reply.returncode != 0:
            raise TaktlineError(
                ErrorCode.INTERNAL,
                f"kubectl {' '.join(arguments)} failed: {reply.stderr.strip()}",
                f"try it by hand with KUBECONFIG={self.kubeconfig}",
            )
        return reply.stdout

    def apply(self, *documents: Object, namespace: str | None = None) -> str:
        """`kubectl apply` of objects; returns what it says."""
        where = ["-n", namespace] if namespace else []
        body = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        return self("apply", *where, "-f", "-", stdin=json.dumps(body))

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """One object, None where there is none."""
        where = ["-n", namespace] if namespace else []
        reply = self("get", kind, name, *where, "-o", "json", "--ignore-not-found")
        found: Object | None = json.loads(reply) if reply.strip() else None
        return found

    def list(self, kind: str, namespace: str | None = None, selector: str = "") -> list[Object]:
        """All objects of a kind in the namespace (or everywhere) that match the label selector."""
        where = ["-n", namespace] if namespace else ["--all-namespaces"]
        found: list[Object] = json.loads(self("get", kind, *where, "-l", selector, "-o", "json"))["items"]
        return found


def wait_until(
    look: Callable[[], Value | None],
    what: str,
    *,
    timeout_s: float = 120.0,
    why: Callable[[], str] = str,
    next_step: str = "read the logs of this run",
) -> Value:
    """Call `look` until it returns something true, and return that.

    Args:
        why: asked at the end of the time: what seems to stand in the way, empty where that is not known.

    Raises:
        TaktlineError: nothing came of it in `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            try:
                cause = why()
            except TaktlineError as error:  # the API server does not answer: what was waited for stays what is told
                cause = f"what stands in the way is not known ({error.message})"
            said = f"waited {timeout_s:.0f} s in vain until {what}" + (f": {cause}" if cause else "")
            raise TaktlineError(ErrorCode.INTERNAL, said, next_step)
        time.sleep(POLL_S)
