"""How a checkpoint reaches a node: what the operator writes as `delivery.json`, and what the fetching program tells."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Layout = Literal["Manifest", "Listed", "Index", "Archive"]
"""How a place names its files: `Manifest` = it holds a file SHA256SUMS; `Listed` = those that the digests name;
`Index` = these, and the shards that model.safetensors.index.json names; `Archive` = it is one tar file."""

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

DELIVERY_FILE = "delivery.json"
MODELS_FOLDER = "models"
RECORD_FILE = ".taktline-delivery.json"
"""In every published folder: where its files came from, and their digests."""

TOKEN_VARIABLE = "TAKTLINE_MODEL_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the bearer token of an HTTP mirror or a hub."""


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Plain immutable data; what equals its default is not written."""


class HttpSource(_Struct, frozen=True, tag_field="kind", tag="http"):
    """Files below one address.

    Attributes:
        url: the folder, or the archive.
        sha256: digest of the manifest or of the archive; empty where there is neither, or the files' own pin it.
    """

    url: str
    layout: Layout = "Manifest"
    sha256: Sha256 | Literal[""] = ""


class S3Source(_Struct, frozen=True, tag_field="kind", tag="s3"):
    """Objects of a bucket. Credentials come in the environment (`AWS_ACCESS_KEY_ID` and so on); without, unsigned.

    Attributes:
        prefix: the folder's, or the archive's key.
        endpoint: base URL of the service; empty is AWS's own of the region.
        path_style: the bucket is the first part of the path, not of the host name.
    """

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = "us-east-1"
    path_style: bool = True
    layout: Layout = "Manifest"
    sha256: Sha256 | Literal[""] = ""


class HubSource(_Struct, frozen=True, tag_field="kind", tag="hub"):
    """A repository of a model hub at one commit.

    Attributes:
        revision: the commit, 40 hex digits: branches and tags move.
        endpoint: a mirror; empty takes `HF_ENDPOINT`, else the public hub.
        include: patterns of files to fetch; empty takes all.
    """

    repo: str
    revision: Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
    endpoint: str = ""
    include: tuple[str, ...] = ()


Source = HttpSource | S3Source | HubSource


class StatisticsFile(_Struct, frozen=True):
    """One file of normalisation statistics that does not come with the weights.

    Attributes:
        source: the file itself: an `http` address, or an `s3` key in `prefix`.
        path: where it goes in the checkpoint folder.
    """

    source: HttpSource | S3Source
    sha256: Sha256
    path: str


class DeliveryConfig(_Struct, frozen=True, kw_only=True):
    """`delivery.json`: one checkpoint to bring to a node.

    Attributes:
        sha256: digests of files by name: checked, and where `layout` says so the list of files.
        deadline_s: how long all of it may take, waiting for another process that fetches the same included.
        parallel: files at a time.
        max_bytes: a checkpoint that is larger is refused.
        cache_bytes: before fetching, models that nothing uses leave the cache, the longest unused first, until no
            more than this is left; 0 keeps all.
    """

    policy: str = ""
    revision: str = ""
    source: Source
    sha256: dict[str, Sha256] = {}
    statistics_file: StatisticsFile | None = None
    deadline_s: Annotated[float, Meta(gt=0)] = 3600.0
    parallel: Annotated[int, Meta(ge=1, le=32)] = 4
    max_bytes: Annotated[int, Meta(ge=1)] = 1 << 40
    cache_bytes: Annotated[int, Meta(ge=0)] = 0

    @property
    def pinned(self) -> bool:
        """Whether the digests decide every byte, so that it does not matter where the files come from."""
        source = self.source
        if isinstance(source, HubSource):
            return False
        if source.layout in ("Manifest", "Archive"):
            return bool(source.sha256)
        return source.layout == "Listed"

    @property
    def key(self) -> str:
        """Name of the checkpoint's folder in the cache: from its digests, and from its place where they do not do."""
        source = self.source
        if isinstance(source, HubSource):  # a commit is a digest; the mirror does not matter
            identity: object = ["hub", source.repo, source.revision, sorted(source.include)]
        elif self.pinned:
            identity = [source.layout, source.sha256]
        else:
            identity = msgspec.to_builtins(source)
        statistics = self.statistics_file
        parts = [identity, self.sha256, [statistics.sha256, statistics.path] if statistics else []]
        return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:32]


class DeliveryProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a delivery is, as the fetching program tells it at `/progress`.

    Attributes:
        state: `waiting` = another process of the node fetches the same.
        total_bytes: of all files; 0 while it is not known.
        trouble: the last failure that is being retried.
    """

    state: Literal["preparing", "waiting", "downloading", "verifying", "published"] = "preparing"
    done_bytes: int = 0
    total_bytes: int = 0
    done_files: int = 0
    total_files: int = 0
    bytes_per_s: float = 0.0
    trouble: str = ""

    @property
    def percent(self) -> int:
        """Whole percent of the bytes; 100 only when all are there."""
        return self.done_bytes * 100 // self.total_bytes if self.total_bytes else 0
