"""`taktline-demo snapshot` gives a newcomer frames, and a command that can be pasted."""

from __future__ import annotations

import shlex

from taktline_demo.cli import app
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
