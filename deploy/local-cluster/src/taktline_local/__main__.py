"""`python -m taktline_local`: the process node, a control plane to work against, and the cluster demo."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from taktline_protocol.errors import TaktlineError

from taktline_local import DEVICE_NOTICE
from taktline_local.cluster import Cluster
from taktline_local.cluster_demo import REPOSITORY, DemoOptions, run_demo
from taktline_local.logs import log_to_stderr
from taktline_local.node import NodeOptions, ProcessNode
from taktline_local.node_endpoint import EndpointTls

app = typer.Typer(
    help=f"Taktline on one machine, a {DEVICE_NOTICE}.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEMO_FILE = REPOSITORY / "deploy" / "examples" / "demo-reach.yaml"


def pairs(values: list[str], what: str) -> dict[str, str]:
    """`key=value` options as a dict."""
    for value in values:
        if "=" not in value:
            raise typer.BadParameter(f"{what} {value!r} is not key=value")
    return dict(value.split("=", 1) for value in values)


@app.command()
def node(
    kubeconfig: Annotated[Path, typer.Option(help="credentials of the node")],
    name: Annotated[str, typer.Option(help="name of the Node object")] = "process-node",
    label: Annotated[list[str] | None, typer.Option(help="key=value label; repeat")] = None,
    capacity: Annotated[list[str] | None, typer.Option(help="pretended resource, e.g. nvidia.com/gpu=1")] = None,
    folder: Annotated[Path | None, typer.Option(help="where Pods live; default a temporary folder")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="where ended Pods' logs are kept; default nowhere")] = None,
    restart_base_s: Annotated[float, typer.Option(help="first back-off of a crashing container")] = 1.0,
    serving_cert: Annotated[Path | None, typer.Option(help="certificate of the log endpoint")] = None,
    serving_key: Annotated[Path | None, typer.Option(help="its key")] = None,
    client_ca: Annotated[Path | None, typer.Option(help="authority of the API server's client certificate")] = None,
) -> None:
    """Run one process node until SIGTERM or Ctrl-C."""
    log_to_stderr()
    tls = None
    if serving_cert and serving_key and client_ca:
        tls = EndpointTls(serving_cert, serving_key, client_ca)
    options = NodeOptions(
        kubeconfig=kubeconfig,
        name=name,
        labels=pairs(label or [], "label"),
        capacity=pairs(capacity or [], "capacity"),
        folder=folder,
        log_folder=log_folder,
        tls=tls,
        restart_base_s=restart_base_s,
    )
    asyncio.run(run_node(options))


async def run_node(options: NodeOptions) -> None:
    """One process node on this event loop, until a signal."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await ProcessNode(options).run(stopping)


@app.command("control-plane")
def control_plane(
    log_folder: Annotated[Path | None, typer.Option(help="where logs go; default a new temporary folder")] = None,
) -> None:
    """Run a control plane with one process node until Ctrl-C, and print how to reach it."""
    logs = log_folder or Path(tempfile.mkdtemp(prefix="taktline-logs-"))
    with Cluster.open(logs) as cluster:
        child = cluster.start_node("process-node")
        typer.echo(f"export KUBECONFIG={cluster.kubeconfig}")
        if cluster.control_plane is not None:
            typer.echo(f"export PATH={cluster.control_plane.programs}:$PATH")
        typer.echo(f"# {DEVICE_NOTICE}; Ctrl-C ends it; logs: {logs}")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while child.exit_code() is None:
                time.sleep(0.5)
            typer.echo(f"error: the process node ended; its log is {child.log}", err=True)
        except KeyboardInterrupt:
            typer.echo("stopping", err=True)


@app.command("cluster-demo")
def cluster_demo(
    file: Annotated[Path, typer.Argument(help="PolicyDeployment YAML")] = DEMO_FILE,
    robots: Annotated[int, typer.Option(min=1, help="simulated robots in closed loop")] = 4,
    episodes: Annotated[int, typer.Option(min=1, help="episodes each robot plays")] = 3,
    seed: Annotated[int, typer.Option(help="seed of the robots' scenes")] = 0,
    report: Annotated[Path, typer.Option(help="where the HTML report goes")] = Path(".taktline/report.html"),
    log_folder: Annotated[Path | None, typer.Option(help="where logs go; default a new temporary folder")] = None,
) -> None:
    """Apply a PolicyDeployment with kubectl to a local control plane, let robots use it, delete it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = DemoOptions(
        file=file,
        robots=robots,
        fleet=("--episodes", str(episodes), "--seed", str(seed), "--report", str(report)),
        log_folder=log_folder or Path(tempfile.mkdtemp(prefix="taktline-logs-")),
    )
    if code := run_demo(options):
        raise SystemExit(code)


def main() -> int:
    """The command line; typed errors become one line and exit code 1."""
    try:
        app()
    except TaktlineError as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
