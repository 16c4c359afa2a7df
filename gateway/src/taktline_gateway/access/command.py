"""`taktline-gateway new-key`: makes an API key, shows it once, and keeps its hash in the access file."""

from __future__ import annotations

import argparse
import datetime
import fcntl
import os
import sys
import tempfile
from pathlib import Path

import msgspec
from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.access.access_file import AccessFile, Key, Tenant, read_access_file, rights_of
from taktline_gateway.access.keys import new_key
from taktline_gateway.access.rights import EVERY_POLICY, Right


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `make_key` reads."""
    parser.add_argument("--id", required=True, help="name of the key, shown in logs: a robot, a cell, a person")
    parser.add_argument("--tenant", required=True, help="whose robots use it")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="NAME|PREFIX*", help="policies it may ask; default: all"
    )
    parser.add_argument("--rights", type=_rights, default="act,read", help="of act, read, observe; with commas")
    parser.add_argument("--expires-days", type=float, help="days until it expires; default: never")
    parser.add_argument(
        "--access-file",
        type=Path,
        help="add it there, making file and tenant where they are absent; default: print the entry on stderr",
    )


def make_key(arguments: argparse.Namespace) -> None:
    """Prints the key on stdout and keeps or prints its entry. Raises TaktlineError `config_invalid`."""
    try:
        key, kept = new_key(arguments.id)
    except ValueError as error:
        raise TaktlineError(ErrorCode.CONFIG_INVALID, f"--id {error}", "choose another name") from error
    expires = None
    if arguments.expires_days is not None:
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=arguments.expires_days)
        expires = expires.replace(microsecond=0)
    entry = Key(
        id=arguments.id,
        tenant=arguments.tenant,
        hash=kept,
        rights=arguments.rights,
        policies=tuple(arguments.policy) or EVERY_POLICY,
        expires=expires,
    )
    if arguments.access_file is None:
        print(msgspec.json.encode(entry).decode(), file=sys.stderr)
    else:
        _add(arguments.access_file, entry)
    print(key)


def _add(path: Path, entry: Key) -> None:
    path = path.resolve()  # what a link points to is replaced, not the link
    with path.with_name(f".{path.name}.lock").open("ab") as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)  # two at a time would each replace the file without the other's key
        _add_locked(path, entry)


def _add_locked(path: Path, entry: Key) -> None:
    file = read_access_file(path) if path.exists() else AccessFile()
    if any(key.id == entry.id for key in file.keys):
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"{path} already has a key {entry.id!r}",
            "choose another id, give the new key to the robot, then remove the old entry",
        )
    tenants = file.tenants
    if all(tenant.name != entry.tenant for tenant in tenants):
        tenants = (*tenants, Tenant(name=entry.tenant))
    changed = msgspec.structs.replace(file, tenants=tenants, keys=(*file.keys, entry))
    text = msgspec.json.format(msgspec.json.encode(changed), indent=2)
    # Replaced as a whole, so that a gateway which reads it meanwhile never sees half a file.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
        try:
            temporary.write(text + b"\n")
            temporary.close()
            os.chmod(temporary.name, 0o600)
            read_access_file(Path(temporary.name))
            os.replace(temporary.name, path)
        except BaseException:
            os.unlink(temporary.name)
            raise


def _rights(text: str) -> tuple[Right, ...]:
    words = text.split(",")
    rights = rights_of(words)
    if not rights or len(rights) != len(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of act, read and observe")
    return rights
