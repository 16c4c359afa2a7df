"""`taktline policies`: what a gateway serves."""

from __future__ import annotations

import msgspec
import typer

from taktline.commands.options import DEFAULT_URL, AsJson, CaFile, ClientCert, KeyFile, Url


def policies(
    url: Url = DEFAULT_URL,
    api_key_file: KeyFile = "",
    ca_file: CaFile = "",
    client_cert: ClientCert = "",
    as_json: AsJson = False,
) -> None:
    """List the policies that a gateway serves."""
    from taktline.access import Access
    from taktline.robot import list_policies

    found = list_policies(url, Access(api_key_file=api_key_file, ca_file=ca_file, client_cert=client_cert))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    if not found.policies:
        typer.echo(f"{url} serves no policies yet: apply a PolicyDeployment, or check the gateway's --routes")
        return
    for info in found.policies:
        if not info.action_dim:
            typer.echo(f"{info.policy}: not ready; no worker has come up yet, which would say what it wants to see")
            continue
        cameras = [*info.cameras, *(f"{camera} (optional)" for camera in info.optional_cameras)]
        state = "ready" if info.ready else "not ready"
        workers = "1 worker" if info.workers == 1 else f"{info.workers} workers"
        typer.echo(f"{info.policy}: {state}, {workers}, {info.family}, revision {info.revision}")
        typer.echo(f"  cameras    {', '.join(cameras)}")
        typer.echo(f"  state      {info.state_dim} numbers")
        period_ms = 1e3 * info.dt_s
        typer.echo(f"  chunk      {info.horizon} actions of {info.action_dim} numbers, one every {period_ms:g} ms")
        times = ", ".join(f"{time.median_ms:.1f} ms for {time.batch}" for time in info.t_sync)
        typer.echo(f"  T_sync     {times or 'not measured yet'}")
