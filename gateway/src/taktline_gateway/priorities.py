"""Which class an observation is served in: what it claims, else its policy's, up to what its tenant may claim."""

from __future__ import annotations

from taktline_protocol.deployment import Route
from taktline_protocol.messages import Observation

from taktline_gateway.deadline_queue import Priority

OTHER_TENANTS = "*"


def priority_of(observation: Observation, tenant: str, route: Route) -> Priority:
    """The class of an observation of `tenant`; one above the tenant's ceiling is lowered to it.

    `production` is what an observation says that claims nothing: it has the class of its policy.
    Where the route caps anyone, whoever it does not name is capped at production: `safety` is granted, never assumed.
    """
    name = route.priority if observation.priority == "production" else observation.priority
    claimed = Priority[name.upper()]
    ceilings = route.priority_ceilings
    if not ceilings:
        return claimed
    ceiling = ceilings.get(tenant, ceilings.get(OTHER_TENANTS, "production"))
    return max(claimed, Priority[ceiling.upper()])
