"""Controllers of other products leave nothing behind, whatever fails while they are taken away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from taktline_local.controllers import Controller, Object
from taktline_local.kubectl import Kubectl
from taktline_protocol.errors import ErrorCode, TaktlineError


class Refusing(Kubectl):
    """A kubectl whose every deletion fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str, **named: Any) -> str:
        self.calls.append(arguments)
        if arguments[0] == "delete":
            raise TaktlineError(ErrorCode.CONFIG_INVALID, f"no answer to {arguments[1]}", "try again")
        return ""


class Process:
    """Something that was started; it may refuse to end."""

    def __init__(self, *, fails: bool = False) -> None:
        self.stopped, self._fails = False, fails

    def stop_blocking(self, grace_s: float) -> None:
        self.stopped = True
        if self._fails:
            raise OSError("it does not end")


class Product(Controller):
    name = "product"

    def __init__(self, kubectl: Kubectl, folder: Path, *processes: Process) -> None:
        super().__init__(folder, kubectl, folder)
        self._processes = processes

    def before(self) -> list[Object]:
        return [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "product"}}]

    def after(self) -> list[Object]:
        version = "admissionregistration.k8s.io/v1"
        return [{"apiVersion": version, "kind": "ValidatingWebhookConfiguration", "metadata": {"name": "product"}}]

    def start(self) -> list[int]:
        self._children += self._processes  # type: ignore[arg-type]
        return []


def test_processes_end_though_nothing_can_be_deleted(tmp_path: Path) -> None:
    kubectl, processes = Refusing(), (Process(fails=True), Process())
    with pytest.raises((TaktlineError, OSError)), Product(kubectl, tmp_path, *processes):
        pass
    deleted = [call[1] for call in kubectl.calls if call[0] == "delete"]
    assert deleted == ["validatingwebhookconfigurations.admissionregistration.k8s.io/product", "namespaces/product"]
    assert [process.stopped for process in processes] == [True, True]
