"""Runs `promtool test rules` on a policy's rules with the counters of a story, and reads alerts at given minutes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from taktline_operator import slo_rules, spec
from taktline_protocol import metrics

POLICY = "line4"
GOODPUT = f'{metrics.GOODPUT}{{policy="{POLICY}",pool="a",revision="r1"}}'
BUILD = f'{metrics.BUILD}{{version="1"}}'


def workers(pool: str = "a") -> str:
    return f'{metrics.WORKERS}{{policy="{POLICY}",pool="{pool}"}}'


def missed(cause: str, revision: str = "r1") -> str:
    pool = "" if cause == "refused" else "a"
    return f'{metrics.DEADLINE_MISSES}{{policy="{POLICY}",pool="{pool}",revision="{revision}",cause="{cause}"}}'


def kept(revision: str) -> str:
    return f'{metrics.GOODPUT}{{policy="{POLICY}",pool="a",revision="{revision}"}}'


def policy(*, objective: float = 0.999, pools: Sequence[str] = ("a",)) -> spec.PolicyDeployment:
    body = {
        "apiVersion": "taktline.dev/v1alpha1",
        "kind": "PolicyDeployment",
        "metadata": {"name": POLICY, "namespace": "factory"},
        "spec": {
            "model": {"family": "pi05", "source": {"pvc": {"claimName": "models"}}},
            "pools": [{"name": name, "accelerator": "cpu", "minReplicas": 2} for name in pools],
            "slo": {"controlBudgetMs": 250, "onTimeObjective": objective},
        },
    }
    return spec.parse(body)


class Firing:
    """What promtool says about a story, alert by alert."""

    def __init__(self, programs: Path, folder: Path, series: Mapping[str, str], **options) -> None:
        """`series` holds promtool's compact values by series, a value a minute; `options` go to `policy_groups`."""
        self._program = programs / "promtool"
        self._folder = folder
        self._series = [{"series": name, "values": values} for name, values in series.items()]
        groups = slo_rules.policy_groups(options.pop("of", None) or policy(), **options)
        (folder / "rules.yaml").write_text(yaml.safe_dump(slo_rules.rule_file(groups)))

    def expect(self, minute: int, alert: str, labels: Mapping[str, str] | None) -> None:
        """Asserts that `alert` fires at `minute` with `labels` among its own, or (None) that it does not fire."""
        said = self.alerts(minute, alert)
        if labels is None:
            assert not said, said
        else:
            assert any(all(found.get(name) == value for name, value in labels.items()) for found in said), said

    def alerts(self, minute: int, alert: str) -> list[dict[str, str]]:
        """Labels of every instance of `alert` that fires at `minute`."""
        # promtool only compares, and prints what it got instead of an alert that nobody expects.
        sentinel = {"exp_labels": {"sentinel": "x"}, "exp_annotations": {}}
        cases = {
            "rule_files": ["rules.yaml"],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": self._series,
                    "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": [sentinel]}],
                }
            ],
        }
        (self._folder / "cases.yaml").write_text(yaml.safe_dump(cases))
        run = subprocess.run(
            [self._program, "test", "rules", "cases.yaml"],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 1, run.stdout + run.stderr
        got = run.stderr + run.stdout
        assert "got:" in got, got
        return _labels(got.split("got:", 1)[1])


def _labels(text: str) -> list[dict[str, str]]:
    found = []
    for line in text.splitlines():
        if "Labels:{" in line:
            inner = line.split("Labels:{", 1)[1].rsplit("}", 1)[0]
            pairs = [part.split("=", 1) for part in inner.split(", ") if "=" in part]
            found.append({name: value.strip('"') for name, value in pairs})
    return found
