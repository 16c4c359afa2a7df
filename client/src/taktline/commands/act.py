"""`taktline act`: one observation from files, for a first look at a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from taktline_protocol import ErrorCode, TaktlineError

from taktline.commands.options import DEFAULT_URL, AsJson, CaFile, ClientCert, KeyFile, Url


def act(
    policy: Annotated[str, typer.Option(help="Name of the policy (see `taktline policies`).")],
    instruction: Annotated[str, typer.Option(help="The task in words.")],
    camera: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE, a JPEG or PNG; once for each camera.", metavar="NAME=FILE")
    ] = None,
    state: Annotated[str, typer.Option(help="State vector: numbers separated by commas.")] = "",
    budget_ms: Annotated[float, typer.Option(min=0.0, help="Time left until the hand-off deadline.")] = 1000.0,
    seed: Annotated[int | None, typer.Option(help="Fixes the sampler's noise.")] = None,
    imagine: Annotated[
        Path | None, typer.Option(help="Ask a world-action model for its imagined video, and write it as MP4.")
    ] = None,
    robot_id: Annotated[str, typer.Option(help="Name of the robot.")] = "taktline-act",
    url: Url = DEFAULT_URL,
    api_key_file: KeyFile = "",
    ca_file: CaFile = "",
    client_cert: ClientCert = "",
    as_json: AsJson = False,
) -> None:
    """Send one observation to a policy and print the chunk."""
    from taktline_protocol.messages import Imagine

    from taktline.access import Access
    from taktline.chunk import Chunk
    from taktline.robot import ANSWER_TIMEOUT_S, Robot

    if imagine is not None and not imagine.parent.is_dir():  # said before a worker has made the video
        raise typer.BadParameter(f"there is no folder {imagine.parent}", param_hint="--imagine")
    images = dict(_camera(text) for text in camera or [])
    access = Access(api_key_file=api_key_file, ca_file=ca_file, client_cert=client_cert)
    wanted = Imagine(format="mp4") if imagine is not None else None
    # Who gives a longer budget waits for the answer as long.
    timeout_s = max(ANSWER_TIMEOUT_S, budget_ms / 1e3)
    with Robot(url, policy, robot_id, access=access, answer_timeout_s=timeout_s) as robot:
        chunk: Chunk = robot.act(images, _state(state), instruction, budget_ms, seed=seed, imagine=wanted)
    if imagine is not None and chunk.imagined is not None:
        _write(imagine, chunk.imagined.parts[0])
    if as_json:
        shown = {
            **{key: value for key, value in vars(chunk).items() if key not in ("actions", "imagined")},
            "actions": chunk.actions.tolist(),
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
        return
    times = chunk.timings
    typer.echo(f"{chunk.policy} revision {chunk.revision}, worker {chunk.worker}, batch of {chunk.batch_size}")
    typer.echo(
        f"observe {times.observe_ms:.1f} + transfer {times.transfer_ms:.1f} + queue {times.queue_ms:.1f}"
        f" + inference {times.inference_ms:.1f} + actuate {times.actuate_ms:.1f} ms"
        f" = L_critical {times.critical_ms:.1f} ms; margin {chunk.margin_ms:.1f} ms"
    )
    typer.echo(f"{len(chunk.actions)} actions of {chunk.actions.shape[1]} numbers, one every {1e3 * chunk.dt_s:g} ms:")
    for index, row in enumerate(chunk.actions):
        typer.echo(f"{index:4d}  " + " ".join(f"{value:9.4f}" for value in row))
    if imagine is not None and chunk.imagined is not None:
        typer.echo(f"imagined video, {chunk.imagined.fps:g} frames a second: {imagine}")


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise TaktlineError(
            ErrorCode.INTERNAL, f"{path} cannot be written: {error.strerror}", "check the path after --imagine"
        ) from error


def _camera(text: str) -> tuple[str, bytes]:
    name, _, file = text.partition("=")
    if not name or not file:
        raise typer.BadParameter(f"{text!r} is not NAME=FILE", param_hint="--camera")
    try:
        return name, Path(file).read_bytes()
    except OSError as error:
        raise TaktlineError(
            ErrorCode.IMAGE_CORRUPT, f"{file} cannot be read: {error.strerror}", "check the path after --camera NAME="
        ) from error


def _state(text: str) -> list[float]:
    try:
        return [float(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers; write 0.1,-0.2", param_hint="--state") from error
