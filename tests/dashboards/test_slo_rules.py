"""The rules against stories, with promtool: what fires, what clears, and what must stay silent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from taktline_operator import platform_rules, rulefile, slo_rules
from taktline_operator.slo_windows import PERIODS, Clock, seconds
from taktline_protocol import metrics, outside, slo

from .conftest import ROOT
from .rule_run import BUILD, GOODPUT, POLICY, Firing, kept, missed, policy, workers

EXAMPLES = sorted((ROOT / "deploy/examples").glob("*.yaml"))
STEADY = {GOODPUT: "0+600x300", BUILD: "1x300"}  # ten chunks a second


@pytest.fixture
def story(programs, tmp_path):
    """Makes a story: series, and optionally other rules than those of one policy with one pool."""

    def make(series: dict[str, str], groups: list | None = None, step_minutes: int = 1) -> Firing:
        return Firing(programs, tmp_path, series, groups, step_minutes)

    return make


def test_the_rules_of_every_example_are_valid(programs, tmp_path):
    files = []
    for example in EXAMPLES:
        for days in PERIODS:
            files.append(tmp_path / f"{example.stem}-{days}.yaml")
            files[-1].write_text(rulefile.text(example, platform=True, period_days=days, runbooks="https://r.example"))
    checked = subprocess.run(
        [programs / "promtool", "check", "rules", *files], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("SUCCESS") == len(files) >= 24


def test_the_command_prints_the_rules_of_a_file():
    command = [Path(sys.executable).parent / "taktline-operator", "rules", "-f", EXAMPLES[0], "--period-days", "7"]
    printed = yaml.safe_load(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert printed == yaml.safe_load(
        rulefile.text(EXAMPLES[0], platform=False, period_days=7, runbooks=slo_rules.RUNBOOKS)
    )


def test_rules_without_a_file_and_without_the_platform_are_refused():
    command = [Path(sys.executable).parent / "taktline-operator", "rules"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "give -f FILE or --platform" in refused.stderr


def test_a_month_has_the_usual_factors():
    assert [round(pair.factor(30), 6) for pair in PERIODS[30]] == [14.4, 6.0, 3.0, 1.0]


@pytest.mark.parametrize("days", sorted(PERIODS))
def test_no_alert_follows_from_an_even_burn_that_just_meets_the_objective(days):
    for pair in PERIODS[days]:
        assert seconds(pair.short) < seconds(pair.long) <= days * 86400
        assert pair.factor(days) >= 0.9


def test_shortened_windows_keep_their_names():
    normal = slo_rules.policy_groups(policy())
    short = slo_rules.policy_groups(policy(), clock=Clock(1 / 100))
    assert [rule.get("record") for group in normal for rule in group["rules"]] == [
        rule.get("record") for group in short for rule in group["rules"]
    ]
    assert "[5m]" in str(normal)
    assert "[3000ms]" in str(short)
    assert "[5m]" not in str(short)


class TestBurn:
    def test_one_in_ten_late_pages_and_clears_when_it_is_over(self, story):
        told = story({GOODPUT: "0+600x400", missed("inference"): "0+0x60 0+60x60 3600+0x200", BUILD: "1x400"})
        assert told.alerts(59, slo.BURN_FAST) == []
        [found] = told.alerts(75, slo.BURN_FAST)
        assert found["policy"] == POLICY
        assert found["severity"] == "page"
        assert told.alerts(118, slo.BURN_FAST)
        assert told.alerts(121 + 31, slo.BURN_FAST) == []  # the longer pair's short window has passed

    def test_a_burn_within_the_objective_is_silent(self, story):
        told = story({GOODPUT: "0+30000x600", missed("queue"): "0+20x600", BUILD: "1x600"}, step_minutes=5)
        assert told.alerts(2990, slo.BURN_FAST) == []
        assert told.alerts(2990, slo.BURN_SLOW) == []

    def test_half_a_percent_for_a_day_is_a_ticket_and_wakes_nobody(self, story):
        told = story({GOODPUT: "0+30000x320", missed("queue"): "0+150x320", BUILD: "1x320"}, step_minutes=5)
        [found] = told.alerts(1500, slo.BURN_SLOW)
        assert found["severity"] == "ticket"
        assert told.alerts(1500, slo.BURN_FAST) == []

    def test_one_bad_minute_is_silent(self, story):
        told = story({GOODPUT: "0+600x300", missed("inference"): "0+0x100 30+0x200", BUILD: "1x300"})
        for minute in (102, 106):
            assert told.alerts(minute, slo.BURN_FAST) == []

    def test_a_single_late_chunk_of_little_traffic_is_silent(self, story):
        # Ten observations an hour, one of them late: a tenth of the window, and no incident.
        told = story({GOODPUT: "0+0.8x140", missed("transfer"): "0+0x120 1+0x20", BUILD: "1x140"}, step_minutes=5)
        for minute in (605, 630):
            assert told.alerts(minute, slo.BURN_FAST) == []
            assert told.alerts(minute, slo.BURN_SLOW) == []

    def test_little_traffic_of_which_all_is_late_still_pages(self, story):
        told = story({GOODPUT: "0+0x180", missed("refused"): "0+0x100 0+0.5x80", BUILD: "1x180"})
        assert told.alerts(160, slo.BURN_FAST)

    def test_no_traffic_is_silent_and_has_no_ratio(self, story):
        told = story({GOODPUT: "100x40", BUILD: "1x40"})
        assert told.alerts(30, slo.BURN_FAST) == []
        assert told.value(30, slo.error_ratio("5m")) is None

    def test_a_policy_that_never_answered_in_time_pages(self, story):
        told = story({missed("refused"): "0+600x100", BUILD: "1x100"})
        assert told.alerts(20, slo.BURN_FAST)

    def test_a_stricter_objective_pages_earlier(self, story):
        series = {GOODPUT: "0+6000x100", missed("inference"): "0+30x100", BUILD: "1x100"}
        assert story(series).alerts(70, slo.BURN_FAST) == []
        strict = slo_rules.policy_groups(policy(objective=0.9999))
        assert story(series, strict).alerts(70, slo.BURN_FAST)

    def test_a_week_has_less_to_lose_and_pages_on_a_pace_that_a_month_bears(self, story):
        # 0.45% late for six hours is 4% of a month's budget, and 16% of a week's.
        series = {GOODPUT: "0+30000x80", missed("inference"): "0+136x80", BUILD: "1x80"}
        month = story(series, slo_rules.policy_groups(policy(), period_days=28), step_minutes=5)
        assert month.alerts(390, slo.BURN_FAST) == []
        assert month.alerts(390, slo.BURN_SLOW)
        week = story(series, slo_rules.policy_groups(policy(), period_days=7), step_minutes=5)
        assert week.alerts(390, slo.BURN_FAST)


class TestPeriod:
    def test_a_night_without_robots_does_not_dilute_the_error_ratio(self, story):
        # Two hours of work of which 2% is late, then as long nothing: the ratio stays 2%.
        series = {GOODPUT: "0+980x24 23520+0x24", missed("queue"): "0+20x24 480+0x24", BUILD: "1x48"}
        told = story(series, step_minutes=5)
        assert told.value(230, slo.error_ratio("1d")) == pytest.approx(0.02, rel=0.02)
        assert told.value(230, slo.error_ratio("period")) == pytest.approx(0.02, rel=0.02)

    def test_the_budget_left_and_the_burn_rates_agree_with_the_ratio(self, story):
        told = story({GOODPUT: "0+9995x40", missed("queue"): "0+5x40", BUILD: "1x40"})
        assert told.value(38, slo.CURRENT_BURN) == pytest.approx(0.5, rel=0.01)
        assert told.value(38, slo.BUDGET_LEFT) == pytest.approx(0.5, rel=0.05)

    def test_what_the_spec_says_is_a_series(self, story):
        told = story(STEADY)
        assert told.value(5, slo.OBJECTIVE) == 0.999
        assert told.value(5, slo.ERROR_BUDGET) == pytest.approx(0.001)
        assert told.value(5, slo.CONTROL_BUDGET) == 250
        assert told.value(5, slo.PERIOD_DAYS) == 28
        assert told.value(5, f'{slo.POOL_WANTED}{{pool="a"}}') == 2


class TestCauses:
    @pytest.mark.parametrize(("cause", "name"), sorted(slo_rules.LATE_ALERTS.items()))
    def test_the_term_that_breaks_is_the_one_that_is_named(self, story, cause, name):
        told = story({GOODPUT: "0+600x90", missed(cause): "0+0x30 0+60x60", BUILD: "1x90"})
        [found] = told.alerts(60, name)
        assert found["term"] == cause
        for other in set(slo_rules.LATE_ALERTS.values()) - {name}:
            assert told.alerts(60, other) == []
        assert told.alerts(60, slo.REFUSING) == []

    def test_refusals_are_named_by_their_code(self, story):
        refused = f'{metrics.REFUSED}{{policy="{POLICY}",code="deadline_unreachable"}}'
        told = story({GOODPUT: "0+600x90", missed("refused"): "0+60x90", refused: "0+60x90", BUILD: "1x90"})
        [found] = told.alerts(60, slo.REFUSING)
        assert found["code"] == "deadline_unreachable"
        assert "deadline_unreachable" in told.annotations(60, slo.REFUSING)


class TestPools:
    def test_an_only_pool_without_workers_pages_and_clears(self, story):
        told = story({**STEADY, workers(): "2x30 0x10 1x30"})
        assert told.alerts(30, slo.POOL_DOWN) == []
        [found] = told.alerts(35, slo.POOL_DOWN)
        assert (found["pool"], found["severity"]) == ("a", "page")
        assert told.alerts(45, slo.POOL_DOWN) == []

    def test_a_pool_that_left_the_routes_is_down_as_well(self, story):
        told = story({**STEADY, workers(): "2x30 stale"})
        assert told.alerts(40, slo.POOL_DOWN)

    def test_one_of_two_pools_is_a_ticket(self, story):
        groups = slo_rules.policy_groups(policy(pools=("a", "b")))
        told = story({**STEADY, workers("a"): "2x30 0x30", workers("b"): "2x60"}, groups)
        [found] = told.alerts(40, slo.POOL_DOWN)
        assert (found["pool"], found["severity"]) == ("a", "ticket")

    def test_two_gateways_of_which_one_sees_the_worker_is_no_outage(self, story):
        one, other = (workers()[:-1] + f',instance="{name}"}}' for name in ("g1", "g2"))
        assert story({**STEADY, one: "1x60", other: "1x20 0x40"}).alerts(50, slo.POOL_DOWN) == []

    def test_a_pool_that_has_not_served_yet_pages_nobody(self, story):
        assert story({**STEADY, workers(): "0x60"}).alerts(50, slo.POOL_DOWN) == []

    def test_without_a_gateway_nothing_is_known_about_pools(self, story):
        assert (
            story({GOODPUT: "0+600x60", BUILD: "1x30 stale", workers(): "2x30 stale"}).alerts(50, slo.POOL_DOWN) == []
        )


class TestWorkersAndRevisions:
    def batches(self, milliseconds: str) -> dict[str, str]:
        """Sixty batches a minute; `milliseconds` is their summed time."""
        served = f'policy="{POLICY}",pool="a",revision="r1",batch="4"'
        return {
            **STEADY,
            f'{metrics.T_SYNC_PREDICTED}{{{served},quantile="0.5"}}': "20x300",
            f"{metrics.T_SYNC}_count{{{served}}}": "0+60x300",
            f"{metrics.T_SYNC}_sum{{{served}}}": milliseconds,
        }

    def test_a_worker_that_takes_twice_as_long_is_named_and_forgiven(self, story):
        told = story(self.batches("0+1200x60 74400+2400x30 145200+1200x60"))
        assert told.alerts(59, slo.WORKER_SLOWED) == []
        [found] = told.alerts(75, slo.WORKER_SLOWED)
        assert (found["pool"], found["revision"]) == ("a", "r1")
        assert told.alerts(110, slo.WORKER_SLOWED) == []

    def test_a_few_percent_are_no_news(self, story):
        assert story(self.batches("0+1200x60 73500+1500x60")).alerts(80, slo.WORKER_SLOWED) == []

    def test_the_revision_that_is_worse_is_named(self, story):
        told = story(
            {kept("r1"): "0+600x90", kept("r2"): "0+0x30 0+60x60", missed("inference", "r2"): "0+0x30 0+20x60"}
        )
        [found] = told.alerts(45, slo.REVISION_WORSE)
        assert found["revision"] == "r2"

    def test_a_revision_that_is_never_in_time_has_no_goodput_and_is_named(self, story):
        told = story({kept("r1"): "0+600x90", missed("inference", "r2"): "0+0x30 0+60x60"})
        [found] = told.alerts(45, slo.REVISION_WORSE)
        assert found["revision"] == "r2"

    def test_one_revision_that_is_bad_alone_is_no_rollout(self, story):
        told = story({kept("r1"): "0+600x90", missed("inference", "r1"): "0+60x90"})
        assert told.alerts(45, slo.REVISION_WORSE) == []

    def test_two_revisions_that_suffer_alike_are_no_bad_rollout(self, story):
        series = {kept(r): "0+600x90" for r in ("r1", "r2")} | {missed("queue", r): "0+60x90" for r in ("r1", "r2")}
        assert story(series).alerts(45, slo.REVISION_WORSE) == []


class TestSilence:
    def test_robots_that_stop_are_news_for_the_day(self, story):
        told = story({GOODPUT: "0+600x120 72000+0x100", BUILD: "1x220"})
        assert told.alerts(121, slo.ROBOTS_SILENT) == []
        [found] = told.alerts(140, slo.ROBOTS_SILENT)
        assert found["severity"] == "info"

    def test_a_policy_that_nobody_asked_is_no_news(self, story):
        assert story({GOODPUT: "0x200", BUILD: "1x200"}).alerts(150, slo.ROBOTS_SILENT) == []

    def test_a_gateway_that_is_gone_is_not_blamed_on_the_robots(self, story):
        told = story({GOODPUT: "0+600x120 stale", BUILD: "1x120 stale"})
        assert told.alerts(140, slo.ROBOTS_SILENT) == []


HEALTHY = {
    BUILD: "1x120",
    metrics.OPERATOR_LEADS: "1x120",
    metrics.OPERATOR_SILENCE: "10x120",
    metrics.OPERATOR_WATCH_DEAD: "0x120",
    f'{metrics.OPERATOR_RECONCILES}{{result="done"}}': "0+10x120",
    f'{metrics.OPERATOR_RECONCILES}{{result="api_error"}}': "0+0.1x120",
    f'{metrics.POLICY_CONDITION}{{policy="p",namespace="f",condition="Available",reason="WorkersReady"}}': "1x120",
    f'{metrics.POLICY_CONDITION}{{policy="p",namespace="f",condition="Degraded",reason="AsExpected"}}': "0x120",
    metrics.OPERATOR_CERTIFICATE: "60x120",
    f'{metrics.POLICY_DELIVERY}{{policy="p",namespace="f"}}': "0x20 1x20 2+2x48 99x20 100x20",  # slow, but it comes
    f'{outside.DCGM_XID}{{gpu="0",Hostname="n"}}': "31x120",  # an old one
    f'{outside.DCGM_GPU_TEMP}{{gpu="0",Hostname="n"}}': "70x120",
    f'{outside.DCGM_ROW_REMAP_FAILURE}{{gpu="0",Hostname="n"}}': "0x120",
    f'{outside.DCGM_UNCORRECTABLE}{{gpu="0",Hostname="n"}}': "2x120",
}


class TestPlatform:
    @pytest.fixture
    def installation(self, story):
        def make(series: dict[str, str]) -> Firing:
            return story(series, platform_rules.platform_groups())

        return make

    def test_a_healthy_installation_is_silent(self, installation):
        told = installation(HEALTHY)
        assert [name for name in slo.PLATFORM_ALERTS if told.alerts(110, name)] == []

    @pytest.mark.parametrize(
        ("name", "changed"),
        [
            (slo.GATEWAY_DOWN, {BUILD: "1x50 stale"}),
            (
                slo.GATEWAY_FULL,
                {
                    BUILD[:-1] + ',instance="g"}': "1x120",
                    'process_cpu_seconds_total{instance="g"}': "0+58x120",
                    'process_cpu_seconds_total{instance="other"}': "0+600x120",
                },
            ),
            (slo.SESSION_STORE_DOWN, {metrics.SESSION_STORE_UP: "1x50 0x70"}),
            (slo.OPERATOR_DOWN, {metrics.OPERATOR_LEADS: "1x50 stale"}),
            (slo.OPERATOR_DOWN, {metrics.OPERATOR_LEADS: "1x50 0x70"}),
            (slo.OPERATOR_DEAF, {metrics.OPERATOR_SILENCE: "10x50 0+60x70"}),
            (slo.OPERATOR_DEAF, {metrics.OPERATOR_WATCH_DEAD: "0x50 1x70"}),
            (slo.RECONCILE_FAILING, {f'{metrics.OPERATOR_RECONCILES}{{result="failed"}}': "0+5x120"}),
            (
                slo.POLICY_UNAVAILABLE,
                {
                    f'{metrics.POLICY_CONDITION}{{policy="q",namespace="f",condition="Available",'
                    'reason="NoReadyWorker"}': "0x120"
                },
            ),
            (
                slo.POLICY_DEGRADED,
                {
                    f'{metrics.POLICY_CONDITION}{{policy="q",namespace="f",condition="Degraded",'
                    'reason="CrashLoopBackOff"}': "1x120"
                },
            ),
            (
                slo.ROLLED_BACK,
                {
                    f'{metrics.POLICY_ROLLOUT}{{policy="q",namespace="f",phase="RolledBack",reason="ParityFailed"}}': (
                        "0x120"
                    )
                },
            ),
            (slo.CERTIFICATE_ENDING, {metrics.OPERATOR_CERTIFICATE: "5x120"}),
            (slo.CERTIFICATE_ENDING, {metrics.OPERATOR_CERTIFICATE: "0.01-0.001x120"}),
            (slo.DELIVERY_STUCK, {f'{metrics.POLICY_DELIVERY}{{policy="q",namespace="f"}}': "0+1x40 40x80"}),
            (slo.GPU_XID, {f'{outside.DCGM_XID}{{gpu="0",Hostname="n"}}': "0x105 79x20"}),
            (slo.GPU_MEMORY_FAILING, {f'{outside.DCGM_ROW_REMAP_FAILURE}{{gpu="0",Hostname="n"}}': "0x50 1x70"}),
            (slo.GPU_MEMORY_FAILING, {f'{outside.DCGM_UNCORRECTABLE}{{gpu="0",Hostname="n"}}': "2x80 3x40"}),
            (slo.GPU_HOT, {f'{outside.DCGM_GPU_TEMP}{{gpu="0",Hostname="n"}}': "70x50 91x70"}),
        ],
    )
    def test_a_fault_fires_its_own_alert(self, installation, name, changed):
        told = installation(HEALTHY | changed)
        assert told.alerts(110, name)
        others = [other for other in slo.PLATFORM_ALERTS if other != name and told.alerts(110, other)]
        assert others == []

    def test_a_slow_checkpoint_and_one_that_has_only_begun_are_no_alert(self, installation):
        told = installation(HEALTHY)
        assert [minute for minute in (30, 50, 95) if told.alerts(minute, slo.DELIVERY_STUCK)] == []
        begun = {f'{metrics.POLICY_DELIVERY}{{policy="q",namespace="f"}}': "_x80 0x40"}
        assert installation(HEALTHY | begun).alerts(105, slo.DELIVERY_STUCK) == []

    @pytest.mark.parametrize(
        "labels", ['phase="Shifting",reason=""', 'phase="RolledBack",reason="Aborted"', 'phase="Complete",reason=""']
    )
    def test_a_rollout_under_way_or_ended_by_hand_is_no_alert(self, installation, labels):
        series = {f'{metrics.POLICY_ROLLOUT}{{policy="q",namespace="f",{labels}}}': "25x20"}
        assert installation(series | {BUILD: "1x20"}).alerts(15, slo.ROLLED_BACK) == []

    def test_a_policy_scaled_to_zero_on_purpose_is_no_outage(self, installation):
        zero = f'{metrics.POLICY_CONDITION}{{policy="z",namespace="f",condition="Available",reason="ScaledToZero"}}'
        assert installation(HEALTHY | {zero: "0x120"}).alerts(110, slo.POLICY_UNAVAILABLE) == []
