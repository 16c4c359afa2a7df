"""`taktline-operator run`: the watch, the workers of the queue, the resync and the health endpoints as one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import uuid
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import kopf
import msgspec
from kubernetes import client
from taktline_protocol import metrics

from taktline_operator import admission, certifying, health, logs, measuring, naming, schema, served_crd, watching
from taktline_operator.delivery_polling import DeliveryPoller
from taktline_operator.kube import ApiError, KubeApi, load_configuration
from taktline_operator.leader import Election
from taktline_operator.plan import Settings
from taktline_operator.reconcile import Controller
from taktline_operator.surveying import Surveyor
from taktline_operator.telemetry import Telemetry

logger = logging.getLogger(__name__)

Json = dict[str, Any]

WORKERS = 8  # reconciliations at a time
CRD_LOOK_S = 5.0
UPGRADE_CRD = "upgrade it: taktline-operator crd | kubectl apply --server-side -f -"
NODES_S = 30.0  # between two looks at the nodes
DEMAND_S = 5.0  # between two looks at what robots ask for
RESYNC_S = 60.0  # list all PolicyDeployments: finds what the watch missed
FULL_RESYNC_S = 600.0  # then every PolicyDeployment is reconciled, whatever the watch said
SILENT_S = 4 * RESYNC_S  # without a successful list for this long the process is not alive


class Service:
    """One operator process."""

    def __init__(
        self,
        api: KubeApi,
        controller: Controller,
        ledger: watching.WatchLedger,
        telemetry: Telemetry,
        resync_s: float = RESYNC_S,
    ) -> None:
        self._resync_s = resync_s
        self.controller = controller
        self.telemetry = telemetry
        self.ledger = ledger
        self.standby = False  # another operator leads
        self.outdated: list[str] = []  # fields that the installed CRD lacks
        self.webhook: admission.Webhook | None = None
        self._api = api
        self._policies: list[Json] = []
        self._heard_at = asyncio.get_running_loop().time()
        telemetry.watch(self._levels, lambda: list(controller.statuses.values()))

    def _levels(self) -> dict[str, float]:
        levels = self.webhook.levels() if self.webhook is not None else {}
        return levels | {
            metrics.OPERATOR_LEADS: float(not self.standby),
            metrics.OPERATOR_QUEUE: float(self.controller.queue.depth),
            metrics.OPERATOR_SILENCE: asyncio.get_running_loop().time() - self._heard_at,
            metrics.OPERATOR_WATCH_DEAD: float(bool(self.ledger.dead)),
        }

    def alive(self) -> str:
        """What keeps the process from doing its work for good; empty when nothing does."""
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        if silent_s > SILENT_S:
            return f"the API server has not answered for {silent_s:.0f} s"
        return f"the watch of {self.ledger.dead} misses what lists show" if self.ledger.dead else ""

    def ready(self) -> str:
        """Empty once every PolicyDeployment is known, or while another operator leads, and the webhook answers."""
        if self.webhook is not None and self.webhook.problem:
            return self.webhook.problem
        if self.outdated:
            return f"the installed CRD lacks {', '.join(self.outdated[:8])}: {UPGRADE_CRD}"
        return "" if self.controller.listed or self.standby else "PolicyDeployments are not listed yet"

    def heard(self) -> None:
        """The API server has answered."""
        self._heard_at = asyncio.get_running_loop().time()

    async def first_list(self) -> None:
        """Wait until PolicyDeployments can be listed, saying what is missing meanwhile."""
        delay_s = 1.0
        while True:
            try:
                await self._list(everything=True)
                self.outdated = served_crd.missing(await self._api.raw(served_crd.PATH) or {})
                if not self.outdated:
                    return
                self.controller.listed = False
                logger.error(
                    "the installed CRD is older than this operator: it would lose what is written",
                    extra={"cause": "it lacks " + ", ".join(self.outdated[:8]), "next_step": UPGRADE_CRD},
                )
                await asyncio.sleep(CRD_LOOK_S)
            except ApiError as error:
                step = "install the CRD: taktline-operator crd | kubectl apply -f -" if error.status == 404 else ""
                logger.warning("cannot list PolicyDeployments yet", extra={"cause": str(error), "next_step": step})
                if error.status != 404:
                    await asyncio.sleep(error.retry_after_s or delay_s)
                    delay_s = min(2 * delay_s, 30.0)
                else:
                    self.heard()  # the API answers; the CRD may come any time
                    await asyncio.sleep(2.0)

    async def resync(self) -> None:
        """List at intervals for ever."""
        every, count = max(1, round(FULL_RESYNC_S / self._resync_s)), 0
        while True:
            await asyncio.sleep(self._resync_s)
            count += 1
            try:
                await self._list(everything=count % every == 0)
                await self._find_missed()
            except ApiError as error:
                logger.warning("resync failed", extra={"cause": str(error)})

    async def follow_demand(self) -> None:
        """Look at what robots ask for at intervals for ever."""
        while True:
            await asyncio.sleep(DEMAND_S)
            try:
                await self.controller.look_at_demand()
            except ApiError as error:
                logger.warning("demand is not known", extra={"cause": str(error)})

    async def follow_nodes(self) -> None:
        """Look at the nodes at intervals for ever; an operator without rights on nodes does without."""
        while True:
            try:
                await self.controller.look_at_nodes()
            except ApiError as error:
                if error.status == 403:
                    logger.info("nodes are not looked at: no rights on them", extra={"cause": error.message})
                    return
                logger.warning("nodes are not known", extra={"cause": str(error)})
            await asyncio.sleep(NODES_S)

    async def _list(self, *, everything: bool) -> None:
        policies = await self.controller.resync(everything=everything)
        kept = ("namespace", "name", "resourceVersion")
        self._policies = [{"metadata": {name: live["metadata"][name] for name in kept}} for live in policies]
        self.heard()

    async def _find_missed(self) -> None:
        """Compare what the watch brought with fresh lists, and reconcile what it missed."""
        policies = [(live, (live["metadata"]["namespace"], live["metadata"]["name"])) for live in self._policies]
        missed = self.ledger.compare(schema.KIND, policies)
        pods = [
            (pod, (pod["metadata"]["namespace"], pod["metadata"]["labels"][naming.LABEL_POLICY]))
            for scope in self.controller.scopes
            for pod in await self._api.list("Pod", scope, naming.CHILD_SELECTOR, metadata_only=True)
        ]
        missed |= self.ledger.compare("Pod", pods)
        for key in missed:
            self.controller.queue.add(key)

    async def work(self) -> None:
        """Handle keys for ever."""
        queue = self.controller.queue
        while True:
            key = await queue.get()
            failed, delay_s, result = True, None, "failed"
            began = asyncio.get_running_loop().time()
            try:
                await self.controller.handle(key)
                failed, result = False, "done"
            except ApiError as error:
                delay_s, result = error.retry_after_s, "api_error"
                logger.warning("reconciliation failed", extra={"key": "/".join(key), "cause": str(error)})
            except Exception:
                # One policy's surprise must not stop the others; it is logged whole and tried again, ever slower.
                logger.exception("reconciliation failed unexpectedly", extra={"key": "/".join(key)})
            finally:
                self.telemetry.reconciled(result, asyncio.get_running_loop().time() - began)
                queue.done(key, failed=failed, delay_s=delay_s)


class WebhookOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the admission webhook is served.

    Attributes:
        listen: host:port.
        hosts: names and addresses that the API server calls it by.
        secret: Secret in the gateway's namespace that keeps the certificate.
        configuration: ValidatingWebhookConfiguration that is told whom to trust.
        folder: tls.crt and tls.key that somebody else renews; the three fields above are not used then.
        look_s: time between two looks at the certificate.
    """

    listen: str
    hosts: tuple[str, ...] = ()
    secret: str = ""
    configuration: str = ""
    folder: Path | None = None
    look_s: float = admission.LOOK_S


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How `run` is started.

    Attributes:
        namespaces: those served; empty means all.
        kubeconfig: credentials; None looks for the pod's own, then for the default file.
        health_listen: host:port of the health endpoints.
        gateway_scheme: http, or https where the gateways serve TLS; likewise key and authority of `measuring.Gateways`.
        lease: name of the Lease, in the gateway's namespace, that lets one of several operators work; empty takes none.
        resync_s: time between two lists that find what the watch missed, and kinds that were installed meanwhile.
    """

    namespaces: tuple[str, ...] = ()
    kubeconfig: Path | None = None
    health_listen: str
    lease: str = ""
    resync_s: float = RESYNC_S
    gateway_scheme: str = "http"
    gateway_key: str = ""
    gateway_authority: str = ""
    webhook: WebhookOptions | None = None


def _webhook(api: KubeApi, settings: Settings, options: RunOptions, telemetry: Telemetry) -> admission.Webhook | None:
    wanted = options.webhook
    if wanted is None:
        return None
    found: admission.Certificates
    if wanted.folder is not None:
        found = certifying.FromFiles(wanted.folder)
    else:
        namespace = settings.gateway_namespace
        found = certifying.SelfManaged(api, namespace, wanted.secret, wanted.configuration, wanted.hosts)
    surveyor = Surveyor(api, options.namespaces)
    return admission.Webhook(surveyor, found, look_s=wanted.look_s, count=telemetry.reviewed)


async def _until_stopped(settings: Settings, options: RunOptions) -> int:
    credentials = load_configuration(options.kubeconfig)
    telemetry = Telemetry()
    api = KubeApi(credentials, telemetry.requested)
    gateways = measuring.Gateways(
        api,
        settings.gateway_namespace,
        scheme=options.gateway_scheme,
        key=options.gateway_key,
        authority=options.gateway_authority,
    )
    deliveries = DeliveryPoller()
    controller = Controller(api, settings, options.namespaces, measurements=gateways, deliveries=deliveries)
    service = Service(api, controller, watching.WatchLedger(), telemetry, options.resync_s)
    service.webhook = _webhook(api, settings, options, telemetry)
    election = None
    if options.lease:
        identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        election = Election(api, settings.gateway_namespace, options.lease, identity, heard=service.heard)
        service.standby = True
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)  # until kopf installs its own
    try:
        endpoints = await health.serve(options.health_listen, service.alive, service.ready, telemetry.exposition)
        answering: asyncio.Task[None] | None = None
        try:
            if service.webhook is not None and options.webhook is not None:  # a stand-by answers as well
                answering = asyncio.create_task(service.webhook.serve(options.webhook.listen))
                answering.add_done_callback(lambda _: stop.set())  # it ends only where it cannot listen
            if election:
                await _either(election.acquire(), stop)
                service.standby = False
            await _either(service.first_list(), stop)
            if stop.is_set():
                return 0
            logger.info("operator started", extra={"namespaces": options.namespaces or "all"})
            await _work(service, credentials, options.namespaces, election, stop)
            return 1 if election and not election.leads else 0
        finally:
            if election:
                await election.release()
            if answering is not None and service.webhook is not None:
                await _ended(answering)
                await service.webhook.close()
            await endpoints.cleanup()
    finally:
        await gateways.close()
        await deliveries.close()
        await api.close()
        logger.info("operator stopped")


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task that runs for ever; where it has failed, its error goes on."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _work(
    service: Service,
    credentials: client.Configuration,
    namespaces: Sequence[str],
    election: Election | None,
    stop: asyncio.Event,
) -> None:
    """Watch and reconcile until `stop` is set or the lease is lost; nothing is written after this returns."""
    background = [
        asyncio.create_task(work) for work in (service.resync(), service.follow_demand(), service.follow_nodes())
    ]
    background += [asyncio.create_task(service.work()) for _ in range(WORKERS)]

    def lost(_: asyncio.Task[None]) -> None:
        for task in background:  # at once: kopf takes its time to stop
            task.cancel()
        stop.set()

    keeper = asyncio.create_task(election.keep()) if election else None
    if keeper:
        keeper.add_done_callback(lost)
    try:
        await kopf.operator(
            registry=watching.registry(service.controller, service.ledger, credentials),
            settings=watching.settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=list(namespaces),
            stop_flag=stop,
        )
    finally:
        tasks = [*background, *([keeper] if keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _either(work: Coroutine[None, None, None], stop: asyncio.Event) -> None:
    """Run `work` until it ends or `stop` is set; nothing at all when it is set already."""
    task = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    else:
        await task


def run(settings: Settings, options: RunOptions) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status: 1 when the lease was lost, so that a fresh process starts.

    Raises:
        TaktlineError: CONFIG_INVALID; no usable credentials, or the health address cannot be bound.
    """
    logs.configure()
    return asyncio.run(_until_stopped(settings, options))
