"""Runs `promtool test rules` on rules with the series of a story, and reads alerts and values at given minutes."""

from __future__ import annotations

import re
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


_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Firing:
    """What promtool says about a story, alert by alert."""

    def __init__(
        self, programs: Path, folder: Path, series: Mapping[str, str], groups: list | None = None, step_minutes: int = 1
    ) -> None:
        """`series` holds promtool's compact values by series, a value a step; rules are evaluated once a step."""
        self._step = f"{step_minutes}m"
        self._seen: dict[int, list[dict[str, str]]] = {}
        self._program = programs / "promtool"
        self._folder = folder
        self._series = [{"series": name, "values": values} for name, values in series.items()]
        groups = slo_rules.policy_groups(policy()) if groups is None else groups
        (folder / "rules.yaml").write_text(yaml.safe_dump(slo_rules.rule_file(groups)))

    def alerts(self, minute: int, alert: str) -> list[dict[str, str]]:
        """Labels of every instance of `alert` that fires at `minute`."""
        if minute not in self._seen:  # all alerts in one run: a run evaluates the whole story
            got = self._got(minute, 'ALERTS{alertstate="firing"}')
            self._seen[minute] = [dict(_LABEL.findall(series)) for series in re.findall(r"\{([^}]*)\}", got)]
        return [found for found in self._seen[minute] if found["alertname"] == alert]

    def annotations(self, minute: int, alert: str) -> str:
        """All annotations of `alert` at `minute`, as promtool prints them."""
        # promtool only compares, and prints what it got instead of an alert that nobody expects.
        unexpected = {"exp_labels": {"none": "such"}, "exp_annotations": {}}
        return self._run(
            {"alert_rule_test": [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": [unexpected]}]}
        )

    def value(self, minute: int, expr: str) -> float | None:
        """The value of an expression with at most one series; None where it has none."""
        last = self._got(minute, expr).split()[-1]
        return None if last == "nil" else float(last)

    def _got(self, minute: int, expr: str) -> str:
        unexpected = [{"value": -7.7}]
        return self._run({"promql_expr_test": [{"eval_time": f"{minute}m", "expr": expr, "exp_samples": unexpected}]})

    def _run(self, test: dict) -> str:
        """What promtool says it got."""
        cases = {
            "rule_files": ["rules.yaml"],
            "evaluation_interval": self._step,
            "tests": [{"interval": self._step, "input_series": self._series, **test}],
        }
        (self._folder / "cases.yaml").write_text(yaml.safe_dump(cases))
        run = subprocess.run(
            [self._program, "test", "rules", "cases.yaml"],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )
        said = run.stdout + run.stderr
        assert run.returncode == 1, said
        assert "got:" in said, said
        return said.split("got:", 1)[1]
