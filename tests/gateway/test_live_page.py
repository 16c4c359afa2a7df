"""The live page in a real browser: what a person sees of policies, workers, margins, misses and a dead gateway."""

from __future__ import annotations

import json
import signal
import threading
import time

import msgspec
import pytest
from taktline_gateway.access.access_file import AccessFile, Key, Tenant
from taktline_gateway.access.keys import new_key

from tests.gateway.browser import DESKTOP, PHONE, browser
from tests.gateway.conftest import Stack, until

STRANGE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page():
    with browser() as made:
        yield made


@pytest.fixture(autouse=True)
def no_complaints(page):
    page.problems.clear()
    yield
    assert page.problems == []


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A gateway with a robot that asks all the time, now and then too late."""
    stack = Stack(tmp_path_factory.mktemp("busy"))
    stack.write_routes(stack.start_worker(), control_budget_ms=150)
    stack.start_gateway()
    stack.wait_workers(1)
    stop = threading.Event()

    def robot() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            late = number % 5 == 0
            now = time.monotonic()
            stack.act(
                robot="arm-1",
                captured_at=now,
                sent_at=now,
                budget_ms=100.0 if late else 1000.0,
                instruction="slow 150" if late else "go",
            )
            stop.wait(0.05)

    thread = threading.Thread(target=robot)
    thread.start()
    yield stack
    stop.set()
    thread.join()
    stack.stop()


def routes(stack: Stack, *names: str) -> None:
    given = [{"policy": name, "targets": [], "max_batch": 8, "max_wait_ms": 0} for name in names]
    stack.routes.write_text(json.dumps({"routes": given}))


def drawn(page, canvas: str, colour: str) -> int:
    """Pixels of a canvas that have a colour of the style sheet."""
    return page.value(
        f"""(() => {{
          const canvas = document.getElementById("{canvas}"), probe = document.createElement("canvas").getContext("2d");
          probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--{colour}").trim();
          probe.fillRect(0, 0, 1, 1);
          const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          let count = 0;
          for (let i = 0; i < data.length; i += 4) {{
            const away = Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b);
            if (data[i + 3] > 80 && away < 12) count++;
          }}
          return count;
        }})()"""
    )


def test_a_page_that_is_opened_later_shows_what_happened(page, bare_stack):
    bare_stack.write_routes(bare_stack.start_worker())
    bare_stack.start_gateway()
    bare_stack.wait_workers(1)
    assert bare_stack.act()[0] == 200
    assert bare_stack.act(budget_ms=1.0)[0] == 503
    page.open(bare_stack.url)
    page.until("document.getElementById('tiles').innerText.includes('50%')", "one answer and one refusal")
    page.until("document.getElementById('causes').innerText.includes('1 · 1')", "the refusal of the last minute")
    until(lambda: drawn(page, "margins", "good") > 0, "the answer's dot")


def test_what_a_person_sees_of_a_policy_that_works(page, busy):
    page.open(busy.url)
    page.until("document.getElementById('workers').innerText.includes('127.0.0.1')", "the worker being shown")
    assert page.text("#name") == "scripted"
    assert page.text("#ready") == "ready"
    assert "revision r1" in page.text("#about")
    assert "control budget 150 ms" in page.text("#about")
    assert page.text("#link") == "live"
    assert page.value("document.getElementById('timeline').getAttribute('href')") == "/v1/policies/scripted/timeline"
    page.until("/\\d%/.test(document.getElementById('tiles').innerText)", "the share of answers in time")
    assert "T(1)" in page.text("#times")


def test_margins_and_cycles_are_drawn_as_they_come(page, busy):
    page.open(busy.url)
    page.until("document.getElementById('causes').innerText.includes('inference')", "the page being filled")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        points = [
            drawn(page, "margins", "good"),
            drawn(page, "margins", "inference"),
            drawn(page, "roofline", "accent"),
        ]
        if all(count > 5 for count in points):
            break
        time.sleep(0.2)
    assert all(count > 5 for count in points), points
    assert drawn(page, "queue", "accent") > 0


def test_misses_are_counted_by_their_cause(page, busy):
    page.open(busy.url)
    page.until(
        "[...document.querySelectorAll('#causes b')].some((n) => parseInt(n.innerText) > 0)", "a miss being counted"
    )
    shown = page.text("#causes").split("\n")
    assert [name for name in shown if name.isalpha()] == ["inference", "queue", "transfer", "refused"]


def test_the_queues_axis_has_numbers_whatever_waits(page, busy):
    page.open(busy.url)
    for most in (0, 1, 3, 5, 9, 46, 99, 1234):
        words = page.value(
            f"""import("/live/charts.js").then((charts) => {{
              const words = [], drawing = CanvasRenderingContext2D.prototype, write = drawing.fillText;
              drawing.fillText = (text) => words.push(text);
              const history = {{ counts: [{{ t: 0, depth: {most}, inFlight: 1 }}] }};
              charts.drawQueue(document.createElement("canvas"), history, 0);
              drawing.fillText = write;
              return words;
            }})"""
        )
        numbers = sorted(float(word) for word in words if word.replace(".", "").isdigit())
        assert len(numbers) >= 2, f"{most} waiting: {words}"
        assert numbers[-1] >= most, "the line ends below the last number"


def test_margins_are_those_of_all_answers_though_late_ones_are_told_first(page, busy):
    """Of 1000 answers in half a second, a fifth of them late, 64 are told, half of these late."""
    page.open(busy.url)
    told = json.dumps([[10.0, ""]] * 32 + [[-5.0, "queue"]] * 32)
    quantiles = page.value(
        f"""import("/live/history.js").then(({{ History }}) => {{
          const none = {{ inference: 0, queue: 0, transfer: 0, refused: 0 }};
          const policy = (ok, queue, margins) =>
            ({{ codes: {{ ok }}, misses: {{ ...none, queue }}, margins, cycles: [] }});
          const opened = new History(), watched = new History(), few = new History();
          const margins = {told}.map((point) => [100, ...point]);
          const past = {{ age_ms: 30000, ok: 0, misses: none, margins, cycles: [] }};
          opened.add(policy(1000, 200, []), 60000, 500, past);
          watched.add(policy(0, 0, []), 60000, 500);
          watched.add(policy(1000, 200, {told}), 60500, 500);
          few.add(policy(0, 0, []), 60000, 500);
          few.add(policy(4, 1, [[1, ""], [2, ""], [3, ""], [-4, "queue"]]), 60500, 500);
          return [opened, watched].map((one) => [0.1, 0.19, 0.21, 0.5].map((share) => one.marginQuantile(share)))
            .concat([[0, 0.25, 0.5, 0.99].map((share) => few.marginQuantile(share))]);
        }})"""
    )
    assert quantiles == [[-5.0, -5.0, 10.0, 10.0], [-5.0, -5.0, 10.0, 10.0], [-4.0, 1.0, 2.0, 3.0]]


@pytest.mark.parametrize("screen", [DESKTOP, PHONE, (320, 640, 2.0, True)])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_is_readable_on_every_screen(page, busy, screen, dark):
    page.open(busy.url, screen=screen, dark=dark)
    page.until("document.getElementById('workers').innerText.includes('127.0.0.1')", "the worker being shown")
    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out to the side"
    ground = page.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    ink = page.value("getComputedStyle(document.body).color.match(/\\d+/g).map(Number)")
    assert (sum(ground) < sum(ink)) is dark
    assert page.value(
        "[...document.querySelectorAll('body *')].every((n) => parseFloat(getComputedStyle(n).fontSize) >= 12)"
    )


def test_light_and_dark_can_be_chosen_and_are_remembered(page, busy):
    page.open(busy.url)
    page.until("document.getElementById('name').innerText === 'scripted'", "the page being filled")
    before = page.value("getComputedStyle(document.body).backgroundColor")
    page.value("document.getElementById('theme').click()")
    chosen = page.value("getComputedStyle(document.body).backgroundColor")
    assert chosen != before
    page.open(busy.url)
    page.until("document.getElementById('name')?.innerText === 'scripted'", "the page being filled")
    assert page.value("getComputedStyle(document.body).backgroundColor") == chosen
    page.value("localStorage.clear()")


def test_a_gateway_that_dies_is_said_to_be_dead_and_one_that_comes_back_goes_on(page, bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    page.open(stack.url)
    page.until("document.getElementById('link').innerText === 'live'", "the page being live")
    page.until("document.getElementById('workers').innerText.includes('127.0.0.1')", "the worker being shown")
    stack.gateway.kill()
    stack.gateway.wait()
    page.until("document.getElementById('link').innerText === 'no connection'", "the page noticing")
    assert "The gateway does not answer" in page.text("#banner")
    assert "What is shown is from" in page.text("#banner")
    assert "127.0.0.1" in page.text("#workers"), "what was known stays"
    stack.start_gateway(port=int(stack.url.rsplit(":", 1)[1]))
    page.until("document.getElementById('link').innerText === 'live'", "the page going on")
    assert page.text("#banner") == ""


def test_a_gateway_that_shuts_down_is_said_to_and_not_to_be_broken(page, bare_stack):
    bare_stack.write_routes(bare_stack.start_worker())
    bare_stack.start_gateway("--drain-settle-s", "4")
    page.open(bare_stack.url)
    page.until("document.getElementById('link').innerText === 'live'", "the page being live")
    bare_stack.gateway.send_signal(signal.SIGTERM)
    banner = "document.getElementById('banner').innerText"
    seen = set()
    page.until(f"{banner}", "the page saying something")
    while "does not answer" not in (said := page.value(banner)):
        seen.add(said.split(" What is shown")[0])
        time.sleep(0.05)
    assert seen == {"This gateway is shutting down: it finishes what it has and takes nothing new."}


def test_no_policy_many_policies_and_strange_names(page, bare_stack):
    stack = bare_stack
    routes(stack)
    stack.start_gateway()
    page.open(stack.url)
    page.until("document.getElementById('empty').innerText", "the page saying that there is none")
    assert "No policy is served here" in page.text("#empty")
    assert "kubectl apply" in page.text("#empty")
    names = [f"policy-{number:02}" for number in range(40)]
    routes(stack, *names, STRANGE)
    page.until("document.querySelectorAll('#rows tr').length === 41", "the policies appearing by themselves")
    assert page.text("#empty") == ""
    assert page.text("#overview-title") == "41 policies"
    page.value("document.querySelector('[data-policy=\"policy-07\"]').click()")
    assert page.text("#name") == "policy-07"
    assert page.text("#ready") == "no worker"
    assert "No worker is routed" in page.text("#workers")
    assert page.text("#refusals") == "No request since start."
    field = "document.getElementById('filter')"
    page.value(f"{field}.value = '3'; {field}.dispatchEvent(new Event('input'))")
    assert page.value("document.querySelectorAll('#rows tr').length") == 13
    page.value(f"{field}.value = ''")
    routes(stack, STRANGE)
    page.until(f"document.getElementById('name').innerText === {json.dumps(STRANGE)}", "the name as text")
    assert page.value("document.querySelectorAll('main img').length") == 0
    assert page.value("document.documentElement.scrollWidth <= innerWidth")


def test_it_works_with_a_key_and_shows_no_more_than_the_key_may_see(page, bare_stack, tmp_path):
    stack = bare_stack
    key, stored = new_key("viewer")
    access = tmp_path / "access.json"
    file = AccessFile(
        tenants=(Tenant(name="ops"),),
        keys=(Key(id="viewer", tenant="ops", hash=stored, rights=("observe",), policies=("pick-*",)),),
    )
    access.write_bytes(msgspec.json.encode(file))
    routes(stack, "pick-1", "pick-2", "place-1")
    stack.start_gateway("--access-file", str(access))
    page.open(stack.url.replace("//", f"//me:{key}@"))
    page.until("document.querySelectorAll('#rows tr').length", "the policies being shown")
    assert page.value("[...document.querySelectorAll('#rows tr')].map((r) => r.dataset.policy)") == ["pick-1", "pick-2"]
    access.write_bytes(msgspec.json.encode(AccessFile(tenants=file.tenants)))
    page.until("document.getElementById('banner').innerText.includes('unauthenticated')", "the page saying why it ends")
    assert "send a valid key" in page.text("#banner")
