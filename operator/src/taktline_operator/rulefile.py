"""`taktline-operator rules`: the rules of PolicyDeployment files and of the installation, for a plain Prometheus."""

from __future__ import annotations

from pathlib import Path

import yaml

from taktline_operator import planfile, platform_rules, slo_rules, spec

_HEAD = "# Made by `taktline-operator rules`; make it anew when a PolicyDeployment changes.\n"


def text(file: Path | None, *, platform: bool, period_days: int | None, runbooks: str) -> str:
    """A Prometheus rule file.

    Args:
        file: YAML with PolicyDeployments; None for none.
        period_days: the SLO period of all; None is each policy's own.
        platform: whether the installation's own alerts are in it.

    Raises:
        TaktlineError: CONFIG_INVALID; the file cannot be read, or a PolicyDeployment does not fit the CRD.
    """
    policies = [spec.parse(body) for body in planfile.read_policies(file)] if file else []
    groups = [
        group
        for policy in policies
        for group in slo_rules.policy_groups(policy, period_days=period_days, runbooks=runbooks)
    ]
    if platform:
        groups += platform_rules.platform_groups(runbooks=runbooks)
    return _HEAD + yaml.safe_dump(slo_rules.rule_file(groups), sort_keys=False, width=1_000_000, allow_unicode=True)
