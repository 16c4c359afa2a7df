"""The HTML report and the terminal tables of a scripted run."""

import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console
from taktline_demo.fleet.console import result_table
from taktline_demo.fleet.records import ChunkRecord, CycleRecord, EpisodeRecord, FleetRun, RobotReport
from taktline_demo.fleet.report import render_report, write_report
from taktline_demo.fleet.roofline import overlapped_efficiency, serial_efficiency

from tests.gateway.browser import DESKTOP, PHONE, browser

VOID = {"meta", "img", "br"}


class Checker(HTMLParser):
    """Collects attributes and finds tags that are not closed in order."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def chunk(**changes):
    values = {
        "first": False, "observe_ms": 2.0, "transfer_ms": 4.0, "queue_ms": 6.0, "inference_ms": 80.0, "actuate_ms": 0.0,
        "margin_ms": 700.0, "batch": 2,
    }  # fmt: skip
    return ChunkRecord(**values | changes)


def robot(name, *, misses=0):
    report = RobotReport(name, requests=9, misses=misses, errors={"overloaded": 2}, running_s=4.0)
    report.chunks = [chunk(first=True), *(chunk(margin_ms=100.0 * index, inference_ms=70.0) for index in range(-1, 7))]
    report.cycles = [CycleRecord(True, 6, 600.0, 80.0, 700.0), CycleRecord(False, 6, 600.0, 900.0, 950.0)]
    report.episodes = [
        EpisodeRecord(1, "reach the red block", "red", "red", 14, 2.0),
        EpisodeRecord(2, "reach the blue block", "blue", "red", 20, 2.0),
    ]
    report.picture = b"\xff\xd8picture"
    return report


def fleet(robots):
    return FleetRun("http://gateway:8080", "demo-reach", "r1", 0, 0.1, robots)


@pytest.fixture(scope="module")
def checked():
    document = render_report(fleet([robot("arm-1"), robot("arm-2", misses=3)]))
    checker = Checker()
    checker.feed(document)
    checker.close()
    assert checker.open == []
    return document, checker


def test_it_opens_offline(checked):
    document, checker = checked
    assert document.startswith("<!doctype html>")
    assert not {"script", "link", "iframe"} & set(checker.tags)
    sources = [value for name, value in checker.attributes if name in ("src", "href", "xlink:href")]
    assert sources
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert not re.search(r"@import|url\(", document)


def test_it_is_light_and_dark(checked):
    assert "prefers-color-scheme: dark" in checked[0]


@pytest.mark.parametrize("screen", [DESKTOP, PHONE])
def test_its_figures_can_be_read_on_every_screen_and_the_page_does_not_overflow(tmp_path, screen):
    write_report(tmp_path / "report.html", fleet([robot("arm-1"), robot("arm-2", misses=3)]))
    with browser() as page:
        page.open((tmp_path / "report.html").as_uri(), screen=screen)
        heights = page.value(
            "[...document.querySelectorAll('svg text')].map((text) => text.getBoundingClientRect().height)"
        )
        assert len(heights) > 10
        assert min(heights) > 8, "pixels of a line of text"
        assert page.value("document.documentElement.scrollWidth <= innerWidth")


def test_roofline_has_both_curves_both_regimes_and_every_cycle(checked):
    document, checker = checked
    text = " ".join(checker.text)
    for words in ("inference bound", "environment bound", "Y = min(1, X)", "Y = X / (1 + X)", "L_env / L_inference"):
        assert words in text, words
    assert document.count('<polyline class="roof"') == document.count('<polyline class="serial"') == 1
    roofline = document[document.index('<svg class="roofline"') :]
    roofline = roofline[: roofline.index("</svg>")]
    assert len(re.findall(r'<circle class="first s\d"', roofline)) == 2
    assert len(re.findall(r'<circle class="dot s\d"', roofline)) == 2
    assert len(re.findall(r'<circle class="ring s\d"', roofline)) == 2


def test_the_knee_of_the_roof_is_drawn(checked):
    points = re.search(r'<polyline class="roof" points="([^"]+)"', checked[0])[1].split()
    heights = [float(point.split(",")[1]) for point in points]
    top = min(heights)
    assert heights.count(top) > 50  # flat from the knee on
    assert heights == sorted(heights, reverse=True)


def test_curves_follow_their_definitions():
    assert serial_efficiency(1.0) == 0.5
    assert serial_efficiency(9.0) == pytest.approx(0.9)
    assert overlapped_efficiency(0.25) == 0.25
    assert overlapped_efficiency(4.0) == 1.0
    for ratio in (0.1, 0.5, 1.0, 3.0, 50.0):
        assert serial_efficiency(ratio) < overlapped_efficiency(ratio)


def test_names_are_escaped():
    document = render_report(fleet([robot("<b>arm</b> & co")]))
    assert "<b>arm</b>" not in document
    assert "&lt;b&gt;arm&lt;/b&gt; &amp; co" in document


def test_a_run_without_chunks_still_renders(tmp_path):
    write_report(tmp_path / "report.html", fleet([RobotReport("arm-1")]))
    checker = Checker()
    checker.feed((tmp_path / "report.html").read_text())
    assert checker.open == []


def test_figures_of_a_robot():
    report = robot("arm-1")
    assert report.successes == 1
    assert report.chunk_rate_hz == pytest.approx(9 / 4)
    assert report.median("inference_ms") == 70.0
    assert report.margin_reached_by(0.5) == 300.0
    assert report.margin_reached_by(0.99) < 0
    assert report.cycles[1].ratio == pytest.approx(600 / 900)
    assert report.cycles[1].efficiency == pytest.approx(600 / 950)


def test_table_fits_eighty_columns_and_has_every_figure():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(result_table(fleet([robot("arm-1"), robot("arm-2", misses=3)])))
    text = console.export_text()
    row = next(line for line in text.splitlines() if line.strip().startswith("arm-2"))
    assert row.split() == ["arm-2", "9", "(2)", "2.25", "4.0", "6.0", "70.0", "300", "/", "-92", "3", "1/2"]
    assert "…" not in text
    for heading in ("requests", "transfer", "queue", "inference", "margin", "p50 / p99", "misses", "success"):
        assert heading in text


def test_json_has_no_pictures():
    data = fleet([robot("arm-1")]).as_dict()
    assert data["successes"] == 1
    assert data["episodes"] == 2
    assert "picture" not in data["robots"][0]
    assert data["robots"][0]["cycles"][0]["serial"] is True
