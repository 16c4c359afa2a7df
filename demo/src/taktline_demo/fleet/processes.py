"""Starts one process a robot, listens to them, and gathers their reports."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import Any

from taktline import Robot
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.messages import PolicyInfo

from taktline_demo.arm import CAMERAS, JOINTS
from taktline_demo.fleet.records import FleetRun, RobotReport
from taktline_demo.task import CONTROL_PERIOD_S, HORIZON

PICTURE_PIXELS = 280
_START_TIMEOUT_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True)
class FleetOptions:
    """What to run: `robots` robots with `episodes` episodes each, seeded one after the other from `seed`."""

    url: str
    policy: str
    robots: int
    episodes: int
    seed: int


@dataclass(frozen=True)
class Progress:
    """What a robot is doing, sent at every change: words for the live table and its report so far."""

    index: int
    doing: str
    report: RobotReport


@dataclass(frozen=True)
class _Finished:
    index: int
    report: RobotReport


@dataclass(frozen=True)
class _Failed:
    index: int
    code: str
    message: str
    next_step: str


def robot_name(index: int) -> str:
    """Name of robot `index`, unique in the fleet."""
    return f"arm-{index + 1}"


def check_policy(options: FleetOptions) -> PolicyInfo:
    """Asks the gateway what the policy wants to see.

    Raises:
        TaktlineError: where the gateway cannot be reached, the policy is unknown or not ready, or is not for this arm.
    """
    with Robot(options.url, options.policy, "fleet-check") as robot:
        info = robot.info()
    if not info.ready:
        raise TaktlineError(
            ErrorCode.WORKER_UNAVAILABLE,
            f"policy {options.policy!r} has no ready worker",
            "wait until `taktline policies` shows it ready",
        )
    wanted = (set(CAMERAS), len(JOINTS), len(JOINTS), HORIZON)
    offered = (set(info.cameras), info.state_dim, info.action_dim, info.horizon)
    if wanted != offered or abs(info.dt_s - CONTROL_PERIOD_S) > 1e-6:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"policy {options.policy!r} is not for this arm: cameras {sorted(info.cameras)}, state {info.state_dim}, "
            f"actions {info.horizon}x{info.action_dim} every {1000 * info.dt_s:.0f} ms",
            f"serve demo/checkpoint: cameras {sorted(CAMERAS)}, state {len(JOINTS)}, actions {HORIZON}x{len(JOINTS)} "
            f"every {1000 * CONTROL_PERIOD_S:.0f} ms",
        )
    return info


def run_fleet(options: FleetOptions, listen: Callable[[Progress], None] = lambda progress: None) -> FleetRun:
    """Runs the fleet to its end; `listen` hears every change of every robot.

    Raises:
        TaktlineError: where `check_policy` refuses, or a robot fails; the others are stopped then.
    """
    info = check_policy(options)
    context = multiprocessing.get_context("spawn")  # a fork would share OpenGL and connections
    messages: Any = context.Queue()
    together: Any = context.Barrier(options.robots)
    processes = [
        context.Process(target=_robot_process, args=(index, options, messages, together), daemon=True)
        for index in range(options.robots)
    ]
    for process in processes:
        process.start()
    reports: dict[int, RobotReport] = {}
    try:
        while len(reports) < options.robots:
            message = _next_message(messages, processes, reports)
            if isinstance(message, _Failed):
                raise TaktlineError(ErrorCode(message.code), message.message, message.next_step)
            if isinstance(message, _Finished):
                reports[message.index] = message.report
            elif message is not None:
                listen(message)
        for process in processes:
            process.join(timeout=_START_TIMEOUT_S)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    robots = [reports[index] for index in range(options.robots)]
    return FleetRun(options.url, options.policy, info.revision, options.seed, CONTROL_PERIOD_S, robots)


def _next_message(
    messages: Any, processes: list[SpawnProcess], reports: dict[int, RobotReport]
) -> Progress | _Finished | _Failed | None:
    try:
        message: Progress | _Finished | _Failed = messages.get(timeout=_POLL_S)
    except queue.Empty:
        dead = [index for index, process in enumerate(processes) if process.exitcode and index not in reports]
        if not dead:
            return None
        code = processes[dead[0]].exitcode
        return _Failed(
            dead[0],
            ErrorCode.INTERNAL.value,
            f"{robot_name(dead[0])} died with exit status {code}",
            "see its message above",
        )
    return message


def _robot_process(index: int, options: FleetOptions, messages: Any, together: Any) -> None:
    report = RobotReport(robot_name(index))
    try:
        _run_robot(index, options, report, messages, together)
    except TaktlineError as error:
        messages.put(_Failed(index, error.code.value, f"{report.robot}: {error.message}", error.next_step))
        together.abort()
    except threading.BrokenBarrierError:
        pass  # another robot could not start and has said why
    except KeyboardInterrupt:
        pass  # the parent process stops the fleet
    else:
        messages.put(_Finished(index, report))


def _run_robot(index: int, options: FleetOptions, report: RobotReport, messages: Any, together: Any) -> None:
    # Here and not above: the parent process draws tables and needs no simulator.
    from taktline_demo.environment import ReachEnvironment
    from taktline_demo.fleet.control_loop import ControlLoop
    from taktline_demo.jpeg import encode_jpeg

    environment = ReachEnvironment()
    environment.frames()  # opens the cameras, which takes longer than a control period
    with Robot(options.url, options.policy, report.robot) as client:
        loop = ControlLoop(
            environment, client, report, lambda doing: messages.put(Progress(index, doing, _without_details(report)))
        )
        together.wait(timeout=_START_TIMEOUT_S)
        for episode in range(options.episodes):
            loop.run_episode(options.seed + index * options.episodes + episode)
        loop.close()
        report.transport, report.bytes_sent = client.metrics.transport, client.metrics.bytes_sent
    report.picture = encode_jpeg(environment.picture(PICTURE_PIXELS))
    environment.close()


def _without_details(report: RobotReport) -> RobotReport:
    """A small snapshot: the live table needs the counts and the latest chunk only."""
    return RobotReport(
        report.robot,
        report.requests,
        report.misses,
        dict(report.errors),
        report.running_s,
        report.chunks[-1:],
        [],
        list(report.episodes),
    )
