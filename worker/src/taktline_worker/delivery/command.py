"""`taktline model`: fetch, verify, list and prune the checkpoints of a node. `taktline-worker model` is the same."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from taktline_protocol.delivery import DeliveryConfig, DeliveryProgress, Source

    from taktline_worker.delivery.cache import Cache, Record

app = typer.Typer(
    help="Bring checkpoints to this node, and look after those that are here.",
    no_args_is_help=True,
    add_completion=False,
)

EXIT_REFUSED = 2
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

CacheOption = Annotated[
    Path,
    typer.Option("--cache", envvar="TAKTLINE_MODEL_CACHE", help="Folder of this node's checkpoints."),
]
DEFAULT_CACHE = Path.home() / ".cache" / "taktline" / "models" if "HOME" in os.environ else Path("models")


@app.callback()
def model() -> None:
    """Bring checkpoints to this node, and look after those that are here."""


@app.command()
def fetch(
    cache: CacheOption = DEFAULT_CACHE,
    config: Annotated[Path | None, typer.Option(help="delivery.json, as the operator writes it.")] = None,
    url: Annotated[str, typer.Option(help="Folder of an HTTP mirror, or an archive.")] = "",
    s3: Annotated[str, typer.Option(help="s3://BUCKET/PREFIX; credentials from AWS_ACCESS_KEY_ID and so on.")] = "",
    endpoint: Annotated[
        str, typer.Option(help="Base URL of the S3-compatible service, or of a mirror of the hub.")
    ] = "",
    region: Annotated[str, typer.Option(help="Region of the bucket.")] = "us-east-1",
    virtual_host: Annotated[bool, typer.Option("--virtual-host", help="The bucket is part of the host name.")] = False,
    hub: Annotated[str, typer.Option(help="REPO@COMMIT of a model hub; token from TAKTLINE_MODEL_TOKEN.")] = "",
    layout: Annotated[str, typer.Option(help="Manifest, Listed, Index or Archive.")] = "Manifest",
    sha256: Annotated[str, typer.Option(help="Digest of SHA256SUMS or of the archive.")] = "",
    file: Annotated[list[str] | None, typer.Option(help="NAME=SHA256 of a file; may be repeated.")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM of a certificate authority to trust besides the usual.")] = None,
    parallel: Annotated[int, typer.Option(min=1, max=32, help="Files at a time.")] = 4,
    deadline_s: Annotated[float, typer.Option(help="Seconds that all of it may take.")] = 3600.0,
    cache_limit: Annotated[str, typer.Option(help="Prune unused checkpoints beyond this first, such as 500G.")] = "0",
    status_listen: Annotated[str, typer.Option(help="HOST:PORT that answers GET /progress.")] = "",
    stall_s: Annotated[float, typer.Option(help="Seconds without a byte until a connection is given up.")] = 30.0,
    spare: Annotated[str, typer.Option(help="Disk space to leave free.")] = "64Mi",
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of the folder.")] = False,
) -> None:
    """Fetch a checkpoint unless it is here, and print its folder. Interrupted, it goes on where it was.

    Exit code 2 with one line on stderr where it cannot be had: the code, what is wrong, and what to do.
    """
    import msgspec
    from taktline_protocol import logs
    from taktline_protocol.delivery import DeliveryConfig

    from taktline_worker.delivery import fetch as fetching
    from taktline_worker.delivery import progress as telling
    from taktline_worker.delivery.cache import Cache
    from taktline_worker.delivery.remote import RETRIES, Patience
    from taktline_worker.lifecycle import split_address

    logs.configure("worker", "INFO")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request, address and all
    if sys.stderr.isatty():
        logging.getLogger(RETRIES).setLevel(logging.ERROR)  # a person reads of each one in a line of the progress
    if config is not None:
        wanted = _read(config)
    else:
        wanted = DeliveryConfig(
            source=_source(url=url, s3=s3, hub=hub, endpoint=endpoint, region=region, path_style=not virtual_host,
                           layout=layout, sha256=sha256),
            sha256=dict(_pair(item) for item in file or []),
            parallel=parallel,
            deadline_s=deadline_s,
            cache_bytes=_bytes(cache_limit),
        )  # fmt: skip
        wanted = msgspec.convert(msgspec.to_builtins(wanted), DeliveryConfig)
    found = telling.Progress(_say)
    if status_listen:
        telling.serve(found, *split_address(status_listen))
    record = fetching.fetch(
        wanted,
        Cache(cache),
        found,
        patience=Patience(stall_s=stall_s),
        authority=ca,
        spare_bytes=_bytes(spare),
    )
    folder = Cache(cache).model(record.key)
    typer.echo(msgspec.json.encode(record).decode() if as_json else str(folder))


@app.command()
def verify(
    keys: Annotated[list[str] | None, typer.Argument(help="Keys of `list`; all where none is given.")] = None,
    cache: CacheOption = DEFAULT_CACHE,
) -> None:
    """Read checkpoints again and compare every file with its digest; exit 1 where one differs.

    What differs is no longer given to other checkpoints, nor to a fetch: that brings it anew.
    """
    from taktline_worker.delivery.cache import Cache

    place = Cache(_known(cache))
    bad = 0
    records = _chosen(place.records(), keys)
    if not records:
        typer.echo(f"there is no checkpoint in {cache}")
    for record in records:
        for file in record.files:
            path = place.model(record.key) / file.name
            actual = _digest(path) if path.is_file() else "nothing"
            if actual != file.sha256:
                bad += 1
                typer.echo(f"{record.key}: {file.name} has sha256 {actual}, expected {file.sha256}")
                _forget(place, file.sha256)
        typer.echo(f"{record.key}: {len(record.files)} files, {record.size:,} bytes of {record.source} read")
    if bad:
        typer.echo(f"{bad} files differ: delete their folder in {cache}/models and fetch again")
        raise typer.Exit(1)


@app.command("list")
def list_models(
    cache: CacheOption = DEFAULT_CACHE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the checkpoints that are here, the longest unused first."""
    import datetime

    import msgspec

    from taktline_worker.delivery.cache import Cache
    from taktline_worker.delivery.prune import in_use, used_at

    place = Cache(_known(cache))
    records = sorted(place.records(), key=lambda record: used_at(place, record.key))
    if as_json:
        rows = [
            msgspec.to_builtins(record) | {"used_at": used_at(place, record.key), "in_use": in_use(place, record.key)}
            for record in records
        ]
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode())
        return
    typer.echo(f"{'key':<32} {'size':>9} {'last asked for':<16} {'in use':<6} policy revision source")
    for record in records:
        when = datetime.datetime.fromtimestamp(used_at(place, record.key)).astimezone().strftime("%Y-%m-%d %H:%M")
        used = "yes" if in_use(place, record.key) else "no"
        about = f"{record.policy or '-'} {record.revision or '-'} {record.source}"
        typer.echo(f"{record.key:<32} {_human(record.size):>9} {when:<16} {used:<6} {about}")
    typer.echo(f"{_human(sum(record.size for record in records))} in {cache}, {_human(place.free_bytes())} free")


@app.command()
def prune(
    limit: Annotated[
        str, typer.Option(help="What may be left, such as 500G; 0 leaves only what is or was just in use.")
    ],
    cache: CacheOption = DEFAULT_CACHE,
    min_age_s: Annotated[float, typer.Option(help="Keep what was asked for less than so many seconds ago.")] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove checkpoints that nothing uses, the longest unused first, until no more than LIMIT is left."""
    from taktline_worker.delivery.cache import Cache
    from taktline_worker.delivery.prune import IDLE_S
    from taktline_worker.delivery.prune import prune as remove

    limit_bytes = _bytes(limit)
    idle_s = min(IDLE_S, min_age_s)
    result = remove(Cache(_known(cache)), limit_bytes, min_age_s=min_age_s, idle_s=idle_s, dry_run=dry_run)
    for record in result.removed:
        verb = "would remove" if dry_run else "removed"
        typer.echo(f"{verb} {record.key} {_human(record.size)} {record.policy or '-'} {record.revision or '-'}")
    for key in result.in_use:
        typer.echo(f"kept {key}: it is in use")
    for key, rest_s in result.resting.items():
        typer.echo(f"kept {key}: a container may be about to open it again; ask once more in {rest_s:.0f} s")
    for key, age_s in result.recent.items():
        typer.echo(f"kept {key}: it was asked for {age_s:.0f} s ago, less than --min-age-s {min_age_s:g}")
    typer.echo(f"{_human(result.freed_bytes)} freed, {_human(result.left_bytes)} left")


def main(arguments: Sequence[str]) -> int:
    """The same for `taktline-worker model ...`; returns the exit code."""
    from taktline_protocol import TaktlineError

    # The first process of a container ignores what it does not handle, and would fetch on until it is killed.
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        app(args=list(arguments), prog_name="taktline-worker model")
    except TaktlineError as error:
        print(f"taktline-worker: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except SystemExit as done:
        return int(done.code or 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _leave(number: int, frame: object) -> NoReturn:
    """Ends at once: what came is kept, and the kernel lets go of the locks."""
    del frame
    os._exit(128 + number)


def _forget(place: Cache, sha256: str) -> None:
    """Takes the cache's own copy of a file away where it is no more what its name says."""
    for kept in (place.blob(sha256), *place.held(sha256)):
        if kept.is_file() and _digest(kept) != sha256:
            kept.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(path: Path) -> DeliveryConfig:
    import msgspec
    from taktline_protocol.delivery import DeliveryConfig

    try:
        return msgspec.json.decode(path.read_bytes(), type=DeliveryConfig)
    except (OSError, msgspec.MsgspecError) as error:
        _invalid(f"{path} is no delivery: {error}", "the operator writes this file; see docs/model-delivery.md")


def _source(
    *, url: str, s3: str, hub: str, endpoint: str, region: str, path_style: bool, layout: str, sha256: str
) -> Source:
    from taktline_protocol.delivery import HttpSource, HubSource, S3Source

    if sum(map(bool, (url, s3, hub))) != 1:
        _invalid("where from is not clear", "give exactly one of --config, --url, --s3 and --hub")
    if layout not in ("Manifest", "Listed", "Index", "Archive"):
        _invalid(f"there is no layout {layout}", "one of Manifest, Listed, Index, Archive")
    if hub:
        repo, _, revision = hub.partition("@")
        if not re.fullmatch("[0-9a-f]{40}", revision):
            _invalid(f"{hub!r} names no commit", "write REPO@COMMIT with its 40 hex digits: branches and tags move")
        return HubSource(repo=repo, revision=revision, endpoint=endpoint)
    if sha256 and not re.fullmatch("[0-9a-f]{64}", sha256):
        _invalid(f"{sha256!r} is no sha256", "64 lower-case hex digits, as sha256sum prints them")
    if url:
        return HttpSource(url=url, layout=layout, sha256=sha256)  # type: ignore[arg-type]  # checked above
    place = re.fullmatch(r"s3://([^/]+)/?(.*)", s3)
    if place is None:
        _invalid(f"{s3!r} is no bucket", "write s3://BUCKET/PREFIX")
    return S3Source(
        bucket=place.group(1),
        prefix=place.group(2),
        endpoint=endpoint,
        region=region,
        path_style=path_style,
        layout=layout,  # type: ignore[arg-type]  # checked above
        sha256=sha256,
    )


def _pair(item: str) -> tuple[str, str]:
    name, _, digest = item.rpartition("=")
    if not name or not re.fullmatch("[0-9a-f]{64}", digest):
        _invalid(f"--file {item!r} names no digest", "write NAME=SHA256, 64 lower-case hex digits")
    return name, digest


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        _invalid(f"{text!r} is no size", "write bytes, or a number with k, M, G, T, Ki, Mi, Gi or Ti")
    return int(float(match.group(1)) * _UNITS[match.group(2) or ""])


def _human(size: int) -> str:
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _known(folder: Path) -> Path:
    """The folder, unless it is absent or another's: a mistyped name is no empty cache, and gets no subfolders."""
    from taktline_protocol.delivery import MODELS_FOLDER

    with contextlib.suppress(OSError):  # `Cache` says what is wrong with a folder that cannot be read
        if not folder.exists() or (folder.is_dir() and any(folder.iterdir()) and not (folder / MODELS_FOLDER).is_dir()):
            _invalid(
                f"{folder} is no model cache",
                "name it with --cache or TAKTLINE_MODEL_CACHE; `taktline model fetch` makes one",
            )
    return folder


def _chosen(records: list[Record], keys: list[str] | None) -> list[Record]:
    known = {record.key: record for record in records}
    for key in keys or []:
        if key not in known:
            _invalid(f"there is no checkpoint {key} here", "`taktline model list` names them")
    return [known[key] for key in keys] if keys else records


def _invalid(message: str, next_step: str) -> NoReturn:
    from taktline_protocol import ErrorCode, TaktlineError

    raise TaktlineError(ErrorCode.CONFIG_INVALID, message, next_step)


def _say(progress: DeliveryProgress) -> None:
    rate = f", {_human(int(progress.bytes_per_s))}/s" if progress.bytes_per_s else ""
    files = f", {progress.done_files} of {progress.total_files} files" if progress.total_files else ""
    total = f" {progress.percent}% of {_human(progress.total_bytes)}" if progress.total_bytes else ""
    trouble = f"; trying again: {progress.trouble}" if progress.trouble else ""
    print(f"{progress.state}{total}{files}{rate}{trouble}", file=sys.stderr, flush=True)
