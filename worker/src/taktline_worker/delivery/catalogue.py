"""Which files a checkpoint has, with their digests: read from a manifest, an index, the hub, or the spec itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import httpx
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.delivery import DeliveryConfig, HttpSource, HubSource, S3Source, Source

from taktline_worker.delivery import hub, origins
from taktline_worker.delivery.names import checked_name, checked_names, unsafe
from taktline_worker.delivery.remote import Origin, Remote, place
from taktline_worker.delivery.transfer import RemoteFile

MANIFEST_FILE = "SHA256SUMS"
INDEX_FILE = "model.safetensors.index.json"
SMALL_BYTES = 16 << 20
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def files_of(config: DeliveryConfig, remote: Remote) -> list[RemoteFile]:
    """The files to fetch, the archive instead of what is in it; statistics of their own not among them.

    Raises:
        TaktlineError: what asking for a manifest, an index or a listing raises; MODEL_MISMATCH where the manifest is
            not the one that was named; MODEL_UNSAFE for names that are not taken; CONFIG_INVALID.
    """
    source = config.source
    if isinstance(source, HubSource):
        found = hub.files_of(source, remote)
        if source.include:
            found = [file for file in found if any(fnmatchcase(file.name, pattern) for pattern in source.include)]
        files = found
    else:
        origin = origins.of(source)
        files = _of_layout(config, source, origin, remote)
    checked_names(file.name for file in files)
    if not files:
        raise TaktlineError(
            ErrorCode.MODEL_ABSENT, "the source names no file of a checkpoint", "look at spec.model.source and sha256"
        )
    return _with_digests(files, config.sha256, archive=is_archive(config))


def is_archive(config: DeliveryConfig) -> bool:
    """Whether one file is fetched that holds all others."""
    return not isinstance(config.source, HubSource) and config.source.layout == "Archive"


def statistics_of(config: DeliveryConfig) -> RemoteFile | None:
    """The statistics file that comes from elsewhere; None where there is none."""
    wanted = config.statistics_file
    if wanted is None:
        return None
    credentials: Mapping[str, str] | None = None if _is_home(wanted.source, config.source) else {}
    return RemoteFile(checked_name(wanted.path), origins.of(wanted.source, credentials), "", sha256=wanted.sha256)


def _is_home(found: HttpSource | S3Source, home: Source) -> bool:
    """Whether a file comes from where the checkpoint does: the token of one place is not shown to another."""
    if isinstance(found, S3Source) or isinstance(home, S3Source):
        return isinstance(found, S3Source)
    base = hub.address(home) if isinstance(home, HubSource) else home.url
    return place(httpx.URL(found.url)) == place(httpx.URL(base))


def _of_layout(
    config: DeliveryConfig, source: HttpSource | S3Source, origin: Origin, remote: Remote
) -> list[RemoteFile]:
    if source.layout == "Archive":
        return [RemoteFile("archive.tar", origin, "", sha256=source.sha256)]
    names: Mapping[str, str]
    if source.layout == "Manifest":
        names = _manifest(source.sha256, origin, remote)
    else:
        names = dict(config.sha256)
        if source.layout == "Index":
            names = dict.fromkeys(_shards(config.sha256.get(INDEX_FILE, ""), origin, remote), "") | names
    return [RemoteFile(checked_name(name), origin, name, sha256=digest) for name, digest in names.items()]


def _manifest(expected: str, origin: Origin, remote: Remote) -> dict[str, str]:
    content, _ = remote.document(origin, MANIFEST_FILE, SMALL_BYTES)
    require_digest(content, expected, MANIFEST_FILE)
    return parse_manifest(content)


def parse_manifest(content: bytes) -> dict[str, str]:
    """Name -> digest of a file as `sha256sum` writes it.

    Raises:
        TaktlineError: MODEL_UNSAFE for a line of another form, or a name that is not taken.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise unsafe(f"line {number} of {MANIFEST_FILE} is not DIGEST, two spaces, NAME: {line[:120]!r}")
        name = match.group(2).removeprefix("./")
        if name == MANIFEST_FILE:
            continue  # of a list that was made while it was there
        if name in found:
            raise unsafe(f"{MANIFEST_FILE} names {name!r} twice")
        found[checked_name(name)] = match.group(1).lower()
    return found


def _shards(expected: str, origin: Origin, remote: Remote) -> list[str]:
    content, _ = remote.document(origin, INDEX_FILE, SMALL_BYTES)
    require_digest(content, expected, INDEX_FILE)
    try:
        weights = json.loads(content)["weight_map"]
        shards = sorted({str(name) for name in weights.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unsafe(f"{INDEX_FILE} is no index of safetensors files ({type(error).__name__})") from error
    return [INDEX_FILE, *shards]


def require_digest(content: bytes, expected: str, name: str) -> None:
    """Lets content with the expected SHA-256 pass; any where none is expected.

    Raises:
        TaktlineError: MODEL_MISMATCH with both digests.
    """
    actual = hashlib.sha256(content).hexdigest()
    if expected and actual != expected:
        raise TaktlineError(
            ErrorCode.MODEL_MISMATCH,
            f"{name} has sha256 {actual}, expected {expected}",
            "put the right one there, or correct the digest in spec.model",
        )


def _with_digests(files: list[RemoteFile], expected: Mapping[str, str], *, archive: bool) -> list[RemoteFile]:
    """The files with the digests that the spec names; those of an archive are checked when it is unpacked."""
    if archive:
        return files
    by_name = {file.name: file for file in files}
    if missing := sorted(expected.keys() - by_name.keys()):
        raise TaktlineError(
            ErrorCode.MODEL_ABSENT,
            f"model.sha256 names {missing[0]!r}, which the source does not have",
            "correct the name, or add the file to the source",
        )
    for name, digest in expected.items():
        file = by_name[name]
        if file.sha256 and file.sha256 != digest:
            raise TaktlineError(
                ErrorCode.MODEL_MISMATCH,
                f"the source says sha256 {file.sha256} of {name}, model.sha256 expects {digest}",
                "correct one of the two",
            )
        by_name[name] = RemoteFile(name, file.origin, file.remote, file.size, digest)
    return list(by_name.values())
