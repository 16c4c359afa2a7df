"""`taktline model` as a person uses it."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from taktline_worker.delivery import command
from taktline_worker.delivery.remote import RETRIES

from tests.delivery.conftest import content


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command sends the process's log to its stderr, which ends with the test: others are not to log there."""
    root, quiet, retries = (logging.getLogger(name) for name in ("", "httpx", RETRIES))
    handlers, levels = list(root.handlers), (root.level, quiet.level, retries.level)
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
    root.setLevel(levels[0])
    quiet.setLevel(levels[1])
    retries.setLevel(levels[2])


@pytest.fixture
def cached(mirror, tmp_path, capfd) -> tuple[str, Path]:
    """The `--cache` option, and a fetched folder."""
    sha256 = mirror.put("m", {"model.safetensors": content(5000)})
    option = f"--cache={tmp_path / 'cache'}"
    assert command.main(["fetch", option, f"--url={mirror.url}/m", f"--sha256={sha256}"]) == 0
    return option, Path(capfd.readouterr().out.strip())


def test_fetch_prints_the_folder_and_list_knows_it(cached, mirror, capfd):
    option, folder = cached
    assert (folder / "model.safetensors").read_bytes() == content(5000)
    assert command.main(["list", option, "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert (row["key"], row["in_use"], row["source"]) == (folder.name, False, f"{mirror.url}/m")
    assert command.main(["list", option]) == 0
    assert folder.name in capfd.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_a_person_reads_of_each_retry_once_and_a_log_has_its_line(mirror, tmp_path, capfd, monkeypatch, terminal):
    sha256 = mirror.put("m", {"model.safetensors": content(5000)})
    left = iter([503])
    mirror.fault = lambda asked: {"status": status} if (status := next(left, None)) else None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert command.main(["fetch", f"--cache={tmp_path / 'cache'}", f"--url={mirror.url}/m", f"--sha256={sha256}"]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert sum("; trying again: " in line and "503" in line for line in lines) == 1
    assert sum('"message":"will be tried again"' in line for line in lines) == (0 if terminal else 1)


def test_verify_finds_a_changed_byte(cached, capfd):
    option, folder = cached
    assert command.main(["verify", option]) == 0
    path = folder / "model.safetensors"
    path.chmod(0o644)
    path.write_bytes(b"!" + path.read_bytes()[1:])
    assert command.main(["verify", option, folder.name]) == 1
    assert "model.safetensors has sha256" in capfd.readouterr().out


def test_prune_takes_a_size_as_people_write_it(cached, capfd):
    option, folder = cached
    assert command.main(["prune", option, "--limit=1.5G", "--min-age-s=0"]) == 0
    assert folder.exists()
    assert command.main(["prune", option, "--limit=1k", "--min-age-s=0"]) == 0
    assert not folder.exists()
    assert "5.0 kB freed" in capfd.readouterr().out


def test_prune_says_why_it_kept_what_it_could_have_taken(cached, capfd):
    option, folder = cached
    assert command.main(["prune", option, "--limit=0"]) == 0
    assert folder.exists()
    said = capfd.readouterr().out
    assert f"kept {folder.name}: it was asked for " in said
    assert "--min-age-s 3600" in said


def test_a_dry_run_logs_no_removal(cached, caplog):
    option, folder = cached
    caplog.set_level("INFO")
    assert command.main(["prune", option, "--limit=0", "--min-age-s=0", "--dry-run"]) == 0
    assert folder.exists()
    assert "checkpoint removed" not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "exactly one of"),
        (["--url=http://x", "--s3=s3://b"], "exactly one of"),
        (["--hub=org/reach@main"], "40 hex digits"),
        (["--s3=b/x"], "s3://BUCKET/PREFIX"),
        (["--url=http://x", "--sha256=12"], "64 lower-case hex digits"),
        (["--url=ftp://x/y"], "http or https"),
        (["--url=http://x", "--cache-limit=many"], "a number with"),
        (["--url=http://127.0.0.1:9", "--status-listen=nowhere"], "HOST:PORT"),
    ],
)
def test_a_wrong_command_line_says_what_is_meant(tmp_path, capfd, arguments, said):
    assert command.main(["fetch", f"--cache={tmp_path}", "--deadline-s=1", *arguments]) == 2
    assert said in capfd.readouterr().err.splitlines()[-1]


def test_a_cache_that_cannot_be_written_says_how_to_make_one(tmp_path, capfd):
    (tmp_path / "file").touch()
    assert command.main(["list", f"--cache={tmp_path / 'file'}"]) == 2
    assert "install -d -o 10001" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["list"], ["verify"], ["prune", "--limit=1G"]])
def test_a_folder_that_is_no_cache_is_refused_and_left_as_it_is(tmp_path, capfd, arguments):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    for folder in (tmp_path / "absent", tmp_path / "other"):
        assert command.main([*arguments, f"--cache={folder}"]) == 2
        assert f"{folder} is no model cache (name it with --cache" in capfd.readouterr().err
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["other", "notes.txt"]


def test_an_empty_cache_is_said_to_be_empty(tmp_path, capfd):
    assert command.main(["verify", f"--cache={tmp_path}"]) == 0
    assert "there is no checkpoint in" in capfd.readouterr().out


def test_fetching_loads_no_torch():
    script = "import sys; from taktline_worker.delivery import command, fetch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_fetch_behind_a_verify_brings_what_differs_anew(cached, mirror, capfd):
    """The folder's file and the cache's own are one: put together from that, the next folder was as wrong."""
    option, folder = cached
    path = folder / "model.safetensors"
    path.chmod(0o644)
    with path.open("r+b") as stream:
        stream.write(b"!")
    assert command.main(["verify", option]) == 1
    shutil.rmtree(folder)  # what it says
    sha256 = hashlib.sha256(mirror.files["/m/SHA256SUMS"]).hexdigest()
    assert command.main(["fetch", option, f"--url={mirror.url}/m", f"--sha256={sha256}"]) == 0
    assert len(mirror.gets("/m/model.safetensors")) == 2
    assert command.main(["verify", option]) == 0
