"""Whose a live object is: this PolicyDeployment's, a stranger's, or one's that is gone."""

from __future__ import annotations

from typing import Any

from taktline_operator import naming
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]


def ownership_of(policy: PolicyDeployment, live: Json | None) -> str:
    """`ours`, `foreign`, or `stale`: left by an earlier PolicyDeployment of this name and about to be collected."""
    if live is None or not policy.uid:
        return "ours"
    metadata = live["metadata"]
    controllers = [owner for owner in metadata.get("ownerReferences", []) if owner.get("controller")]
    if controllers:
        owner = controllers[0]
        if owner["uid"] == policy.uid:
            return "ours"
        same_name = owner["kind"] == "PolicyDeployment" and owner["name"] == policy.name
        return "stale" if same_name else "foreign"
    # Without an owner our labels decide: a removed owner reference is drift, a hand-made object is not ours.
    labels = metadata.get("labels", {})
    ours = labels.get(naming.LABEL_MANAGED_BY) == naming.MANAGER and labels.get(naming.LABEL_POLICY) == policy.name
    return "ours" if ours else "foreign"
