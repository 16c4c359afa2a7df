"""Where a PolicyDeployment's checkpoint comes from and how it reaches a node, with `delivery.json` written from it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from taktline_protocol.delivery import DeliveryConfig, HttpSource, HubSource, Layout, S3Source, StatisticsFile

from taktline_operator.diff import quantity

PVC_MOUNT = "/models"
CACHE_MOUNT = "/model-cache"


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Spelled in camelCase on the wire, as Kubernetes writes fields."""


class Claim(_Struct, frozen=True):
    """A PersistentVolumeClaim and the checkpoint's folder inside it."""

    claim_name: str
    path: str = ""


class SecretKey(_Struct, frozen=True):
    """One key of a Secret in the policy's namespace."""

    name: str
    key: str = "token"


class ProxySecret(_Struct, frozen=True):
    """The key of a Secret that holds the address of a proxy, user and password in it."""

    name: str
    key: str = "proxy"


class SecretName(_Struct, frozen=True):
    """A Secret in the policy's namespace, or a ConfigMap."""

    name: str


class CertificateAuthority(_Struct, frozen=True):
    """A key of a ConfigMap with a PEM certificate authority."""

    name: str
    key: str = "ca.crt"


class Http(_Struct, frozen=True):
    """Files of an HTTP mirror."""

    url: str
    layout: Layout = "Manifest"
    sha256: str = ""
    token_secret: SecretKey | None = None


class S3(_Struct, frozen=True):
    """Objects of an S3-compatible service."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = "us-east-1"
    path_style: bool = True
    layout: Layout = "Manifest"
    sha256: str = ""
    credentials_secret: SecretName | None = None


class Oci(_Struct, frozen=True):
    """An image whose files are mounted as a volume."""

    reference: str
    path: str = ""
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secret: SecretName | None = None


class Hub(_Struct, frozen=True):
    """A commit of a model hub's repository."""

    repo: str
    revision: str
    endpoint: str = ""
    include: tuple[str, ...] = ()
    token_secret: SecretKey | None = None


class Source(_Struct, frozen=True):
    """Where the checkpoint is: exactly one field is set."""

    path: str | None = None
    pvc: Claim | None = None
    http: Http | None = None
    s3: S3 | None = None
    oci: Oci | None = None
    hub: Hub | None = None

    @property
    def fetched(self) -> bool:
        """Whether a program brings the files to the node, and not the kubelet."""
        return self.http is not None or self.s3 is not None or self.hub is not None


class StatisticsFrom(_Struct, frozen=True):
    """A statistics file that does not come with the weights."""

    sha256: str
    path: str
    url: str | None = None
    key: str | None = None


class ModelCache(_Struct, frozen=True):
    """Where a node keeps fetched checkpoints; neither field set: each pod for itself."""

    host_path: str | None = None
    claim_name: str | None = None

    @property
    def shared(self) -> bool:
        """Whether the pods of a node share it."""
        return self.host_path is not None or self.claim_name is not None


class Delivery(_Struct, frozen=True):
    """How checkpoints are fetched; no part of a revision."""

    cache: ModelCache = ModelCache()
    cache_limit: int | str | None = None
    deadline_seconds: int = 3600
    parallel_files: int = 4
    max_size: int | str = "1Ti"
    ca_config_map: CertificateAuthority | None = None
    proxy: str = ""
    proxy_secret: ProxySecret | None = None
    no_proxy: str = ""


def described(model: dict[str, Any]) -> dict[str, Any]:
    """The plain data of a model without later fields that are not set: a derived revision's name must stay."""
    source = {name: value for name, value in model["source"].items() if name in ("path", "pvc") or value is not None}
    found = model | {"source": source}
    return {name: value for name, value in found.items() if name != "statisticsFrom" or value is not None}


def delivery_config(
    source: Source,
    delivery: Delivery,
    *,
    policy: str,
    revision: str,
    sha256: dict[str, str],
    statistics: StatisticsFrom | None,
) -> DeliveryConfig:
    """What the fetching program gets. The source is one that is fetched."""
    where = _source(source)
    return DeliveryConfig(
        policy=policy,
        revision=revision,
        source=where,
        sha256=sha256,
        statistics_file=None if statistics is None else _statistics(source, statistics),
        deadline_s=float(delivery.deadline_seconds),
        parallel=delivery.parallel_files,
        max_bytes=int(quantity(delivery.max_size)),
        cache_bytes=0 if delivery.cache_limit is None else int(quantity(delivery.cache_limit)),
    )


def _source(source: Source) -> HttpSource | S3Source | HubSource:
    if source.http is not None:
        return HttpSource(url=source.http.url, layout=source.http.layout, sha256=source.http.sha256)
    if source.s3 is not None:
        return _s3(source.s3, source.s3.prefix, source.s3.layout, source.s3.sha256)
    assert source.hub is not None, "only what is fetched has a delivery"
    found = source.hub
    return HubSource(repo=found.repo, revision=found.revision, endpoint=found.endpoint, include=found.include)


def _s3(found: S3, prefix: str, layout: Layout, sha256: str) -> S3Source:
    return S3Source(
        bucket=found.bucket,
        prefix=prefix,
        endpoint=found.endpoint,
        region=found.region,
        path_style=found.path_style,
        layout=layout,
        sha256=sha256,
    )


def _statistics(source: Source, wanted: StatisticsFrom) -> StatisticsFile:
    if wanted.url is not None:
        where: HttpSource | S3Source = HttpSource(url=wanted.url)
    else:
        assert source.s3 is not None, "the CRD admits a key only beside a bucket"
        where = _s3(source.s3, wanted.key or "", "Manifest", "")
    return StatisticsFile(source=where, sha256=wanted.sha256, path=wanted.path)
