"""A client that could not be installed is skipped at a desk and fails in CI: nothing passes there untried."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from . import conftest


@pytest.mark.parametrize(
    ("where", "said", "outcome"),
    [
        ("", "error: dns error", pytest.skip.Exception),
        ("true", "error: dns error", pytest.fail.Exception),
        ("", "error: no version of openpi-client==9", pytest.fail.Exception),
    ],
)
def test_a_client_that_cannot_be_installed(monkeypatch, tmp_path, where, said, outcome):
    monkeypatch.setenv("CI", where)
    monkeypatch.setattr(conftest, "CACHE", tmp_path)
    failed = SimpleNamespace(stdout="uv", stderr=said, returncode=1)
    monkeypatch.setattr(conftest.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(outcome):
        conftest.client_environment("any", "openpi-client==9")
