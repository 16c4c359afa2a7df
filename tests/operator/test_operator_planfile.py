"""`taktline-operator plan` on files: it says what it made of a relative path, and where a typo is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from taktline_operator import cli
from taktline_operator.planfile import read_policies
from taktline_protocol.errors import ErrorCode, TaktlineError

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "demo-reach.yaml"


def test_a_relative_folder_is_said_with_what_it_became(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "-f", str(EXAMPLE)]) == 0
    told = capsys.readouterr()
    resolved = EXAMPLE.parents[2] / "demo" / "checkpoint"
    assert f"is {resolved}, counted from the folder of the file\n" in told.err
    assert str(resolved) in told.out
    assert json.loads(told.out)["kind"] == "List", "the plan itself is not touched"


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("kind: PolicyDeployment\nspec: {model: {source: {path: nowhere}}}\n")
    said: list[str] = []
    read_policies(file, said.append)
    assert said == [
        f"spec.model.source.path nowhere is {tmp_path / 'nowhere'}, counted from the folder of the file;"
        " there is no such folder on this machine"
    ]


def test_an_absolute_folder_needs_no_word(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("kind: PolicyDeployment\nspec: {model: {source: {path: /models/pi05}}}\n")
    said: list[str] = []
    read_policies(file, said.append)
    assert said == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("kind: [", "line 1, column 8"),
        ("spec:\n  model: {family: pi05\n  pools: []\n", "line 3, column 8"),
        ("a: 1\n b: 2\n", "line 2, column 3"),
        ("a: 1\n\tb: 2\n", "line 2, column 1"),
    ],
)
def test_a_typo_is_shown_with_its_line_and_one_next_step(tmp_path: Path, text: str, where: str) -> None:
    file = tmp_path / "typo.yaml"
    file.write_text(text)
    with pytest.raises(TaktlineError) as caught:
        read_policies(file)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert f"it is no YAML at {where}:" in caught.value.message
    assert caught.value.next_step == "correct that line and try again"
