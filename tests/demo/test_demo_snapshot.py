"""`taktline-demo snapshot` gives a newcomer frames, and a command that can be pasted."""

from __future__ import annotations

import shlex
import sys

import pytest
from taktline_demo.cli import app, main
from taktline_demo.jpeg import decode_jpeg
from taktline_protocol import TaktlineError
from typer.testing import CliRunner


def test_snapshot_writes_both_frames_and_a_command_with_as_many_joints(tmp_path):
    result = CliRunner().invoke(app, ["snapshot", "--out", str(tmp_path), "--seed", "3"])
    assert result.exit_code == 0, result.output
    words = shlex.split(result.output)
    assert words[:4] == ["taktline", "act", "--policy", "demo-reach"]
    for camera in ("scene", "wrist"):
        assert f"{camera}={tmp_path / camera}.jpg" in words
        assert decode_jpeg((tmp_path / f"{camera}.jpg").read_bytes()).std() > 1
    state = next(word for word in words if word.startswith("--state="))
    assert len(state.split(",")) == 4


def test_snapshot_says_where_it_may_not_write(tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["snapshot", "--out", str(tmp_path / "file")])
    assert isinstance(result.exception, TaktlineError)
    assert "--out" in result.exception.next_step


def test_what_cannot_be_written_when_all_is_done_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["taktline-demo", "record", "--episodes", "1", "--out", str(tmp_path / "no" / "x.npz")]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "config_invalid: " in (said := capsys.readouterr().err.splitlines()[-1])
    assert "x.npz cannot be used: No such file or directory" in said
