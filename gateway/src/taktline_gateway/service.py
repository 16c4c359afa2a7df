"""The gateway's state: the lanes by policy, the robots, the limits, and whether it drains."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from importlib.metadata import version
from pathlib import Path

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import Route, RoutingTable
from taktline_protocol.limits import DEFAULT_LIMITS, Limits
from taktline_protocol.tracing import tracing_from_environment

from taktline_gateway.access.audit import AuditLog
from taktline_gateway.access.control import AccessControl
from taktline_gateway.access.rights import NOBODY, OPEN, Principal
from taktline_gateway.books import Books
from taktline_gateway.compat.ports import ClientPorts
from taktline_gateway.connections import ConnectionCounts
from taktline_gateway.lane import Lane
from taktline_gateway.logs import log
from taktline_gateway.robots import Robots
from taktline_gateway.routes import FileChanges, file_identity, read_routes, watch_routes
from taktline_gateway.stream.settings import StreamSettings
from taktline_gateway.telemetry import Levels, Telemetry
from taktline_gateway.tls import ServerTls, TlsFiles, WorkerTls
from taktline_gateway.trials import Trials

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How one gateway process runs.

    Attributes:
        routes: routing table file.
        max_queued: observations that may wait for one policy.
        body_timeout_s: a body that takes longer to arrive is refused.
        drain_settle_s: after SIGTERM, how long the listener stays open at least, so that probes and load balancers see
            /readyz fail before connections do.
        drain_limit_s: after SIGTERM, when the process ends even with requests in flight.
        client_ports: where the protocols of existing robot clients are spoken.
        stream: bounds of the timed stream.
        access_file: who may ask what, read again when it changes; None lets everyone do everything.
        audit_log: file of the access decisions; None puts them among the other log lines.
        tls: certificates of the listeners; None speaks plain text.
        worker_tls: certificates of the channels to workers; None speaks plain text.
        max_connections: connections of HTTP, streams and WebSocket clients held at once; likewise by one address.
    """

    routes: Path
    limits: Limits = DEFAULT_LIMITS
    max_queued: int = 10_000
    body_timeout_s: float = 10.0
    drain_settle_s: float = 1.0
    drain_limit_s: float = 25.0
    client_ports: ClientPorts = dataclasses.field(default_factory=ClientPorts)
    stream: StreamSettings = dataclasses.field(default_factory=StreamSettings)
    access_file: Path | None = None
    audit_log: Path | None = None
    tls: TlsFiles | None = None
    worker_tls: TlsFiles | None = None
    max_connections: int = 10_000
    max_connections_by_address: int = 2_000


class Gateway:
    """Everything one gateway process holds between requests."""

    def __init__(self, settings: Settings) -> None:
        """Reads the routing table and the access file. Raises TaktlineError `config_invalid`."""
        self.settings = settings
        self.access = AccessControl(settings.access_file, AuditLog(settings.audit_log))
        self.tls = ServerTls(settings.tls) if settings.tls is not None else None
        self.worker_tls = WorkerTls(settings.worker_tls) if settings.worker_tls is not None else None
        self.connections = ConnectionCounts(settings.max_connections, settings.max_connections_by_address)
        self.telemetry = Telemetry()
        self.books = Books(self.telemetry, tracing_from_environment("taktline-gateway", version("taktline-gateway")))
        self.robots = Robots()
        self.lanes: dict[str, Lane] = {}
        self.trials = Trials(self.lanes, self._new_lane)
        self.draining = False
        self.requests = 0  # being served at this moment
        self._changes = FileChanges(lambda: file_identity(settings.routes))
        self._table = read_routes(settings.routes)
        self._watcher: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.telemetry.watch_levels(self.levels)

    async def start(self) -> None:
        """Connects to the workers and begins watching the routing table."""
        await self.access.start()
        self._apply(self._table)
        self._watcher = asyncio.create_task(watch_routes(self.settings.routes, self._changes, self._apply))

    async def close(self) -> None:
        """Closes every lane; queued requests get a typed error."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self.trials.close()
        await asyncio.gather(*(lane.close() for lane in self.lanes.values()), *self._closing)
        await asyncio.to_thread(self.books.close)
        await self.access.close()

    def lane(self, policy: str, principal: Principal = OPEN) -> Lane:
        """The lane of a policy. Raises TaktlineError `unknown_policy`, which names what `principal` may see."""
        lane = self.lanes.get(policy)
        if lane is None:
            if principal is OPEN and not self.access.open:
                principal = NOBODY
            served = ", ".join(name for name in sorted(self.lanes) if principal.may("read", name)) or "none"
            raise TaktlineError(
                ErrorCode.UNKNOWN_POLICY,
                f"policy {policy[:128]!r} is not served here (served: {served[:500]})",
                "list the policies with GET /v1/policies, or apply a PolicyDeployment of that name",
            )
        return lane

    def check_open(self) -> None:
        """Raises TaktlineError `draining` once the gateway is going away."""
        if self.draining:
            raise TaktlineError(
                ErrorCode.DRAINING,
                "this gateway is shutting down",
                "send the observation again: another gateway takes it",
                retry_after_ms=100.0,
            )

    def levels(self) -> list[Levels]:
        """Queue, workers and predicted times of each policy at this instant."""
        return [self.trials.levels(policy) for policy in self.lanes]

    def _new_lane(self, route: Route) -> Lane:
        return Lane(
            route, self.telemetry, max_queued=self.settings.max_queued, worker_tls=self.worker_tls, others=self.lanes
        )

    def _apply(self, table: RoutingTable) -> None:
        routes = {route.policy: route for route in table.routes}
        self.trials.end_before(routes)
        for policy in [policy for policy in self.lanes if policy not in routes]:
            task = asyncio.create_task(self.lanes.pop(policy).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self.books.policy_gone(policy)
        for policy, route in routes.items():
            if policy in self.lanes:
                self.lanes[policy].apply(route)
            else:
                self.books.policy_served(policy)
                self.lanes[policy] = self._new_lane(route)
        self.trials.begin_after(routes)
        targets = {policy: [target.address for target in route.targets] for policy, route in routes.items()}
        log(_logger, logging.INFO, "routes_applied", targets=targets)
