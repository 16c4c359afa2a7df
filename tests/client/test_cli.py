"""The `taktline` command as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from taktline import robot
from taktline.cli import build
from taktline_gateway.openapi import grey_png
from taktline_protocol import PolicyInfo
from taktline_protocol.messages import PolicyList
from typer.testing import CliRunner

HEAVY = ("torch", "numpy", "httpx", "taktline_worker", "taktline_local")
TAKTLINE = str(Path(sys.executable).parent / "taktline")


def taktline(*arguments, url="", **environment):
    return subprocess.run(
        [TAKTLINE, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TAKTLINE_URL": url, "COLUMNS": "200", **environment},
    )


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "frame.png"
    path.write_bytes(grey_png(16))
    return path


def act(stack, picture, *more):
    cameras = [part for name in ("front", "wrist") for part in ("--camera", f"{name}={picture}")]
    return taktline(
        "act", "--policy", "scripted", "--instruction", "go", "--state", "0,0,0,0,0,0", *cameras, *more, url=stack.url
    )


def test_help_lists_every_command_and_loads_none():
    done = taktline("--help")
    assert done.returncode == 0
    for name in ("act", "policies", "bench-http", "version", "up", "checkpoint"):
        assert f" {name} " in done.stdout
    probe = "\n".join(
        [
            "import sys; sys.argv = ['taktline', '--help']",
            "from taktline.cli import main",
            "try: main()",
            "except SystemExit: pass",
            f"print([name for name in {HEAVY} if name in sys.modules])",
        ]
    )
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert loaded.stdout.strip().endswith("[]")


def test_a_planner_is_profiled_by_two_words_as_well():
    done = taktline("profile", "planner", "--help")
    assert done.returncode == 0, done.stderr
    assert "profile-planner" in done.stdout
    assert "--deadline-ms" in done.stdout


def test_the_version_is_an_option_too():
    assert taktline("--version").stdout.strip() == f"taktline {version('taktline')}"


def test_version():
    done = taktline("version")
    assert done.returncode == 0
    assert "taktline-protocol " in done.stdout


def test_policies(stack):
    done = taktline("policies", url=stack.url)
    assert done.returncode == 0
    assert "scripted: ready, 1 worker, " in done.stdout
    listed = json.loads(taktline("policies", "--json", url=stack.url).stdout)
    assert listed["policies"][0]["policy"] == "scripted"


def test_a_policy_that_no_worker_has_served_yet_has_no_sizes_to_tell(monkeypatch):
    info = PolicyInfo(policy="new", family="pi05", revision="r1", ready=False)
    monkeypatch.setattr(robot, "list_policies", lambda *_: PolicyList(policies=(info,)))
    said = CliRunner().invoke(build("policies"), ["policies"]).stdout
    assert said.startswith("new: not ready; no worker has come up yet")
    assert said.count("\n") == 1


def test_act_prints_a_chunk(stack, picture):
    done = act(stack, picture)
    assert done.returncode == 0, done.stderr
    assert "L_critical" in done.stdout
    assert "10 actions of 6 numbers" in done.stdout
    chunk = json.loads(act(stack, picture, "--json", "--robot-id", "json-arm").stdout)
    assert len(chunk["actions"]) == 10
    assert chunk["timings"]["inference_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--camera", "front=/nowhere.png"], "image_corrupt"),
        ([], "camera_missing"),
    ],
)
def test_errors_are_one_line_with_the_next_step(stack, arguments, code):
    done = taktline(
        "act", "--policy", "scripted", "--instruction", "go", "--state", "0 0 0 0 0 0", *arguments, url=stack.url
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"taktline: {code}: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.rstrip().endswith(")")
    assert not done.stdout


def test_a_gateway_that_is_not_there():
    done = taktline("policies", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("taktline: gateway_unreachable: ")


def test_misuse_exits_with_2(stack):
    assert taktline("act", "--policy", "p", url=stack.url).returncode == 2
    assert taktline("nonsense").returncode == 2
    assert taktline("act", "--policy", "p", "--instruction", "i", "--camera", "nofile", url=stack.url).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--state", "1,b"], "'1,b' is no list of numbers"),
        (["--imagine", "/nowhere/a.mp4"], "there is no folder /nowhere"),
    ],
)
def test_act_says_what_is_wrong_with_an_option_before_it_asks(arguments, said):
    done = taktline("act", "--policy", "p", "--instruction", "go", *arguments, url="http://127.0.0.1:9")
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize("mode", [[], ["--rate", "40"], ["--stream"], ["--stream", "--still", "--rate", "40"]])
def test_bench_http_accounts_for_every_request(stack, tmp_path, mode):
    output = tmp_path / "figures.json"
    before = stack.metric("taktline_requests_total")
    done = taktline(
        "bench-http",
        "--policy",
        "scripted",
        "--clients",
        "3",
        "--duration",
        "1.5",
        "--output",
        str(output),
        *mode,
        url=stack.url,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())
    counted = figures["answered"] + sum(figures["errors"].values())
    assert counted == stack.metric("taktline_requests_total") - before
    assert figures["answered"] > 0
    assert figures["latency_ms"]["p50"] <= figures["latency_ms"]["p99"]
    assert set(figures["terms_ms"]) == {"observe", "transfer", "queue", "inference", "actuate"}
    assert figures["transport"] == ("stream" if "--stream" in mode else "http")
    pixels_kib = 2 * 224 * 224 * 3 / 1024
    if "--still" in mode:  # whole once a robot, and with what a lost connection sends again
        assert figures["cameras_referenced"] > 0.5
        assert figures["kib_per_request"] < 0.5 * pixels_kib
    else:
        assert figures["cameras_referenced"] == 0.0
        assert pixels_kib < figures["kib_per_request"] < pixels_kib + 8
    assert f"robots over {figures['transport']}" in done.stdout


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--image", "image_corrupt: {path} cannot be read: No such file or directory (check the path after --image)"),
        ("--output", "config_invalid: {path} cannot be written: there is no such folder (check the path after"),
    ],
)
def test_bench_http_says_which_file_is_missing_before_it_asks_anybody(tmp_path, option, said):
    path = tmp_path / "absent" / "file"
    done = taktline("bench-http", "--policy", "p", option, str(path), url="http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("taktline: " + said.format(path=path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([TAKTLINE, "version"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("taktline: disk_full: the output cannot be written: No space left on device")
    assert done.stderr.count("\n") == 1


def test_bench_http_over_the_stream_says_why_there_is_none(stack):
    done = taktline("bench-http", "--policy", "nobody", "--stream", url=stack.url)
    assert done.returncode == 1
    assert done.stderr.startswith("taktline: unknown_policy: ")


def test_a_broken_plugin_breaks_only_itself(tmp_path, stack):
    package = tmp_path / "broken-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[taktline.commands]\nbroken = no_such_module:app\n")
    path = {"PYTHONPATH": str(tmp_path)}
    listed = taktline("--help", **path)
    assert "broken" in listed.stdout
    done = taktline("broken", **path)
    assert done.returncode == 1
    assert "no_such_module" in done.stderr
    assert done.stderr.count("\n") == 1
    assert taktline("policies", url=stack.url, **path).returncode == 0
