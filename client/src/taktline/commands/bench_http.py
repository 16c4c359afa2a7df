"""`taktline bench-http`: load a gateway, over REST or the timed stream, and say what its robots would have felt."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from taktline_protocol import ErrorCode, TaktlineError

from taktline.commands.options import DEFAULT_URL, CaFile, ClientCert, KeyFile, Url

if TYPE_CHECKING:
    from taktline.load import Load, Outcome


def bench_http(
    policy: Annotated[str, typer.Option(help="Name of the policy (see `taktline policies`).")],
    clients: Annotated[int, typer.Option(min=1, help="Robots, each with one request at a time.")] = 4,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds.")] = 10.0,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second over all robots; closed loop where absent.")
    ] = None,
    budget_ms: Annotated[float, typer.Option(min=0.0, help="Control budget of each request.")] = 1000.0,
    image: Annotated[Path | None, typer.Option(help="JPEG or PNG for every camera; raw noise where absent.")] = None,
    side: Annotated[int, typer.Option(min=1, help="Pixels a side of the raw noise.")] = 224,
    stream: Annotated[
        bool, typer.Option("--stream", help="Over the timed stream, with the SDK's own robot; REST where absent.")
    ] = False,
    still: Annotated[
        bool, typer.Option("--still", help="The noise never changes, so that a stream sends it by reference.")
    ] = False,
    instruction: Annotated[str, typer.Option(help="The task in words.")] = "reach the red block",
    output: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
    url: Url = DEFAULT_URL,
    api_key_file: KeyFile = "",
    ca_file: CaFile = "",
    client_cert: ClientCert = "",
) -> None:
    """Load a gateway and print throughput, latency, the five terms and deadline misses.

    Each robot has one connection and one request at a time. With --stream it is a session of the timed stream; its
    cameras change with every observation, unless --still or --image says otherwise.
    """
    from taktline.access import Access
    from taktline.load import Load, run_load
    from taktline.robot import Robot

    frame = _read(image) if image is not None else None
    if output is not None and not output.parent.is_dir():
        raise _unwritable(output, "there is no such folder")
    access = Access(api_key_file=api_key_file, ca_file=ca_file, client_cert=client_cert)
    with Robot(url, policy, "bench", access=access) as robot:
        info = robot.info()
    if not info.ready:
        raise TaktlineError(
            ErrorCode.WORKER_UNAVAILABLE,
            f"no worker of policy {policy!r} is ready",
            "wait until `taktline policies` shows it ready",
        )
    load = Load(
        url=url,
        info=info,
        clients=clients,
        duration_s=duration,
        budget_ms=budget_ms,
        instruction=instruction,
        rate_hz=rate,
        frame=frame,
        side=side,
        stream=stream,
        still=still,
        access=access,
    )
    outcome = run_load(load)
    figures = _figures(load, outcome)
    _print(figures)
    if output is not None:
        try:
            output.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2))
        except OSError as error:
            raise _unwritable(output, error.strerror or str(error)) from error
    if not outcome.answered:
        raise typer.Exit(1)


def _read(image: Path) -> bytes:
    try:
        return image.read_bytes()
    except OSError as error:
        raise TaktlineError(
            ErrorCode.IMAGE_CORRUPT, f"{image} cannot be read: {error.strerror}", "check the path after --image"
        ) from error


def _unwritable(output: Path, reason: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.CONFIG_INVALID, f"{output} cannot be written: {reason}", "check the path after --output"
    )


def _figures(load: Load, outcome: Outcome) -> dict[str, Any]:
    from taktline.load import TERMS, percentile

    def spread(values: list[float]) -> dict[str, float | None]:
        if not values:
            return {"p50": None, "p99": None, "p99_9": None}
        return {name: round(percentile(values, share), 3) for name, share in _SHARES.items()}

    asked = outcome.answered + sum(outcome.errors.values())
    shown = outcome.cameras_whole + outcome.cameras_referenced
    return {
        "bench": "bench-http",
        "transport": "stream" if load.stream else "http",
        "policy": load.info.policy,
        "revision": load.info.revision,
        "clients": load.clients,
        "rate_hz": load.rate_hz,
        "budget_ms": load.budget_ms,
        "frame": "file" if load.frame is not None else f"raw {load.side}x{load.side}",
        "cameras": len(load.info.cameras),
        "elapsed_s": round(outcome.elapsed_s, 3),
        "answered": outcome.answered,
        "answers_per_s": round(outcome.answered / outcome.elapsed_s, 2),
        "latency_ms": spread(outcome.latencies_ms),
        "terms_ms": {term.removesuffix("_ms"): spread(outcome.terms_ms[term]) for term in TERMS},
        "margin_ms": {
            "p50": _rounded(percentile(outcome.margins_ms, 0.5)),
            "p1": _rounded(percentile(outcome.margins_ms, 0.01)),
        },
        "misses": outcome.misses,
        "errors": dict(outcome.errors),
        "kib_per_request": round(outcome.bytes_sent / 1024 / max(1, asked), 2),
        "cameras_referenced": round(outcome.cameras_referenced / max(1, shown), 4),
        "mean_batch": round(sum(outcome.batches) / max(1, len(outcome.batches)), 2),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["taktline", *sys.argv[1:]]),
    }


_SHARES = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999}


def _rounded(value: float) -> float | None:
    return None if value != value else round(value, 3)


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    mode = "closed loop" if figures["rate_hz"] is None else f"{figures['rate_hz']:g} requests/s"
    console = Console()
    console.print(
        f"{figures['policy']}: {figures['clients']} robots over {figures['transport']}, {mode},"
        f" {figures['cameras']} cameras {figures['frame']}, budget {figures['budget_ms']:g} ms,"
        f" {figures['elapsed_s']:.1f} s"
    )
    table = Table("ms", "p50", "p99", "p99.9")
    rows = {"round trip": figures["latency_ms"], **figures["terms_ms"]}
    for name, values in rows.items():
        table.add_row(name, *("" if value is None else f"{value:.2f}" for value in values.values()))
    console.print(table)
    errors = ", ".join(f"{code} {count}" for code, count in figures["errors"].items()) or "none"
    margins = figures["margin_ms"]
    margin = "none" if margins["p50"] is None else f"p50 {margins['p50']:.1f} ms, p1 {margins['p1']:.1f} ms"
    console.print(
        f"{figures['answered']} chunks, {figures['answers_per_s']:.1f}/s, mean batch {figures['mean_batch']:.2f},"
        f" {figures['kib_per_request']:.1f} KiB a request, {100 * figures['cameras_referenced']:.0f}% of the camera"
        " frames by reference;"
        f" {figures['misses']} late; errors: {errors}; margin {margin}"
    )
