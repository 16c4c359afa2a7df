"""The fleet on the terminal: a live table while it runs, the measured table at the end."""

from __future__ import annotations

from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from taktline_demo.fleet.processes import FleetOptions, Progress, robot_name
from taktline_demo.fleet.records import FleetRun, RobotReport


class LiveTable:
    """A context that redraws one row a robot; on a terminal that cannot redraw it prints one line an episode."""

    def __init__(self, options: FleetOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._rows = {
            index: Progress(index, "starting", RobotReport(robot_name(index))) for index in range(options.robots)
        }
        self._live = Live(self._table(), console=console, refresh_per_second=5, transient=True)

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, progress: Progress) -> None:
        """Takes in one robot's change."""
        before = len(self._rows[progress.index].report.episodes)
        self._rows[progress.index] = progress
        if self._console.is_terminal:
            self._live.update(self._table())
        elif len(progress.report.episodes) > before:
            episode = progress.report.episodes[-1]
            self._console.print(
                f"{progress.report.robot}: episode {len(progress.report.episodes)} of {self._options.episodes}, "
                f"{episode.instruction!r}: {progress.doing} in {episode.duration_s:.1f} s",
                highlight=False,
            )

    def _table(self) -> Table:
        table = Table(title=f"{self._options.robots} robots, policy {self._options.policy}, {self._options.url}")
        for heading in ("robot", "episode", "doing", "requests", "misses", "success", "last margin"):
            table.add_column(heading, justify="left" if heading in ("robot", "doing") else "right")
        for row in self._rows.values():
            report = row.report
            done = len(report.episodes)
            table.add_row(
                report.robot,
                f"{min(done + 1, self._options.episodes)}/{self._options.episodes}",
                row.doing,
                str(report.requests),
                str(report.misses),
                f"{report.successes}/{done}",
                f"{report.chunks[-1].margin_ms:.0f} ms" if report.chunks else "",
            )
        return table


def result_table(run: FleetRun) -> Table:
    """One row a robot: requests, chunk rate, the latency terms' medians, margins, misses, success; 80 columns wide."""
    table = Table(
        title=f"policy {run.policy}: {run.successes} of {len(run.episodes)} episodes reached the named block",
        caption="medians in ms; (refused requests); margin p99: 99 % of the chunks reach it; miss: a buffer ran dry"
        + (f"; sent by {run.transports}" if run.transports else ""),
        box=SIMPLE_HEAD,
        padding=0,
    )
    headings = (
        "robot",
        "\nrequests",
        "chunks\n/s",
        "L_\ntransfer",
        "L_\nqueue",
        "L_\ninference",
        "margin\np50 / p99",
        "\nmisses",
        "\nsuccess",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "robot" else "right", no_wrap=True)
    for robot in run.robots:
        table.add_row(
            robot.robot,
            f"{robot.requests} ({sum(robot.errors.values())})",
            f"{robot.chunk_rate_hz:.2f}",
            f"{robot.median('transfer_ms'):.1f}",
            f"{robot.median('queue_ms'):.1f}",
            f"{robot.median('inference_ms'):.1f}",
            f"{robot.margin_reached_by(0.5):.0f} / {robot.margin_reached_by(0.99):.0f}",
            str(robot.misses),
            f"{robot.successes}/{len(robot.episodes)}",
        )
    return table
