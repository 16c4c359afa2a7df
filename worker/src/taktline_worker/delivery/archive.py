"""Unpacks a verified tar file into the cache, one verified file after the other; nothing but plain files is taken."""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.delivery.cache import Cache, FileRecord, disk_full, is_no_room
from taktline_worker.delivery.names import MAX_FILES, checked_name, unsafe
from taktline_worker.delivery.progress import Progress
from taktline_worker.delivery.transfer import BLOCK

_MOST_HEADER = 1 << 18  # of what an archive says about one file, in bytes: a long name, times, rights, labels
_MOST_PADDING = 16 << 20  # zeros behind the end of an archive, in bytes; tools write up to a record of 10 KiB or so


class _Header(tarfile.TarInfo):
    """A header whose sizes are looked at before `tarfile` acts on them: it reads one about another whole."""

    _ABOUT_ANOTHER = (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """The header of a block. Raises TaktlineError MODEL_UNSAFE for a size that no archive needs."""
        found = super().frombuf(buf, encoding, errors)
        if found.size < 0 or (found.type in cls._ABOUT_ANOTHER and found.size > _MOST_HEADER):
            raise unsafe(f"the archive holds a header of {found.size:,} bytes")
        return found


def unpack(
    cache: Cache, archive: Path, key: str, expected: Mapping[str, str], limit: int, progress: Progress
) -> list[FileRecord]:
    """Brings the files of `archive` (tar, tar.gz, tar.bz2 or tar.xz) into the cache; returns them by name.

    A single folder around everything is left out of the names.

    Args:
        key: the checkpoint's.
        expected: digests of files by name.
        limit: bytes that all files may have together.

    Raises:
        TaktlineError: MODEL_UNSAFE for links, devices, bad names, too much; MODEL_MISMATCH; MODEL_ABSENT; DISK_FULL.
    """
    progress.state("verifying")
    staged = cache.partial(f"unpack-{key}")
    found: list[FileRecord] = []
    room = limit
    try:
        with tarfile.open(archive, "r:*", tarinfo=_Header) as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise unsafe(f"the archive holds {name[:200]!r}, which is a link, device or other special file")
                room -= member.size
                if room < 0:
                    raise unsafe(f"the archive holds more than the {limit:,} bytes that are allowed")
                if len(found) >= MAX_FILES:
                    raise unsafe(f"the archive holds more than {MAX_FILES} files")
                stream = tar.extractfile(member)
                assert stream is not None, "a regular file"
                found.append(_take(cache, staged, key, checked_name(name), stream))
            _require_end(tar)
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and is_no_room(error):
            raise disk_full(cache.folder, limit - room, f"unpacking {archive.name[:12]}… failed") from None
        if isinstance(error, OSError) and error.errno:
            raise
        raise unsafe(f"the archive cannot be read as tar: {error}") from error
    finally:
        staged.unlink(missing_ok=True)
    files = _without_common_folder(found)
    _check(files, expected)
    return files


def _require_end(tar: tarfile.TarFile) -> None:
    """Refuses an archive that stops in the middle: `tarfile` takes a header that it cannot read for the end of it.

    Behind the first block of zeros, which is read, comes a second one, and nothing but zeros. Reading on has a packer's
    checksum looked at, too.
    """
    assert tar.fileobj is not None, "open for reading"
    count = 0
    while block := tar.fileobj.read(BLOCK):
        count += len(block)
        if block.count(0) != len(block) or count > _MOST_PADDING:
            raise unsafe("the archive goes on behind what can be read of it: it is damaged")
    if count < tarfile.BLOCKSIZE:
        raise unsafe("the archive has no end: it was cut")


def _take(cache: Cache, staged: Path, key: str, name: str, stream: IO[bytes]) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    staged.unlink(missing_ok=True)
    with staged.open("xb") as target:
        while block := stream.read(BLOCK):
            digest.update(block)
            size += len(block)
            target.write(block)
    sha256 = digest.hexdigest()
    cache.accept(staged, sha256, key)
    return FileRecord(name=name, size=size, sha256=sha256)


def _without_common_folder(files: list[FileRecord]) -> list[FileRecord]:
    tops = {file.name.split("/")[0] for file in files}
    if len(tops) != 1 or any("/" not in file.name for file in files):
        return files
    around = len(tops.pop()) + 1
    return [FileRecord(name=file.name[around:], size=file.size, sha256=file.sha256) for file in files]


def _check(files: list[FileRecord], expected: Mapping[str, str]) -> None:
    by_name = {file.name: file.sha256 for file in files}
    for name, digest in expected.items():
        if name not in by_name:
            raise TaktlineError(
                ErrorCode.MODEL_ABSENT, f"model.sha256 names {name!r}, which the archive does not have", "correct one"
            )
        if by_name[name] != digest:
            raise TaktlineError(
                ErrorCode.MODEL_MISMATCH,
                f"{name} in the archive has sha256 {by_name[name]}, expected {digest}",
                "put the right archive there, or correct the digest in spec.model",
            )
