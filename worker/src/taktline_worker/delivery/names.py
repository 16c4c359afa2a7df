"""Names of files as others write them, in manifests and archives: only what stays inside the folder is taken."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.delivery import RECORD_FILE

MAX_FILES = 10_000
_NAME_CHARACTERS = 1024
_PART_BYTES = 255


def unsafe(message: str) -> TaktlineError:
    """MODEL_UNSAFE: what the source holds is not taken."""
    return TaktlineError(ErrorCode.MODEL_UNSAFE, message, "correct the source; nothing of it was published")


def checked_name(name: str) -> str:
    """`name` itself where it is a plain relative path.

    Raises:
        TaktlineError: MODEL_UNSAFE for one that leaves the folder, or that no file system should have to hold.
    """
    parts = name.split("/")
    bad = (
        not name
        or any("\ud800" <= character <= "\udfff" for character in name)  # no text: bytes of another encoding
        or len(name) > _NAME_CHARACTERS
        or "\\" in name
        or any(part in ("", ".", "..") or len(part.encode()) > _PART_BYTES for part in parts)
        or any(ord(character) < 32 or ord(character) == 127 for character in name)
    )
    if bad:
        raise unsafe(f"the file name {name[:200]!r} is not taken: it must be a plain path inside the folder")
    if name == RECORD_FILE:
        raise unsafe(f"the file name {name!r} is ours: no checkpoint may bring it")
    return name


def checked_names(names: Iterable[str]) -> list[str]:
    """All names, each checked, none twice and none a folder of another.

    Raises:
        TaktlineError: MODEL_UNSAFE.
    """
    found: list[str] = []
    for name in names:
        found.append(checked_name(name))
        if len(found) > MAX_FILES:
            raise unsafe(f"there are more than {MAX_FILES} files")
    seen = set(found)
    if len(seen) != len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise unsafe(f"the file name {twice!r} comes twice")
    folders = {str(parent) for name in found for parent in PurePosixPath(name).parents}
    if clash := sorted(seen & folders):
        raise unsafe(f"{clash[0]!r} is a file and a folder at once")
    return found
