"""Log lines: one form for all services, never bytes or secrets, and no value that loses the line."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from taktline_protocol.logs import ITEMS, REDACTED, RESERVED, TEXT_CHARACTERS, JsonFormatter, log

KEY = "tkl_line-3_" + "Ab3_-" * 8 + "xyz"
JWT = "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJyb2JvdCJ9.c2lnbmF0dXJlLXNpZ25hdHVyZQ"


class Lines(logging.Handler):
    def __init__(self, **options) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter("gateway", **options))
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    @property
    def last(self) -> dict:
        text = self.texts[-1]
        assert "\n" not in text
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def logger_into(lines: Lines) -> logging.Logger:
    made = logging.Logger("taktline_gateway.act", logging.DEBUG)
    made.addHandler(lines)
    return made


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def logger(lines) -> logging.Logger:
    return logger_into(lines)


def test_the_fields_of_a_line(logger, lines):
    log(logger, logging.INFO, "deadline_missed", policy="reach", robot="arm-1", request_id="q1", cause="queue", seq=7)
    line = lines.last
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "service": "gateway",
        "logger": "taktline_gateway.act",
        "message": "deadline_missed",
        "policy": "reach",
        "robot": "arm-1",
        "request_id": "q1",
        "cause": "queue",
        "seq": 7,
    }


def test_the_two_ways_to_give_fields_write_the_same_line(logger, lines):
    log(logger, logging.WARNING, "worker_down", worker="10.0.0.1:50051", reason="UNAVAILABLE")
    logger.warning("worker_down", extra={"worker": "10.0.0.1:50051", "reason": "UNAVAILABLE"})
    first, second = (json.loads(text) for text in lines.texts)
    del first["time"], second["time"]
    assert first == second


def test_a_traceback_stays_in_its_line(logger, lines):
    try:
        raise RuntimeError("the engine failed")
    except RuntimeError:
        log(logger, logging.ERROR, "internal", exc_info=True)
    assert lines.last["traceback"].startswith("Traceback")
    assert lines.last["traceback"].endswith("RuntimeError: the engine failed")
    log(logger, logging.ERROR, "nothing was raised", exc_info=True)
    assert "traceback" not in lines.last


@pytest.mark.parametrize("value", [b"\xff\xd8" * 500, bytearray(1000), memoryview(bytes(1000))])
def test_bytes_become_their_number(logger, lines, value):
    log(logger, logging.INFO, "x", image=value, nested={"images": [value]})
    assert lines.last["image"] == "[1000 bytes]"
    assert lines.last["nested"] == {"images": ["[1000 bytes]"]}


def test_an_array_becomes_its_shape(logger, lines):
    log(logger, logging.INFO, "x", frame=np.zeros((224, 224, 3), np.uint8))
    assert lines.last["frame"] == "[array uint8[224, 224, 3]]"


@pytest.mark.parametrize(
    "name", ["authorization", "api_key", "token", "access_token", "Password", "client_secret", "cookie", "resume_token"]
)
def test_secrets_are_known_by_their_names(logger, lines, name):
    log(logger, logging.INFO, "x", **{name: "hunter2"}, headers={name: "hunter2"})
    assert lines.last[name] == REDACTED
    assert "hunter2" not in lines.texts[-1]


@pytest.mark.parametrize("kind", ["key", "token", "anonymous"])
def test_how_a_caller_is_known_is_shown_and_a_credential_is_not(logger, lines, kind):
    log(logger, logging.INFO, "access_decision", credential=kind, credentials=kind)
    assert (lines.last["credential"], lines.last["credentials"]) == (kind, REDACTED)
    log(logger, logging.INFO, "access_decision", credential="hunter2")
    assert lines.last["credential"] == REDACTED


@pytest.mark.parametrize("name", ["prompt_tokens", "key", "tokens", "keys_added"])
def test_names_that_only_look_like_secrets_are_shown(logger, lines, name):
    log(logger, logging.INFO, "x", **{name: 48})
    assert lines.last[name] == 48


@pytest.mark.parametrize(
    ("text", "secret", "left"),
    [
        (f"refused {KEY} from 10.0.0.1", KEY[12:], "refused tkl_line-3_[redacted] from 10.0.0.1"),
        (f"Authorization: Bearer {JWT}", JWT, f"Authorization: Bearer {REDACTED}"),
        (f"token {JWT} is over", JWT, f"token {REDACTED} is over"),
        ("GET /v1/policies?api_key=abc123&x=1", "abc123", f"GET /v1/policies?api_key={REDACTED}&x=1"),
    ],
)
def test_secrets_are_known_by_their_form(logger, lines, text, secret, left):
    log(logger, logging.INFO, text, reason=text, seen=[text])
    assert secret not in lines.texts[-1]
    line = lines.last
    assert (line["message"], line["reason"], line["seen"]) == (left, left, [left])


def test_of_a_long_traceback_the_end_is_kept(logger, lines):
    def deep(levels: int) -> None:
        if not levels:
            raise RuntimeError("the reason" + "!" * 5000)
        deep(levels - 1) if levels % 2 else deeper(levels)

    def deeper(levels: int) -> None:
        deep(levels - 1)

    try:
        deep(200)
    except RuntimeError:
        log(logger, logging.ERROR, "internal", exc_info=True)
    told = lines.last["traceback"]
    assert "the reason!" in told
    assert len(told) < 13_000
    assert told.startswith("(")


def test_a_secret_in_a_traceback_is_blotted_out(logger, lines):
    try:
        raise ValueError(f"bad header: Bearer {JWT}")
    except ValueError:
        log(logger, logging.ERROR, "internal", exc_info=True)
    assert JWT not in lines.texts[-1]


def test_a_line_stays_a_line(logger, lines):
    log(logger, logging.INFO, "first\nsecond", reason="x" * 100_000, members=[f"arm-{i}" for i in range(5000)])
    assert len(lines.texts[-1]) < 3 * TEXT_CHARACTERS + 100 * ITEMS
    assert lines.last["message"] == "first\nsecond"


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_field_cannot_take_the_place_of_the_lines_own(logger, lines, name):
    log(logger, logging.INFO, "said", **{name: "other"})
    line = lines.last
    assert line[f"{name}_"] == "other"
    assert (line["message"], line["level"], line["service"]) == ("said", "info", "gateway")


class NoText:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**70, -(2**70), "\udcff", NoText(), {1: {2: NoText()}}])
def test_no_value_loses_the_line(logger, lines, value):
    log(logger, logging.INFO, "x", value=value)
    assert "value" in lines.last


def test_a_message_that_does_not_fit_its_arguments_is_still_written(logger, lines):
    logger.info("%d robots", "many")
    assert "robots" in lines.last["message"]


def test_context_and_hidden_fields():
    lines = Lines(context=lambda: {"trace_id": "ab" * 16}, hidden=("k8s",))
    logger_into(lines).info("x", extra={"k8s_ref": {"name": "reach"}, "policy": "reach"})
    assert lines.last["trace_id"] == "ab" * 16
    assert lines.last["policy"] == "reach"
    assert "k8s_ref" not in lines.last


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=10,
)


@given(st.text(), st.dictionaries(st.text(min_size=1), _values, max_size=4))
def test_whatever_is_logged_becomes_one_line_of_json(message, fields):
    lines = Lines()
    log(logger_into(lines), logging.INFO, message, given=fields)
    assert lines.last["level"] == "info"


@pytest.mark.parametrize(
    ("service", "configure"),
    [
        ("gateway", "from taktline_gateway.logs import configure; configure('info')"),
        ("worker", "from taktline_worker.logs import configure; configure()"),
        ("operator", "from taktline_operator.logs import configure; configure()"),
        ("local", "from taktline_local.logs import log_to_stderr; log_to_stderr()"),
    ],
)
def test_every_service_writes_this_form_and_nothing_else(service, configure):
    code = f"{configure}; import logging; logging.getLogger('a').error('said', extra={{'policy': 'reach'}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    (line,) = [json.loads(text) for text in done.stderr.splitlines()]
    assert (line["service"], line["message"], line["level"], line["policy"]) == (service, "said", "error", "reach")
    assert list(line)[:5] == ["time", "level", "service", "logger", "message"]


def test_a_closed_stderr_ends_no_thread_that_logs():
    script = (
        "import logging, sys\n"
        "from taktline_protocol.logs import configure\n"
        "configure('test')\n"
        "sys.stderr.close()\n"
        "logging.getLogger('a').error('nobody hears it')\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "went on\n"
    # Closed before it began, as a daemon's may be: Python has no stream for it then.
    never = script.replace("sys.stderr.close()\n", "assert sys.stderr is None\n")
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, never], stdout=subprocess.PIPE, text=True
    )
    assert done.stdout == "went on\n"


READER_STOPS = """
import logging, os, sys, time
from taktline_protocol.logs import configure
configure('test')
said = logging.getLogger('a')
began = time.monotonic()
for number in range(400):
    said.error('line', extra={'number': number, 'reason': 'x' * LENGTH})
print(time.monotonic() - began, flush=True)
sys.stdin.readline()
said.error('heard again')
"""


@pytest.mark.parametrize("length", [300, 3900])
def test_a_reader_of_stderr_that_stops_holds_up_nobody_and_hears_how_much_it_missed(length):
    """A pipe takes 64 KiB; what is more would wait for the reader for ever, and a gateway's robots with it."""
    command = [sys.executable, "-c", READER_STOPS.replace("LENGTH", str(length))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        spent = process.stdout.readline()
        assert float(spent) < 10.0
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(process.stderr))
        reader.start()
        time.sleep(0.2)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.wait(30) == 0
        reader.join(30)
    found = [json.loads(line) for line in lines]
    kept = [line["number"] for line in found if line["message"] == "line"]
    assert kept == list(range(len(kept)))
    assert [line["message"] for line in found[len(kept) :]] == ["log_lines_lost", "heard again"]
    assert found[-2]["lines"] == 400 - len(kept) > 0
    assert found[-2]["level"] == "warning"


def test_a_line_that_was_cut_spoils_no_other():
    command = [sys.executable, "-c", READER_STOPS.replace("'x' * LENGTH", "['y' * 900] * 100").replace("400", "2")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.readline()
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(process.stderr))
        reader.start()
        time.sleep(0.2)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.wait(30) == 0
        reader.join(30)
    with pytest.raises(ValueError, match="char 65536"):
        json.loads(lines[0])
    assert [json.loads(line)["message"] for line in lines[1:]] == ["log_lines_lost", "heard again"]
