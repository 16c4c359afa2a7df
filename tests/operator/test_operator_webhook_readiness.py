"""The webhook is ready while the API server can shake hands with it: a certificate that has run out is none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from taktline_operator import certificates
from taktline_operator.admission import Webhook
from taktline_operator.certifying import Context
from taktline_operator.surveying import Surveyor
from taktline_protocol import metrics

BEGAN = datetime(2026, 3, 1, tzinfo=UTC)


class Renewer:
    """Shows one certificate from the beginning on, and another one once it is told to renew."""

    def __init__(self) -> None:
        self.issued_at = BEGAN

    async def look(self, context: Context) -> str:
        stored = certificates.renewed(None, ["localhost"], b"", self.issued_at)
        if not context.certificate or self.issued_at != BEGAN:
            context.use(stored.certificate, stored.key)
        return ""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def test_an_expired_certificate_makes_the_webhook_unready_until_it_is_renewed() -> None:
    now = [BEGAN + timedelta(days=1)]
    source = Renewer()
    webhook = Webhook(cast(Any, Surveyor), source, look_s=0.02, clock=lambda: now[0])
    assert webhook.problem
    assert webhook.levels() == {}
    serving = asyncio.create_task(webhook.serve("127.0.0.1:0"))
    try:
        await until(lambda: not webhook.problem)
        assert round(webhook.levels()[metrics.OPERATOR_CERTIFICATE]) == 89
        now[0] = BEGAN + timedelta(days=92)
        await until(lambda: "ran out 2.0 days ago" in webhook.problem)
        assert webhook.levels()[metrics.OPERATOR_CERTIFICATE] < 0
        source.issued_at = now[0]
        await until(lambda: not webhook.problem)
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await webhook.close()
