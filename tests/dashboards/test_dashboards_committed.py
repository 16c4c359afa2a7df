"""The committed dashboards are those of the code, and each panel can be understood and placed."""

from __future__ import annotations

import itertools
import re

import pytest
from taktline_dashboards import cli, pages
from taktline_protocol import metrics, outside, slo

from .conftest import ROOT, committed, panels

FOLDER = ROOT / "dashboards/grafana"
EVERY_PANEL = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, found in committed().items()
    for panel in panels(found)
]


def test_the_files_are_what_the_code_makes():
    assert pages.stale(FOLDER) == [], f"run: taktline-dashboards write {FOLDER.relative_to(ROOT)}"


def test_check_names_a_changed_a_missing_and_a_foreign_file_and_write_mends_them(tmp_path, capsys):
    pages.write(tmp_path)
    (tmp_path / "fleet.json").write_text("{}")
    (tmp_path / "policy.json").unlink()
    (tmp_path / "old.json").write_text("{}")

    assert cli.main(["write", "--check", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert all(name in said for name in ("fleet.json", "policy.json", "old.json"))

    assert cli.main(["write", str(tmp_path)]) == 0
    assert cli.main(["write", "--check", str(tmp_path)]) == 0
    assert not (tmp_path / "old.json").exists()


def test_each_dashboard_has_its_own_uid_and_the_links_of_alerts_lead_to_them():
    uids = [found["uid"] for found in committed().values()]
    assert len(uids) == len(set(uids))
    assert set(uids) == {
        slo.DASHBOARD_FLEET,
        slo.DASHBOARD_POLICY,
        slo.DASHBOARD_POOL,
        slo.DASHBOARD_ROLLOUT,
        slo.DASHBOARD_OPERATOR,
    }


@pytest.mark.parametrize("name", sorted(committed()))
def test_panels_do_not_overlap_and_have_ids_of_their_own(name):
    found = committed()[name]["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    for one, other in itertools.combinations([panel["gridPos"] for panel in found], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in found)


@pytest.mark.parametrize("panel", EVERY_PANEL)
def test_a_panel_says_what_it_answers_in_which_unit(panel):
    assert len(panel["description"]) > 8
    assert panel["description"].rstrip()[-1] in ".)"
    assert panel["targets"]
    assert panel["fieldConfig"]["defaults"]["unit"]


@pytest.mark.parametrize("panel", EVERY_PANEL)
def test_a_panel_asks_only_for_series_that_somebody_exports(panel):
    for target in panel["targets"]:
        for name in names_in(target["expr"]):
            assert known(name), f"{name} in {target['expr']}"


@pytest.mark.parametrize("panel", EVERY_PANEL)
def test_every_label_that_a_panel_selects_or_keeps_exists_on_the_series(panel):
    for target in panel["targets"]:
        for name, selector in re.findall(r"(taktline_\w+)\{([^}]*)\}", target["expr"]):
            labels = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", selector))
            assert labels <= {*metrics.BY_NAME[base(name)].labels, "pod"}, (name, labels)


def names_in(expr: str) -> set[str]:
    """Names of series in a PromQL expression."""
    without_strings = re.sub(r'"[^"]*"', '""', expr)
    return set(re.findall(r"\b(?:taktline_\w+|slo:[\w:]+|DCGM_\w+|kube_\w+|process_\w+|ALERTS)\b", without_strings))


def base(name: str) -> str:
    """The metric of a series: a histogram is stored as three."""
    return name if name in metrics.BY_NAME else re.sub(r"_(bucket|sum|count)$", "", name)


def known(name: str) -> bool:
    ratios = {slo.error_ratio(window) for window in (*slo.ERROR_WINDOWS, "period")}
    causes = {slo.cause_ratio(window) for window in ("5m", "30m")}
    recorded = {value for value in vars(slo).values() if isinstance(value, str) and value.startswith("slo:")}
    return (
        base(name) in metrics.BY_NAME
        or name in ratios | causes | recorded | outside.NAMES
        or name.startswith("process_")
        or name == "ALERTS"
    )


def test_names_are_read_from_an_expression():
    expr = 'sum by (le) (rate(taktline_x_bucket{a="taktline_no"}[5m])) / on() slo:sli_error:ratio_rate5m{policy="p"}'
    assert names_in(expr) == {"taktline_x_bucket", "slo:sli_error:ratio_rate5m"}


def test_an_unknown_name_is_noticed():
    assert not known("taktline_invented_total")
    assert known(f"{metrics.MARGIN}_bucket")


def test_the_folder_holds_nothing_else():
    assert {path.name for path in FOLDER.iterdir()} == set(pages.PAGES)


def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    assert cli.main(["write", str(tmp_path / "file" / "dashboards")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"taktline-dashboards: config_invalid: {tmp_path / 'file'}")
    assert "Not a directory" in said
    assert said.count("\n") == 1
