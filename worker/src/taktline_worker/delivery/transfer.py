"""Fetches one file: resumed where it was cut, verified while it streams, set aside where its digest is wrong."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.delivery.cache import Cache, FileRecord, disk_full, is_no_room, sync
from taktline_worker.delivery.names import unsafe
from taktline_worker.delivery.progress import Progress
from taktline_worker.delivery.remote import Head, Origin, PassingError, Remote, require_success, shown, validator

logger = logging.getLogger(__name__)

BLOCK = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass(frozen=True)
class RemoteFile:
    """One file to fetch.

    Attributes:
        name: path in the checkpoint folder.
        remote: its name at the origin.
        sha256: the digest that it must have; empty takes what comes.
        git_oid: digest as git names a file's content (SHA-1); empty checks none.
    """

    name: str
    origin: Origin
    remote: str
    size: int | None = None
    sha256: str = ""
    git_oid: str = ""

    @property
    def url(self) -> str:
        """Its address."""
        return self.origin.url(self.remote)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file that is being fetched, beside it on the disk."""

    url: str
    validator: str
    size: int | None


class Bad(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file whose digest was wrong."""

    url: str
    validator: str
    expected: str
    actual: str
    size: int
    seen_at: float


class Transfer:
    """One file on its way into the cache; `fetch` is called once, in any thread."""

    def __init__(
        self, cache: Cache, remote: Remote, progress: Progress, key: str, file: RemoteFile, limit: int
    ) -> None:
        """`key` is the checkpoint's; `limit` bounds the size of a file whose size nobody states, in bytes."""
        self._key = key
        self._cache = cache
        self._remote = remote
        self._progress = progress
        self._file = file
        self._limit = limit
        # By digest where it is known: another mirror may go on with it, and another revision may share it.
        self._name = file.sha256 or hashlib.sha256(file.url.encode()).hexdigest()
        self._path = cache.partial(f"{self._name}.part")
        self._note = cache.partial(f"{self._name}.json")
        self._hash = hashlib.sha256()
        self._have = 0
        self._part = Part(url="", validator="", size=None)
        self._resumed = False

    def fetch(self) -> FileRecord:
        """Brings the file into the cache; at once where it is there.

        Raises:
            TaktlineError: MODEL_MISMATCH with both digests; MODEL_ABSENT, MODEL_DENIED, MODEL_UNREACHABLE,
                MODEL_UNSAFE, DISK_FULL.
        """
        with self._cache.lock(f"file-{self._name[:32]}", self._remote.deadline, self._remote.require_go_on):
            known = self._known()
            if known is not None:
                self._progress.had(known.size)
                self._progress.file_done()
                return known
            try:
                self._refuse_known_bad()
                return self._fetch()
            except OSError as error:
                if not is_no_room(error):
                    raise
                # Ours goes, so that the node is not left full; what others use or resume stays.
                self._drop()
                needed = max(0, (self._part.size or self._file.size or 0))
                raise disk_full(
                    self._cache.folder, needed, f"writing {self._file.name} failed: {error.strerror}"
                ) from None

    def _known(self) -> FileRecord | None:
        size = self._cache.take(self._file.sha256, self._key) if self._file.sha256 else None
        return None if size is None else FileRecord(name=self._file.name, size=size, sha256=self._file.sha256)

    def _fetch(self) -> FileRecord:
        self._take_up()
        while True:
            self._remote.retrying(shown(self._file.url), self._attempt, lambda: self._have)
            actual = self._hash.hexdigest()
            if self._is_right(actual):
                with contextlib.suppress(FileNotFoundError):
                    self._note.unlink()
                self._cache.accept(self._path, actual, self._key)
                self._progress.file_done()
                return FileRecord(name=self._file.name, size=self._have, sha256=actual)
            if not self._resumed:
                raise self._set_aside(actual)
            # Only a whole download proves that the source is wrong: a lost page or a changed file may be in the middle.
            logger.warning("the resumed file has a wrong digest; fetching it whole", extra={"file": self._file.name})
            self._begin_anew()

    def _is_right(self, actual: str) -> bool:
        if self._file.sha256:
            return actual == self._file.sha256
        if not self._file.git_oid:
            return True
        found = hashlib.sha1(b"blob %d\0" % self._have, usedforsecurity=False)
        with self._path.open("rb") as stream:
            while block := stream.read(BLOCK):
                found.update(block)
        return found.hexdigest() == self._file.git_oid

    def _take_up(self) -> None:
        """Goes on with what an interrupted fetch left."""
        try:
            part = msgspec.json.decode(self._note.read_bytes(), type=Part)
            size = self._path.stat().st_size
        except (OSError, msgspec.MsgspecError):
            self._begin_anew()
            return
        same = part.url == shown(self._file.url)
        # Without a digest only the server can say that the rest belongs to the same version.
        if not size or not (self._file.sha256 or (same and part.validator)):
            self._begin_anew()
            return
        self._part = part if same else Part(url=shown(self._file.url), validator="", size=part.size)
        with self._path.open("rb") as stream:
            while block := stream.read(BLOCK):
                self._hash.update(block)
                self._have += len(block)
        self._resumed = True
        self._progress.had(self._have)
        logger.info("going on with a partial file", extra={"file": self._file.name, "bytes": self._have})

    def _begin_anew(self) -> None:
        self._progress.had(-self._have)
        self._hash, self._have, self._resumed = hashlib.sha256(), 0, False
        self._part = Part(url=shown(self._file.url), validator="", size=self._file.size)
        self._path.unlink(missing_ok=True)

    def _drop(self) -> None:
        self._path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def _attempt(self) -> None:
        """One request for what is missing; returns when the file is whole."""
        if self._part.size is not None and self._have == self._part.size and self._have:
            return
        if self._have and not (self._file.sha256 or self._file.git_oid or self._part.validator):
            self._begin_anew()  # nobody could say that the rest belongs to the same version
        headers = {}
        if self._have:
            self._resumed = True
            headers["range"] = f"bytes={self._have}-"
            if self._part.validator:
                headers[self._file.origin.precondition] = self._part.validator
        url = self._file.url
        with self._remote.answer("GET", url, self._file.origin, headers) as reply:
            if self._have and reply.status_code in (412, 416):
                self._judge_refused_range(reply)
                return
            require_success(reply, url)
            if self._have and not self._continues(reply):
                logger.warning("the source starts the file over", extra={"file": self._file.name})
                self._begin_anew()
            if not self._have:
                self._note_version(reply)
            self._receive(reply)

    def _judge_refused_range(self, reply: httpx.Response) -> None:
        """412: another version lies there now. 416: nothing is behind what we have, or what we have is too much."""
        found = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
        if reply.status_code == 416 and found and found.group(3) == str(self._have):
            self._part = msgspec.structs.replace(self._part, size=self._have)
            return
        self._begin_anew()
        raise PassingError(f"{shown(self._file.url)} has no more of what was begun ({reply.status_code})")

    def _continues(self, reply: httpx.Response) -> bool:
        if reply.status_code != 206:
            return False
        found = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
        if found is None or found.group(1) != str(self._have):
            return False
        begun, known = validator(reply), self._part.validator
        same_size = self._part.size is None or found.group(3) in ("*", str(self._part.size))
        return same_size and (not begun or not known or begun == known)

    def _note_version(self, reply: httpx.Response) -> None:
        length = reply.headers.get("content-length", "")
        size = int(length) if length.isdigit() else self._file.size
        if reply.status_code == 206:
            raise PassingError(f"{shown(self._file.url)} answers with a part that was not asked for")
        if self._file.size is not None and size is not None and size != self._file.size and self._file.sha256:
            logger.warning("the size is not the stated one", extra={"file": self._file.name, "bytes": size})
        self._part = Part(url=shown(self._file.url), validator=validator(reply), size=size)
        self._note.write_bytes(msgspec.json.encode(self._part))

    def _receive(self, reply: httpx.Response) -> None:
        bound = self._part.size if self._part.size is not None else self._limit
        if bound > self._limit:
            raise unsafe(f"{shown(self._file.url)} has {bound:,} bytes, more than the {self._limit:,} that are allowed")
        # Without O_NOFOLLOW a link in the cache could send our bytes elsewhere; `open` in append mode never truncates.
        with open(self._path, "ab", opener=_no_links) as stream:
            for block in reply.iter_raw():
                self._remote.require_time(shown(self._file.url), "it is still on its way")
                if self._have + len(block) > bound:
                    raise unsafe(f"{shown(self._file.url)} sends more than its {bound:,} bytes")
                stream.write(block)
                self._hash.update(block)
                self._have += len(block)
                self._progress.received(len(block))
        if self._part.size is not None and self._have < self._part.size:
            raise PassingError(f"{shown(self._file.url)} ended after {self._have:,} of {self._part.size:,} bytes")
        self._part = msgspec.structs.replace(self._part, size=self._have)
        self._path.touch()  # an empty file too

    def _refuse_known_bad(self) -> None:
        """A file that was wrong, and has not changed since, is not fetched again at each restart."""
        note = self._cache.quarantine(f"{self._name}.json")
        try:
            bad = msgspec.json.decode(note.read_bytes(), type=Bad)
        except (OSError, msgspec.MsgspecError):
            return
        if bad.url != shown(self._file.url) or not bad.validator:
            return
        head: Head = self._remote.head(self._file.origin, self._file.remote)
        if head.validator == bad.validator:
            raise self._mismatch(bad.actual, "; the source still holds that file")

    def _set_aside(self, actual: str) -> TaktlineError:
        bad = Bad(
            url=shown(self._file.url),
            validator=self._part.validator,
            expected=self._file.sha256 or self._file.git_oid,
            actual=actual,
            size=self._have,
            seen_at=time.time(),
        )
        self._path.rename(self._cache.quarantine(f"{self._name}.bin"))
        self._cache.quarantine(f"{self._name}.json").write_bytes(msgspec.json.encode(bad))
        sync(self._cache.quarantine("."))
        self._note.unlink(missing_ok=True)
        return self._mismatch(actual, "")

    def _mismatch(self, actual: str, more: str) -> TaktlineError:
        kind, expected = ("sha256", self._file.sha256) if self._file.sha256 else ("git object", self._file.git_oid)
        got = f"sha256 {actual}" if kind == "sha256" else f"another one (sha256 {actual})"
        return TaktlineError(
            ErrorCode.MODEL_MISMATCH,
            f"{self._file.name} from {shown(self._file.url)} has {got}, expected {kind} {expected}{more}",
            f"put the right file there, or correct the digest in spec.model; the wrong one is kept as quarantine/"
            f"{self._name[:12]}….bin",
        )


def _no_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def remove_quarantined(folder: Path) -> int:
    """Deletes what was set aside; returns the bytes that became free. What is known of it stays."""
    freed = 0
    for path in folder.glob("*.bin"):
        with contextlib.suppress(FileNotFoundError):  # another process of the node does the same
            size = path.stat().st_size
            path.unlink()
            freed += size
    return freed
