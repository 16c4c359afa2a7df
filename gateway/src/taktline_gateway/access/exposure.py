"""What this gateway lets whom do, said plainly at start; and the refusal to be open to a network by oversight."""

from __future__ import annotations

import ipaddress
import logging

from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.logs import log
from taktline_gateway.service import Settings

_logger = logging.getLogger(__name__)


def check_exposure(settings: Settings, host: str, *, allow_anonymous: bool) -> None:
    """Logs who may ask. Raises TaktlineError `config_invalid` where everyone could, from other machines, unsaid."""
    ports = settings.client_ports
    listens = (*ports.openpi, *ports.vla_eval, *ports.groot, *ports.lerobot)
    hosts = [host, *(listen.host for listen in listens)]
    exposed = sorted({name for name in hosts if not is_loopback(name)})
    if settings.access_file is not None:
        log(_logger, logging.INFO, "access", mode="keys", access_file=str(settings.access_file), hosts=hosts)
        return
    if exposed and not allow_anonymous:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"without --access-file everyone who reaches {', '.join(exposed)} could move the robots' policies",
            "give --access-file (make a key with `taktline-gateway new-key`), listen on 127.0.0.1, or say"
            " --allow-anonymous",
        )
    log(
        _logger,
        logging.WARNING,
        "access",
        mode="open",
        hosts=hosts,
        reason="no --access-file: everyone who reaches these addresses may ask every policy",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listening address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
