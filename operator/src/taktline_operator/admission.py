"""The admission webhook: answers the API server's reviews of PolicyDeployments with what `advice` says.

It only reads, so that every replica may answer, whichever leads. What it refuses, reconciliation refuses in the same
words; where it cannot find something out in time it lets the object through and says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from aiohttp import web
from taktline_protocol import metrics
from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_operator import advice, certificates, schema, spec
from taktline_operator.certifying import Context, is_conflict
from taktline_operator.kube import ApiError
from taktline_operator.surveying import Surveyor

logger = logging.getLogger(__name__)

Json = dict[str, Any]

PATH = "/validate"
MAX_BODY = 8 << 20  # a review holds the object and the one before it
LOOK_S = 60.0  # between two looks at the certificate
RETRY_S = 2.0  # after a look that found something wrong
LOOKUP_S = 2.0  # what a review may spend on asking around
MAX_WARNING = 250  # the API server cuts longer ones off
ALLOWED, REFUSED, MALFORMED = metrics.REVIEW_RESULTS


class Certificates(Protocol):
    """Where the certificate comes from."""

    async def look(self, context: Context) -> str: ...  # noqa: D102


async def reviewed(review: Json, surveyor: Surveyor) -> Json:
    """The answer to an AdmissionReview of a PolicyDeployment; the API server has checked schema and rules by then.

    A refusal that already held before an update is only a warning: nobody must mend everything to change one field.

    Raises:
        KeyError: not an AdmissionReview.
    """
    request = review["request"]
    warnings: list[str] = []
    refusals: list[str] = []
    # A deletion, a scale or a status is never sent here; if one is, it is none of our business.
    if request["operation"] in ("CREATE", "UPDATE") and not request.get("subResource"):
        refusals, warnings = await _judged(request, surveyor)
    response: Json = {"uid": request["uid"], "allowed": not refusals}
    if warnings:
        response["warnings"] = [_short(warning) for warning in warnings]
    if refusals:
        response["status"] = {"code": 422, "reason": "Invalid", "message": "; ".join(refusals)}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


async def _judged(request: Json, surveyor: Surveyor) -> tuple[list[str], list[str]]:
    body = _named(request["object"], request)
    if body["metadata"].get("deletionTimestamp"):
        return [], []
    try:
        policy = spec.admitted(body)
    except TaktlineError as error:
        return [f"{error.message} ({error.next_step})"], []
    note = []
    try:
        async with asyncio.timeout(LOOKUP_S):
            around = await surveyor.around(policy, body)
    except (ApiError, TimeoutError) as error:
        logger.warning("reviewed without a look around", extra={"policy": policy.name, "cause": str(error)})
        around = advice.Surroundings()
        note = ["taktline could not look at the rest of the cluster; see the conditions once it is applied"]
    said = advice.review(policy, around)
    old = _before(request, around)
    refusals = [found.message for found in said.refusals if found not in old]
    known = [found.message for found in said.refusals if found in old]
    return refusals, [*known, *(caution.message for caution in said.cautions), *note]


def _before(request: Json, around: advice.Surroundings) -> tuple[advice.Finding, ...]:
    """Refusals that the object deserved before this update."""
    old = request.get("oldObject")
    if not old:
        return ()
    try:
        return advice.review(spec.admitted(_named(old, request)), around).refusals
    except TaktlineError:
        return ()


def _named(body: Json, request: Json) -> Json:
    """The object with name and namespace, which a create may leave to its path."""
    metadata = {"namespace": request.get("namespace", "default"), "name": request.get("name", "")}
    return body | {"metadata": metadata | body.get("metadata", {})}


def _short(warning: str) -> str:
    return warning if len(warning) <= MAX_WARNING else warning[: MAX_WARNING - 3] + "..."


class Webhook:
    """The listener of one process.

    Attributes:
        problem: why it cannot serve; empty once it does.
        context: the TLS context, with the certificate in use.
    """

    def __init__(
        self,
        surveyor: Surveyor,
        source: Certificates,
        *,
        look_s: float = LOOK_S,
        count: Callable[[str], None] = lambda result: None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`count` is told the result of each review: allowed, refused or malformed."""
        self.problem = "the admission webhook has no certificate yet"
        self.context = Context()
        self._surveyor = surveyor
        self._certificates = source
        self._look_s = look_s
        self._count = count
        self._clock = clock
        self._runner: web.AppRunner | None = None

    async def serve(self, listen: str) -> None:
        """Look after the certificate for ever, and answer on `host:port` once there is one.

        Raises:
            TaktlineError: CONFIG_INVALID; the address is not host:port or cannot be bound.
        """
        said = ""
        while True:
            wrong = await self._look()
            days = self._days_left()
            if days is not None and days <= 0.0:  # no API server shakes hands with it any more
                wrong = f"its certificate ran out {-days:.1f} days ago; {wrong or 'nobody has renewed it'}"
            if self.context.certificate and self._runner is None:
                self._runner = await self._listen(listen)
                logger.info("admission webhook answers", extra={"listen": listen})
            usable = self._runner is not None and days is not None and days > 0.0
            self.problem = "" if usable else f"the admission webhook: {wrong}"
            if wrong != said:
                said = wrong
                if wrong:
                    logger.warning("admission webhook", extra={"cause": wrong})
            await asyncio.sleep(min(self._look_s, RETRY_S) if wrong else self._look_s)

    async def _look(self) -> str:
        try:
            return await self._certificates.look(self.context)
        except ApiError as error:
            return "another replica renews the certificate" if is_conflict(error) else str(error)

    async def _listen(self, listen: str) -> web.AppRunner:
        host, _, port = listen.rpartition(":")
        application = web.Application(client_max_size=MAX_BODY)
        application.router.add_post(PATH, self._answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=self.context.ssl).start()
        except (OSError, ValueError) as error:
            await runner.cleanup()
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"cannot listen on {listen!r}: {error}",
                "give a free HOST:PORT to --webhook-listen",
            ) from error
        return runner

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            review = await request.json()
            kind = review["request"]["kind"]["kind"]
            if kind != schema.KIND:
                raise ValueError(f"{kind} is not asked about here")
            answer = await reviewed(review, self._surveyor)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._count(MALFORMED)
            logger.warning("not a review that is answered here", extra={"cause": repr(error)})
            return web.Response(status=400, text=f"not an AdmissionReview of a {schema.KIND}: {error}\n")
        self._count(ALLOWED if answer["response"]["allowed"] else REFUSED)
        response = web.json_response(answer)
        # A connection for each: so reviews spread over replicas, and none waits on one that is gone.
        response.force_close()
        return response

    def levels(self) -> dict[str, float]:
        """Gauges by name, for Prometheus."""
        days = self._days_left()
        return {} if days is None else {metrics.OPERATOR_CERTIFICATE: days}

    def _days_left(self) -> float | None:
        """Days until the certificate in use runs out; None while there is none."""
        shown = self.context.certificate
        return certificates.days_left(shown, self._clock()) if shown else None

    async def close(self) -> None:
        """Stop answering, after the reviews in hand."""
        if self._runner is not None:
            await self._runner.cleanup()
