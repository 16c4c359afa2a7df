"""A model hub: which files a commit has, with sizes and digests; the files themselves are fetched like any others.

The hub's library is not used for it: its HTTP client would know neither our certificates, nor our deadline, nor how to
go on with half a file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from urllib.parse import quote, urljoin

import httpx
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.delivery import TOKEN_VARIABLE, HubSource

from taktline_worker.delivery.names import unsafe
from taktline_worker.delivery.origins import HttpOrigin
from taktline_worker.delivery.remote import Remote, place, shown
from taktline_worker.delivery.transfer import RemoteFile

PUBLIC_HUB = "https://huggingface.co"
PAGE_BYTES = 16 << 20
_LEFT_OUT = (".gitattributes", ".gitignore")
_PAGES = 200


def files_of(source: HubSource, remote: Remote) -> list[RemoteFile]:
    """The files of the repository at the commit.

    Raises:
        TaktlineError: MODEL_ABSENT, MODEL_DENIED, MODEL_UNREACHABLE; MODEL_UNSAFE where the answer is no listing.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    endpoint = address(source)
    repo = quote(source.repo)
    files = HttpOrigin(f"{endpoint}/{repo}/resolve/{source.revision}", token)
    listing = f"{endpoint}/api/models/{repo}/tree/{source.revision}?recursive=true"
    try:
        return [
            _file(entry, files)
            for page in _pages(listing, token, remote)
            for entry in page
            if entry["type"] == "file" and entry["path"] not in _LEFT_OUT
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise unsafe(f"{shown(listing)} answers with no list of files ({type(error).__name__})") from error
    except TaktlineError as error:
        if error.code not in (ErrorCode.MODEL_ABSENT, ErrorCode.MODEL_DENIED):
            raise
        raise TaktlineError(
            error.code,
            f"{source.repo}@{source.revision[:12]}: {error.message}",
            "correct repo and revision; for a repository with terms accept them, and give a token of that account in"
            " hub.tokenSecret",
        ) from error


def address(source: HubSource) -> str:
    """Base URL of the hub."""
    return (source.endpoint or os.environ.get("HF_ENDPOINT", "") or PUBLIC_HUB).rstrip("/")


def _pages(url: str, token: str, remote: Remote) -> Iterator[list[dict[str, object]]]:
    home = httpx.URL(url)
    for _ in range(_PAGES):
        content, headers = remote.document(HttpOrigin(url, token), "", PAGE_BYTES)
        page = json.loads(content)
        if not isinstance(page, list):
            raise TypeError
        yield page
        following = httpx.Response(200, headers={"link": headers.get("link", "")}).links.get("next", {}).get("url")
        if not following:
            return
        url = urljoin(url, following)
        if place(httpx.URL(url)) != place(home):  # the token goes along
            raise unsafe(f"{shown(str(home))} goes on at another place, {shown(url)}")
    raise unsafe(f"{shown(str(home))} has more than {_PAGES} pages")


def _file(entry: dict[str, object], origin: HttpOrigin) -> RemoteFile:
    name, size, large = entry["path"], entry["size"], entry.get("lfs")
    if not isinstance(name, str) or not isinstance(size, int):
        raise TypeError
    if isinstance(large, dict):
        return RemoteFile(name, origin, name, size=size, sha256=_digest(large["oid"], 64))
    return RemoteFile(name, origin, name, size=size, git_oid=_digest(entry["oid"], 40))


def _digest(found: object, digits: int) -> str:
    """A digest of the listing; files of the cache are named by it. Raises ValueError where it is none."""
    if not isinstance(found, str) or re.fullmatch(f"[0-9a-f]{{{digits}}}", found) is None:
        raise ValueError("a digest is not hexadecimal")
    return found
