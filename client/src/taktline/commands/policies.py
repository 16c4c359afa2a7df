"""`taktline policies`: what a gateway serves."""

from __future__ import annotations

import msgspec
import typer

from taktline.commands.options import DEFAULT_URL, AsJson, Url


def policies(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the policies that a gateway serves."""
    from rich.console import Console
    from rich.table import Table

    from taktline.robot import list_policies

    found = list_policies(url)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    if not found.policies:
        typer.echo(f"{url} serves no policies yet: apply a PolicyDeployment, or check the gateway's --routes")
        return
    table = Table("policy", "family", "revision", "ready", "workers", "cameras", "state", "chunk", "T_sync(1) ms")
    for info in found.policies:
        cameras = [*info.cameras, *(f"{camera}?" for camera in info.optional_cameras)]
        table.add_row(
            info.policy,
            info.family,
            info.revision[:12],
            "yes" if info.ready else "no",
            str(info.workers),
            ", ".join(cameras),
            str(info.state_dim),
            f"{info.horizon} x {info.action_dim} @ {1e3 * info.dt_s:g} ms",
            f"{info.t_sync[0].median_ms:.1f}" if info.t_sync else "",
        )
    Console().print(table)
