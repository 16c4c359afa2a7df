"""A revision, what answers robots, as a thing of its own: model, engine and images, kept as a ControllerRevision.

While a candidate is on trial the spec says only what the candidate is; the workers that serve are built from their own
stored revision, whole, so that neither an edit nor an operator that restarts mixes the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec

from taktline_operator import naming
from taktline_operator.engine_spec import Engine
from taktline_operator.spec import Model, PolicyDeployment, Spec

Json = dict[str, Any]


class Revision(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What answers robots; where it runs, and how many of it, is not part of it."""

    model: Model
    engine: Engine
    images: dict[str, str] = {}

    @property
    def hash(self) -> str:
        """Identifies the content. A field that a later operator adds does not change it while it is not set."""
        return naming.content_hash(self.data())

    def data(self) -> Json:
        """The content without what equals a default."""
        return {"model": essential(self.model), "engine": essential(self.engine), "images": self.images}


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A revision as it is kept: with its place in the history."""

    revision: Revision
    hash: str
    number: int
    created: str


def essential(value: Any) -> Any:
    """Plain data of a struct without the fields that have their default value."""
    if not isinstance(value, msgspec.Struct):
        # By way of JSON: a tuple must be the list that the API server gives back, or it looks changed for ever.
        return msgspec.json.decode(msgspec.json.encode(value))
    result = {}
    for name, encoded, default in _fields(type(value)):
        found = getattr(value, name)
        if default is msgspec.NODEFAULT or found != default:
            result[encoded] = essential(found)
    return result


@lru_cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, str, Any]]:
    return [
        (f.name, f.encode_name, f.default if f.default_factory is msgspec.NODEFAULT else f.default_factory())
        for f in msgspec.structs.fields(kind)
    ]


def of_spec(spec: Spec) -> Revision:
    """The revision that a spec asks for."""
    images = {pool.name: pool.image for pool in spec.pools if pool.image}
    return Revision(model=spec.model, engine=spec.engine, images=images)


def with_revision(policy: PolicyDeployment, revision: Revision) -> PolicyDeployment:
    """The policy as it was, or will be, with `revision`: its model, engine and images on the present pools."""
    pools = tuple(msgspec.structs.replace(pool, image=revision.images.get(pool.name)) for pool in policy.spec.pools)
    spec = msgspec.structs.replace(policy.spec, model=revision.model, engine=revision.engine, pools=pools)
    return msgspec.structs.replace(policy, spec=spec)


def controller_revision(policy: PolicyDeployment, revision: Revision, number: int, metadata: Json) -> Json:
    """The ControllerRevision that keeps a revision. `metadata` is that of any object of the policy."""
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": metadata
        | {
            "name": f"{policy.name}-{revision.hash}",
            "annotations": {naming.ANNOTATION_REVISION: with_revision(policy, revision).spec.revision()},
        },
        "data": revision.data(),
        "revision": number,
    }


def read(children: Iterable[Json]) -> dict[str, Stored]:
    """The stored revisions by hash, oldest first. What no longer reads as one (an older API) is left out."""
    found = []
    for child in children:
        if child.get("kind") != "ControllerRevision":
            continue
        try:
            revision = msgspec.convert(child.get("data", {}), Revision)
        except msgspec.ValidationError:
            continue  # it cannot be served by this operator either; the history ends before it
        metadata = child["metadata"]
        _, _, name_hash = metadata["name"].rpartition("-")
        created = str(metadata.get("creationTimestamp", ""))
        found.append(Stored(revision=revision, hash=name_hash, number=int(child.get("revision", 0)), created=created))
    return {stored.hash: stored for stored in sorted(found, key=lambda stored: (stored.number, stored.hash))}
