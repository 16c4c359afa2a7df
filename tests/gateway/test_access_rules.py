"""Keys, tokens, rights and rates without a gateway: what is let in, what is refused, and what the log may hold."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import fcntl
import json
import logging
import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st
from taktline_gateway.access import audit, keys, tokens
from taktline_gateway.access.access_file import AccessFile, Anonymous, Issuer, Key, Rates, Tenant, read_access_file
from taktline_gateway.access.audit import AuditLog, Decision
from taktline_gateway.access.command import make_key
from taktline_gateway.access.control import AccessControl, Credential
from taktline_gateway.access.http import _check_origin, need_of, secret_in
from taktline_gateway.access.keys import PortToken, StoredHash, hash_of, is_hash, new_key, split_key
from taktline_gateway.access.rates import Quota, TokenBucket, admit
from taktline_gateway.access.rights import OPEN, Principal, fits
from taktline_gateway.compat.gateway_service import GatewayService
from taktline_gateway.compat.ports import Listen
from taktline_gateway.compat.service import Caller
from taktline_gateway.compat.websocket_listener import WebSocketListener
from taktline_gateway.connections import ConnectionCounts
from taktline_gateway.service import Gateway, Settings
from taktline_protocol import ErrorCode, Observation, TaktlineError

RSA = rsa.generate_private_key(65537, 2048)
RSA_OTHER = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
ISSUER = "https://id.factory.example"
CALLER = Credential("rest", "1.1.1.1:1")


def jwks(**keys) -> bytes:
    entries = []
    for key_id, key in keys.items():
        algorithm = {
            rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm,
            ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm,
        }
        maker = next((made for kind, made in algorithm.items() if isinstance(key, kind)), jwt.algorithms.OKPAlgorithm)
        entries.append({**maker.to_jwk(key.public_key(), as_dict=True), "kid": key_id, "use": "sig"})
    return json.dumps({"keys": entries}).encode()


def token(key=RSA, algorithm="RS256", key_id="one", **claims) -> str:
    now = int(time.time())
    payload = {"iss": ISSUER, "aud": "taktline", "sub": "cell-4", "exp": now + 60, "nbf": now - 5, "tenant": "a"}
    payload |= claims
    return jwt.encode(
        {name: value for name, value in payload.items() if value is not None}, key, algorithm, {"kid": key_id}
    )


@pytest.fixture
def world(tmp_path):
    """An access file with two tenants, a key each, and one token issuer."""
    made = {key_id: new_key(key_id) for key_id in ("robot-a", "robot-b", "old", "watcher")}
    (tmp_path / "jwks.json").write_bytes(jwks(one=RSA, two=EC, three=ED))
    file = AccessFile(
        tenants=(
            Tenant(name="a", policies=("pick-*", "place"), weight=3.0),
            Tenant(name="b", rates=Rates(requests_per_s=2.0, burst=3, body_mib=1.0)),
        ),
        keys=(
            Key(id="robot-a", tenant="a", hash=made["robot-a"][1], policies=("pick-left", "other")),
            Key(id="robot-b", tenant="b", hash=made["robot-b"][1]),
            Key(id="watcher", tenant="b", hash=made["watcher"][1], rights=("observe",)),
            Key(
                id="old",
                tenant="a",
                hash=made["old"][1],
                expires=datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=1),
            ),
        ),
        issuers=(Issuer(issuer=ISSUER, audience="taktline", jwks_file=str(tmp_path / "jwks.json"), tenants=("a",)),),
        anonymous=(Anonymous(protocol="lerobot", tenant="b", policies=("pick-left",), networks=("10.0.0.0/8",)),),
    )
    path = tmp_path / "access.json"
    path.write_bytes(msgspec.json.encode(file))
    return path, {key_id: key for key_id, (key, _) in made.items()}, file


def ask(path, secret, protocol="rest", peer="10.1.2.3:99"):
    async def run():
        control = AccessControl(path)
        await control.start()
        try:
            return await control.authenticate(Credential(protocol, peer, secret))
        finally:
            await control.close()

    return asyncio.run(run())


def refused(path, secret, **more) -> TaktlineError:
    with pytest.raises(TaktlineError) as caught:
        ask(path, secret, **more)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    if secret:
        assert secret not in str(caught.value)
    return caught.value


# ----- keys


def test_a_key_is_known_by_its_hash_alone(world):
    path, keys, file = world
    principal = ask(path, keys["robot-a"])
    assert (principal.tenant, principal.name, principal.weight) == ("a", "robot-a", 3.0)
    secret = split_key(keys["robot-a"])[1]
    assert secret not in path.read_text()
    assert file.keys[0].hash.startswith("blake2b:")


def test_a_key_holds_only_within_its_tenant(world):
    path, keys, _ = world
    principal = ask(path, keys["robot-a"])
    assert principal.may("act", "pick-left")
    assert principal.may("read", "pick-left"), "who may act may read"
    assert not principal.may("act", "pick-right"), "its own list has no such policy"
    assert not principal.may("act", "other"), "the tenant has no such policy"
    assert not principal.may("observe")
    assert not ask(path, keys["watcher"]).may("act", "pick-left")


@pytest.mark.parametrize("change", ["last", "id", "case", "cut", "empty", "blank", "long", "prefix"])
def test_a_changed_key_is_refused(world, change):
    path, keys, _ = world
    key = keys["robot-a"]
    changed = {
        "last": key[:-1] + ("A" if key[-1] != "A" else "B"),
        "id": key.replace("robot-a", "robot-b"),
        "case": key.replace("tkl_", "TKL_"),
        "cut": key[:-1],
        "empty": "",
        "blank": f" {key}",
        "long": key + "A" * 10_000,
        "prefix": key.removeprefix("tkl_"),
    }[change]
    refused(path, changed)


def test_an_expired_key_and_no_key_are_refused(world):
    path, keys, _ = world
    assert "expired" in refused(path, keys["old"]).message
    assert "wants an API key" in refused(path, None).message


@pytest.mark.parametrize("change", ["last", "id"])
def test_a_wrong_key_and_an_unknown_one_take_the_same_single_comparison(world, monkeypatch, change):
    """No `==`, which ends at the first byte that differs, and no way around it for ids that do not exist."""
    path, made, _ = world
    key = made["robot-a"]
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    real = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B") if change == "last" else key.replace("robot-a", "robot-zzz")
    refused(path, wrong)
    assert compared == [(32, 32)]


def test_two_hashes_of_one_secret_differ():
    secret = "x" * 43
    assert hash_of(secret, b"a" * 16) != hash_of(secret, b"b" * 16)
    assert StoredHash(hash_of(secret, b"a" * 16)).matches(secret)
    assert not StoredHash(hash_of(secret, b"a" * 16)).matches("y" * 43)


def test_a_ports_token_is_known_by_itself_or_by_its_hash_alone():
    key, kept = new_key("groot")
    other, _ = new_key("groot")
    hashed, plain = PortToken(kept), PortToken("s3cret")
    assert hashed.matches(key)
    assert plain.matches("s3cret")
    for wrong in (other, kept, split_key(key)[1], "", None, 7, b"s3cret", "s3cret\ud800"):
        assert not hashed.matches(wrong)
        assert not plain.matches(wrong)


@given(st.text(max_size=200))
def test_no_text_is_a_key_or_a_hash_by_accident(text):
    assert split_key(text) is None or text.startswith("tkl_")
    if is_hash(text):
        StoredHash(text)


def test_ids_that_would_be_ambiguous_are_refused():
    for wrong in ("", "a_b", "A", "a b", "-a", "x" * 64):
        with pytest.raises(ValueError, match="lower-case"):
            new_key(wrong)


# ----- callers without a credential


def test_only_the_named_protocol_and_network_go_without_a_key(world):
    path, _, _ = world
    assert ask(path, None, protocol="lerobot", peer="ipv4:10.1.2.3:99").tenant == "b"
    assert ask(path, None, protocol="lerobot", peer="[::ffff:10.1.2.3]:99").name == "anonymous-lerobot"
    refused(path, None, protocol="lerobot", peer="ipv4:192.168.0.1:99")
    refused(path, None, protocol="lerobot", peer="ipv6:%5B::1%5D:99")
    refused(path, None, protocol="openpi", peer="10.1.2.3:99")


# ----- tokens


@pytest.mark.parametrize(
    ("key", "algorithm", "key_id"), [(RSA, "RS256", "one"), (EC, "ES256", "two"), (ED, "EdDSA", "three")]
)
def test_a_good_token(world, key, algorithm, key_id):
    path, _, _ = world
    principal = ask(path, token(key, algorithm, key_id, taktline_policies=["pick-*"], taktline_rights="act observe"))
    assert (principal.tenant, principal.name) == ("a", "cell-4")
    assert principal.may("act", "pick-left")
    assert not principal.may("act", "place")
    assert principal.may("observe")


def _hmac_with_the_public_key():
    """The classic confusion: the public key as the secret of a symmetric signature."""
    head = jwt.utils.base64url_encode(b'{"alg":"HS256","kid":"one","typ":"JWT"}')
    body = token().split(".")[1].encode()
    pem = jwks(one=RSA)
    mark = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(head + b"." + body, pem)
    return b".".join((head, body, jwt.utils.base64url_encode(mark))).decode()


BAD_TOKENS = {
    "expired": lambda: token(exp=int(time.time()) - 60),
    "not yet": lambda: token(nbf=int(time.time()) + 60),
    "for another": lambda: token(aud="other"),
    "no audience": lambda: token(aud=None),
    "by another": lambda: token(iss="https://evil.example"),
    "for ever": lambda: token(exp=None),
    "by another key": lambda: token(RSA_OTHER),
    "unknown key": lambda: token(key_id="nine"),
    "key of another kind": lambda: token(EC, "ES256", "one"),
    "algorithm not allowed": lambda: token(RSA, "PS256"),
    "unsigned": lambda: token(None, "none"),
    "symmetric": _hmac_with_the_public_key,
    "tenant not the issuer's": lambda: token(tenant="b"),
    "no tenant": lambda: token(tenant=None),
    "rights no list": lambda: token(taktline_rights=7),
    "policies no list": lambda: token(taktline_policies="*"),
    "cut": lambda: token()[:-3],
    "three parts of nothing": lambda: "a.b.c",
    "long": lambda: token(sub="x" * 9000),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_a_bad_token(world, name):
    refused(world[0], BAD_TOKENS[name]())


def test_a_token_is_verified_once_and_no_longer_than_it_lives(world, monkeypatch):
    _, _, file = world

    async def run():
        verifier = tokens.TokenVerifier(file.issuers)
        verifier.start()
        text = token(exp=int(time.time()) + 30)
        first = await verifier.verify(text)
        assert await verifier.verify(text) is first
        monkeypatch.setattr(tokens.time, "time", lambda now=time.time: now() + 41)
        with pytest.raises(TaktlineError, match="expired"):
            await verifier.verify(text)
        await verifier.close()

    asyncio.run(run())


class _Keys(BaseHTTPRequestHandler):
    document = b""
    reads = 0

    def do_GET(self):
        type(self).reads += 1
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/keys")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.document)

    def log_message(self, *_):
        pass


@pytest.fixture
def key_server():
    server = HTTPServer(("127.0.0.1", 0), _Keys)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_keys_rotate_without_restart(key_server, monkeypatch):
    monkeypatch.setattr(tokens, "UNKNOWN_KEY_PAUSE_S", 0.0)
    _Keys.document = jwks(one=RSA)
    issuer = Issuer(issuer=ISSUER, audience="taktline", jwks_url=f"{key_server}/keys", tenant="a")

    async def run():
        verifier = tokens.TokenVerifier((issuer,))
        old, new = token(), token(RSA_OTHER, key_id="next")
        await verifier.verify(old)  # read on demand, before the background task has run
        _Keys.document = jwks(next=RSA_OTHER)
        assert (await verifier.verify(new)).tenant == "a"
        with pytest.raises(TaktlineError, match="not among"):
            await verifier.verify(old)
        _Keys.document = b"not json"
        await verifier._sets[ISSUER].refresh()
        assert (await verifier.verify(new)).tenant == "a", "the last good keys stay"

    asyncio.run(run())


def test_an_answer_that_is_no_http_leaves_the_last_good_keys():
    """Something else listens at the address for a while: that must not end the reading of keys."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")

    Thread(target=answer, daemon=True).start()
    address = f"http://127.0.0.1:{server.getsockname()[1]}/keys"

    async def run():
        keys = tokens.KeySet(Issuer(issuer=ISSUER, audience="taktline", jwks_url=address, tenant="a"))
        await keys.refresh()
        assert not keys.known

    asyncio.run(run())
    server.close()


def test_unknown_key_ids_do_not_hammer_the_issuer(key_server):
    _Keys.document, _Keys.reads = jwks(one=RSA), 0
    issuer = Issuer(issuer=ISSUER, audience="taktline", jwks_url=f"{key_server}/keys", tenant="a")

    async def run():
        verifier = tokens.TokenVerifier((issuer,))
        for number in range(20):
            with pytest.raises(TaktlineError):
                await verifier.verify(token(RSA_OTHER, key_id=f"k{number}"))
        assert _Keys.reads == 1

    asyncio.run(run())


def test_a_full_disk_under_the_audit_log_does_not_keep_a_key_alive(world, monkeypatch):
    path, _, file = world
    monkeypatch.setattr("taktline_gateway.access.control.POLL_S", 0.01)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    async def run():
        control = AccessControl(path)
        monkeypatch.setattr(control.audit, "event", full)
        await control.start()
        for kept in (file.keys[1:], file.keys[2:]):  # the second one: the watcher has survived the first
            path.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, keys=kept)))
            for _ in range(200):
                if len(control._keys) == len(kept):
                    break
                await asyncio.sleep(0.01)
            assert len(control._keys) == len(kept)
        await control.close()

    asyncio.run(run())


@pytest.mark.parametrize("protocol", ["rest", "lerobot", "openpi", "groot"])
def test_a_refusal_is_chained_to_nothing_that_holds_the_credential(tmp_path, protocol):
    path = tmp_path / "access.json"
    path.write_bytes(msgspec.json.encode(AccessFile(tenants=(Tenant(name="a"),))))
    with pytest.raises(TaktlineError) as refused:
        ask(path, "no key at all", protocol)
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None or refused.value.__suppress_context__


def test_a_changed_access_file_forgets_no_keys(tmp_path, key_server):
    """Whoever adds a key while the issuer is away must not lock out the holders of its tokens."""
    _Keys.document = jwks(one=RSA)
    issuer = Issuer(issuer=ISSUER, audience="taktline", jwks_url=f"{key_server}/keys", tenant="a")
    file = AccessFile(tenants=(Tenant(name="a"), Tenant(name="b")), issuers=(issuer,))
    path = tmp_path / "access.json"
    path.write_bytes(msgspec.json.encode(file))

    async def run():
        control = AccessControl(path)
        credential = Credential("rest", "10.0.0.1:1", token())
        await control.authenticate(credential)
        _Keys.document = b"not json"
        control._apply(msgspec.structs.replace(file, tenants=(Tenant(name="a", weight=2.0),)))
        assert (await control.authenticate(credential)).weight == 2.0
        other = msgspec.structs.replace(issuer, jwks_url=f"{key_server}/moved")
        control._apply(msgspec.structs.replace(file, issuers=(other,)))
        with pytest.raises(TaktlineError, match="could not be read yet"):
            await control.authenticate(credential)

    asyncio.run(run())


def test_a_redirect_to_other_keys_is_not_followed(key_server):
    _Keys.document = jwks(one=RSA)
    issuer = Issuer(issuer=ISSUER, audience="taktline", jwks_url=f"{key_server}/moved", tenant="a")

    async def run():
        with pytest.raises(TaktlineError, match="could not be read yet"):
            await tokens.TokenVerifier((issuer,)).verify(token())

    asyncio.run(run())


def test_shared_secrets_in_a_key_set_are_left_out():
    document = json.loads(jwks(one=RSA))
    document["keys"].append({"kty": "oct", "k": "c2VjcmV0", "kid": "secret"})
    assert list(tokens.public_keys(json.dumps(document).encode())) == ["one"]
    for wrong in (b"{}", b"[]", b'{"keys": []}', b'{"keys": [{"kty": "oct", "k": "AA"}]}', b"\xff"):
        with pytest.raises(ValueError):  # noqa: PT011 (JSON and UTF-8 errors are ValueErrors too)
            tokens.public_keys(wrong)


BROKEN_ENTRIES = {
    "no signature": {"kty": "RSA", "alg": "none", "n": "AQAB", "e": "AQAB"},
    "number for text": {"kty": "RSA", "n": 5, "e": "AQAB"},
    "number for algorithm": {"kty": "RSA", "alg": 5, "n": "AQAB", "e": "AQAB"},
    "list for algorithm": {"kty": "RSA", "alg": ["x"], "n": "AQAB", "e": "AQAB"},
    "list for curve": {"kty": "EC", "crv": ["x"], "x": "AA", "y": "AA"},
    "point of another curve": {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"},
    "half a private key": {"kty": "RSA", "n": "AQAB", "e": "AQAB", "d": "AQAB", "oth": []},
}


@pytest.mark.parametrize("name", BROKEN_ENTRIES)
def test_an_entry_that_nothing_can_read_costs_the_others_nothing(name):
    document = json.loads(jwks(one=RSA))
    document["keys"].insert(0, BROKEN_ENTRIES[name])
    assert list(tokens.public_keys(json.dumps(document).encode())) == ["one"]


def test_keys_are_read_again_whatever_went_wrong(monkeypatch, caplog):
    """One odd document, and the task that reads keys had ended: rotated keys were refused until a restart."""
    monkeypatch.setattr(tokens, "_read", lambda issuer: b"")
    monkeypatch.setattr(tokens, "public_keys", lambda document: (_ for _ in ()).throw(NotImplementedError))

    async def run():
        await tokens.KeySet(Issuer(issuer=ISSUER, audience="t", jwks_file="f", tenant="a")).refresh()

    asyncio.run(run())
    (record,) = [record for record in caplog.records if record.msg == "jwks_unreadable"]
    assert record.reason == "NotImplementedError"


def _one_key(algorithm: str | None) -> bytes:
    document = json.loads(jwks(one=RSA))
    (entry,) = document["keys"]
    entry.pop("alg", None)
    if algorithm:
        entry["alg"] = algorithm
    return json.dumps(document).encode()


@pytest.mark.parametrize("stated", [None, "RS256", "PS512"])
@pytest.mark.parametrize("used", ["RS256", "RS512", "PS256", "PS512"])
def test_a_key_serves_for_the_algorithm_it_states_and_else_for_all_of_its_kind(tmp_path, stated, used):
    path = tmp_path / "jwks.json"
    path.write_bytes(_one_key(stated))
    allowed = ("RS256", "RS512", "PS256")
    issuer = Issuer(issuer=ISSUER, audience="taktline", jwks_file=str(path), tenant="a", algorithms=allowed)

    async def run():
        return await tokens.TokenVerifier((issuer,)).verify(token(algorithm=used))

    if used in allowed and stated in (None, used):
        assert asyncio.run(run()).tenant == "a"
    else:
        with pytest.raises(TaktlineError, match="algorithm"):
            asyncio.run(run())


def test_a_signature_is_of_the_algorithm_that_the_token_names(tmp_path):
    """The header names one that is allowed, and the signature is of the other, which the key states."""
    path = tmp_path / "jwks.json"
    path.write_bytes(_one_key("PS512"))
    issuer = Issuer(issuer=ISSUER, audience="taktline", jwks_file=str(path), tenant="a", algorithms=("RS256",))
    head = jwt.utils.base64url_encode(b'{"alg":"RS256","kid":"one"}')
    signed = head + b"." + token().split(".")[1].encode()
    mark = jwt.algorithms.get_default_algorithms()["PS512"].sign(signed, RSA)
    text = b".".join((signed, jwt.utils.base64url_encode(mark))).decode()
    with pytest.raises(TaktlineError, match="another algorithm"):
        asyncio.run(tokens.TokenVerifier((issuer,)).verify(text))


@pytest.mark.parametrize("start", [b"", b"HTTP/1.0 200 OK\r\n\r\n"], ids=["head", "body"])
def test_a_key_server_that_drips_holds_up_no_request_and_no_exit(monkeypatch, start):
    monkeypatch.setattr(tokens, "FETCH_TIMEOUT_S", 0.2)
    server, ended = socket.create_server(("127.0.0.1", 0)), Event()

    def drip() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(start)
            while not ended.wait(0.02):
                connection.sendall(b" " if start else b"x")

    dripping = Thread(target=drip, daemon=True)
    dripping.start()
    address = f"http://127.0.0.1:{server.getsockname()[1]}/keys"

    async def run():
        keys = tokens.KeySet(Issuer(issuer=ISSUER, audience="taktline", jwks_url=address, tenant="a"))
        await asyncio.wait_for(keys.refresh(), 20)
        reader = keys._reader
        assert reader.daemon
        if start:
            await asyncio.to_thread(reader.join, 20)
            assert not reader.is_alive(), "it gives up by itself"
        else:
            await asyncio.wait_for(keys.refresh(), 20)
            assert keys._reader is reader, "no second one waits beside it"
        return keys

    try:
        assert not asyncio.run(run()).known
    finally:
        ended.set()
        dripping.join(20)
        server.close()


# ----- the file


def test_a_changed_file_takes_effect_and_a_broken_one_does_not(world, monkeypatch):
    path, keys, file = world
    monkeypatch.setattr("taktline_gateway.access.control.POLL_S", 0.01)

    async def run():
        control = AccessControl(path)
        await control.start()
        credential = Credential("rest", "10.0.0.1:1", keys["robot-a"])
        await control.authenticate(credential)
        path.write_text("{")
        await asyncio.sleep(0.05)
        await control.authenticate(credential)
        without = msgspec.structs.replace(file, keys=file.keys[1:])
        path.write_bytes(msgspec.json.encode(without))
        for _ in range(200):
            if control._file is not file and len(control._keys) == 3:
                break
            await asyncio.sleep(0.01)
        with pytest.raises(TaktlineError) as caught:
            await control.authenticate(credential)
        assert caught.value.code is ErrorCode.UNAUTHENTICATED
        await control.close()

    asyncio.run(run())


def test_a_revocation_that_could_not_be_read_at_first_takes_effect(world, monkeypatch):
    """The one look at the changed file met a process out of descriptors: the next look must be another try."""
    path, keys, file = world

    async def run():
        control = AccessControl(path)
        credential = Credential("rest", "10.0.0.1:1", keys["robot-a"])
        await control.authenticate(credential)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, keys=file.keys[1:])))
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(OSError(24, "Too many open files")))
            control._look(path)
        await control.authenticate(credential)
        control._look(path)
        with pytest.raises(TaktlineError) as caught:
            await control.authenticate(credential)
        assert caught.value.code is ErrorCode.UNAUTHENTICATED
        await control.close()

    asyncio.run(run())


def _file(**parts):
    return {"tenants": [{"name": "a"}], **parts}


_HASH = hash_of("x" * 43, b"s" * 16)
_ISSUER = {"issuer": "i", "audience": "t", "jwks_file": "f", "tenant": "a"}
WRONG_FILES = {
    "not JSON": ("{", "is not valid"),
    "unknown field": ({"tenant": []}, "unknown field"),
    "tenant twice": ({"tenants": [{"name": "a"}, {"name": "a"}]}, "more than once"),
    "key twice": (_file(keys=[{"id": "k", "tenant": "a", "hash": _HASH}] * 2), "more than once"),
    "key of no tenant": (_file(keys=[{"id": "k", "tenant": "z", "hash": _HASH}]), "no tenant 'z'"),
    "hash in the clear": (_file(keys=[{"id": "k", "tenant": "a", "hash": "hunter2"}]), "no valid hash"),
    "expiry without zone": (
        _file(keys=[{"id": "k", "tenant": "a", "hash": _HASH, "expires": "2030-01-01T00:00:00"}]),
        "no time zone",
    ),
    "name": ({"tenants": [{"name": "A/B"}]}, "lower-case"),
    "right": (_file(keys=[{"id": "k", "tenant": "a", "hash": _HASH, "rights": ["own"]}]), "Invalid enum"),
    "algorithm": (_file(issuers=[_ISSUER | {"algorithms": ["HS256"]}]), "Invalid enum"),
    "two sources": (_file(issuers=[_ISSUER | {"jwks_url": "https://x"}]), "either jwks_file or jwks_url"),
    "plain http": (_file(issuers=[{**_ISSUER, "jwks_file": "", "jwks_url": "http://id.example/k"}]), "not https"),
    "another host": (
        _file(issuers=[{**_ISSUER, "jwks_file": "", "jwks_url": "http://localhost:80@id.example/k"}]),
        "not https",
    ),
    "no address": (_file(issuers=[{**_ISSUER, "jwks_file": "", "jwks_url": "http://[::1"}]), "not https"),
    "no tenants": (_file(issuers=[_ISSUER | {"tenant": ""}]), "the tenants that its tokens may name"),
    "network": (_file(anonymous=[{"protocol": "rest", "tenant": "a", "networks": ["10.0.0.1/8"]}]), "no network"),
    "rate of nothing": ({"tenants": [{"name": "a", "rates": {"requests_per_s": 0}}]}, "> 0.0"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_refused_and_says_where(tmp_path, name):
    content, says = WRONG_FILES[name]
    path = tmp_path / "access.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TaktlineError, match=says) as caught:
        read_access_file(path)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "hunter2" not in str(caught.value)


def test_no_file_means_everyone_and_says_so():
    async def run():
        control = AccessControl(None)
        assert control.open
        assert await control.authenticate(Credential("rest", "", None)) is OPEN
        control.admit(OPEN, CALLER, "act", "p", 1 << 40)

    asyncio.run(run())


def test_a_front_that_forgot_to_ask_who_it_is_lets_nothing_through(world):
    with pytest.raises(TaktlineError) as caught:
        AccessControl(world[0]).admit(OPEN, CALLER, "act", "p", 1)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED


# ----- paths


@pytest.mark.parametrize(
    ("path", "right", "policy"),
    [
        ("/v1/policies", None, None),
        ("/v1/policies/p", "read", "p"),
        ("/v1/policies/p/act", "act", "p"),
        ("/v1/policies/p/stream", "act", "p"),
        ("/v1/policies/p/timeline", "observe", "p"),
        ("/v1/policies/p/act/", "observe", "p"),
        ("/v2/models/p/infer", "act", "p"),
        ("/v2/models/p/versions/1/infer", "act", "p"),
        ("/v2/models/p/versions/1", "read", "p"),
        ("/v2/models/p/ready", "read", "p"),
        ("/metrics", "observe", None),
        ("/", "observe", None),
        ("/anything/new", "observe", None),
    ],
)
def test_what_a_path_needs(path, right, policy):
    assert need_of(path)[:2] == (right, policy)


def test_credentials_of_every_client():
    assert secret_in("Bearer k") == "k"
    assert secret_in("bearer k") == "k"
    assert secret_in("Api-Key k") == "k"
    assert secret_in("Basic YW55OnRrbF94X3k=") == "tkl_x_y"
    assert secret_in("Basic !!") == ""
    assert secret_in("Digest k") is None
    assert secret_in("") is None


def test_patterns():
    assert fits(("*",), "x")
    assert fits(("pick-*",), "pick-")
    assert not fits(("pick-*",), "pick")
    assert not fits((), "x")
    assert Principal("t", "n", frozenset({"act"}), (("a*",), ("*b",))).may("act", "ab") is False, (
        "* only ends a pattern"
    )


# ----- rates


def test_a_bucket_fills_and_says_how_long():
    bucket = TokenBucket(rate=2.0, burst=3.0, now=0.0)
    for _ in range(3):
        assert bucket.wait_s(1.0, 0.0) == 0.0
        bucket.take(1.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(0.5)
    assert bucket.wait_s(1.0, 0.5) == 0.0
    assert bucket.wait_s(100.0, 10.0) == 0.0, "what is over the burst needs a full bucket, no more"


def test_what_was_over_the_burst_is_a_debt():
    """Else a caller of large bodies would pay for one burst with each of them."""
    quota = Quota.of(Rates(mib_per_s=1.0), 0.0)
    assert admit([quota], 10 << 20, 0.0) == 0.0
    assert admit([quota], 1 << 20, 0.0) == pytest.approx(10.0)
    assert admit([quota], 1 << 20, 9.0) == pytest.approx(1.0)
    assert admit([quota], 1 << 20, 10.0) == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1 << 20)), max_size=60),
    st.floats(0.5, 50),
    st.integers(1, 10),
)
def test_never_more_than_burst_and_rate_allow(steps, rate, burst):
    quota = Quota.of(Rates(requests_per_s=rate, burst=burst), 0.0)
    now = passed = 0.0
    for gap, size in steps:
        now += gap
        wait = admit([quota], size, now)
        passed += wait == 0.0
        assert passed <= burst + rate * now + 1e-6
        if wait > 0.0:
            assert admit([quota], size, now + wait + 1e-6) == 0.0, "after the hint it is admitted"
            now += wait + 1e-6
            passed += 1


def test_one_refusing_bucket_costs_the_others_nothing():
    wide, narrow = Quota.of(Rates(requests_per_s=10.0), 0.0), Quota.of(Rates(requests_per_s=1.0), 0.0)
    assert admit([wide, narrow], 0, 0.0) == 0.0
    for _ in range(50):
        assert admit([wide, narrow], 0, 0.0) > 0.0
    for _ in range(9):
        assert admit([wide], 0, 0.0) == 0.0


def test_rates_of_a_tenant(world):
    path, keys, _ = world

    async def run():
        control = AccessControl(path)
        b = await control.authenticate(Credential("rest", "1.1.1.1:1", keys["robot-b"]))
        a = await control.authenticate(Credential("rest", "1.1.1.1:1", keys["robot-a"]))
        with pytest.raises(TaktlineError) as caught:
            control.admit(b, CALLER, "act", "p", 2 << 20)
        assert caught.value.code is ErrorCode.BODY_TOO_LARGE
        for _ in range(3):
            control.admit(b, CALLER, "act", "p", 10)
        with pytest.raises(TaktlineError) as caught:
            control.admit(b, CALLER, "act", "p", 10)
        assert caught.value.code is ErrorCode.RATE_LIMITED
        assert 0 < caught.value.retry_after_ms <= 500
        for _ in range(100):
            control.admit(a, CALLER, "act", "p", 10)

    asyncio.run(run())


def test_a_token_named_like_a_key_does_not_share_that_keys_rates(world):
    """Two namespaces: who may name its tokens' subjects must not be able to spend a key's rate."""
    path, _, file = world
    limited = msgspec.structs.replace(file.keys[0], rates=Rates(requests_per_s=0.001, burst=1))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, keys=(limited, *file.keys[1:]))))
    secret = world[1]["robot-a"]

    async def run():
        control = AccessControl(path)
        await control.start()
        key = await control.authenticate(Credential("rest", "1.1.1.1:1", secret))
        named_alike = await control.authenticate(Credential("rest", "1.1.1.1:1", token(sub="robot-a")))
        assert (key.name, key.tenant) == (named_alike.name, named_alike.tenant)
        for _ in range(20):
            control.admit(named_alike, CALLER, "act", "place", 10)
        control.admit(key, CALLER, "act", "place", 10)
        with pytest.raises(TaktlineError) as caught:
            control.admit(key, CALLER, "act", "place", 10)
        assert caught.value.code is ErrorCode.RATE_LIMITED
        control.admit(named_alike, CALLER, "act", "place", 10)
        await control.close()

    asyncio.run(run())


def test_the_audit_log_tells_a_token_from_a_key_of_its_name(world, tmp_path):
    path, keys, _ = world
    file = tmp_path / "audit.jsonl"

    async def run():
        control = AccessControl(path, AuditLog(file))
        await control.start()
        for secret in (keys["robot-a"], token(sub="robot-a")):
            caller = Credential("rest", "1.1.1.1:1", secret)
            control.authorise(await control.authenticate(caller), caller, "act", "pick-left")
        await control.close()

    asyncio.run(run())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["caller"], line["credential"]) for line in lines] == [("robot-a", "key"), ("robot-a", "token")]


PROTOCOLS = ("rest", "stream", "openpi", "groot", "lerobot", "vla-eval", "kserve")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_rate_limited_reaches_the_audit_log_over_every_protocol(world, tmp_path, protocol):
    """Whichever front counts a request, its refusal is written where the access decisions are."""
    path, _, file = world
    anonymous = Anonymous(protocol=protocol, tenant="b", rates=Rates(requests_per_s=0.001, burst=1))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, anonymous=(anonymous,))))
    audit_file, routes = tmp_path / "audit.jsonl", tmp_path / "routes.json"
    routes.write_text('{"routes": []}')
    sent = Observation(
        robot_id="arm", session_id="s", seq=1, captured_at=0.0, budget_ms=99.0, images={}, state=[0.0], instruction="go"
    )

    async def run():
        gateway = Gateway(Settings(routes=routes, access_file=path, audit_log=audit_file))
        service = GatewayService(gateway)
        codes = []
        for _ in range(2):
            try:
                await service.submit(Caller.connecting(protocol, "10.0.0.1:5", "arm"), "pick", sent)
            except TaktlineError as error:
                codes.append(error.code.value)
        gateway.access.audit.close()
        return codes

    assert asyncio.run(run()) == ["unknown_policy", "rate_limited"]
    found = [json.loads(line) for line in audit_file.read_text().splitlines()]
    (line,) = [line for line in found if line["outcome"] == "rate_limited"]
    expected = {"protocol": protocol, "tenant": "b", "right": "act", "policy": "pick", "robot": "arm"}
    assert expected.items() <= line.items()


# ----- the audit log


def test_repetitions_become_one_line_with_their_number(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "KINDS_KEPT", 2)
    path = tmp_path / "audit.jsonl"
    book = AuditLog(path)
    one = Decision("allowed", "a", "robot-a", "act", "pick", "rest", "10.0.0.1")
    for number in range(5):
        book.note(one, float(number), robot="arm", request_id=f"r{number}")
    book.note(one, 100.0, robot="arm", request_id="r5")
    other = Decision("forbidden", "a", "robot-a", "act", "place", "rest", "10.0.0.1")
    for number in range(3):
        book.note(other, float(number))
    book.close()
    assert path.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["outcome"], line.get("count")) for line in lines] == [
        ("access_decision", "allowed", None),
        ("access_decisions", "allowed", 4),
        ("access_decision", "allowed", None),
        ("access_decision", "forbidden", None),
        ("access_decisions", "forbidden", 2),
    ]
    assert sum(line.get("count", 1) for line in lines) == 9, "every decision is accounted for"


def test_repetitions_of_a_caller_who_has_gone_are_written_all_the_same(tmp_path):
    path = tmp_path / "audit.jsonl"
    book = AuditLog(path)
    guess = Decision("unauthenticated", "", "", "", "", "rest", "10.0.0.9")
    for number in range(500):
        book.note(guess, 0.01 * number)
    book.note(Decision("allowed", "a", "robot-a", "act", "pick", "rest", "10.0.0.1"), 30.0)
    book.write_due(59.0)
    assert len(path.read_text().splitlines()) == 2
    book.write_due(60.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (lines[-1]["outcome"], lines[-1]["count"]) == ("unauthenticated", 499)
    assert len(book._kinds) == 1
    book.close()


def test_memory_of_the_audit_log_is_bounded(monkeypatch):
    monkeypatch.setattr(audit, "KINDS_KEPT", 16)
    book = AuditLog()
    for number in range(1000):
        book.note(Decision("unauthenticated", "", "", "", "", "rest", f"10.0.{number}.1"), 0.0)
    assert len(book._kinds) == 16


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_audit_disk_stops_no_robot_and_loses_no_decision(caplog):
    caplog.set_level(logging.INFO, logger="taktline.audit")
    book = AuditLog(Path("/dev/full"))
    decision = Decision("allowed", "plant-a", "line-3", "act", "weld", "rest", "10.0.0.1")
    book.note(decision, 0.0, robot="arm-7", request_id="r1")
    book.note(decision, 1.0, robot="arm-7", request_id="r2")
    book.close()
    lines = [vars(record) for record in caplog.records]
    first = next(line for line in lines if line["msg"] == "access_decision")
    assert (first["caller"], first["robot"], first["levelname"]) == ("line-3", "arm-7", "ERROR")
    assert "space" in first["audit_file_failed"]
    assert next(line for line in lines if line["msg"] == "access_decisions")["count"] == 1


# ----- new-key


def arguments(path: Path, key_id: str) -> argparse.Namespace:
    return argparse.Namespace(id=key_id, tenant="t", rights=("act",), policy=[], expires_days=None, access_file=path)


def test_a_key_that_is_made_meanwhile_is_kept(tmp_path):
    """Each of two at a time read the file, and the second one replaced it without the first one's key."""
    path = tmp_path / "access.json"
    make_key(arguments(path, "first"))
    other = Thread(target=make_key, args=(arguments(path, "second"),), daemon=True)
    with (tmp_path / ".access.json.lock").open("ab") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        other.start()
        other.join(0.3)
        assert other.is_alive(), "it waits for whoever is at the file"
        assert len(read_access_file(path).keys) == 1
    other.join(20)
    assert [key.id for key in read_access_file(path).keys] == ["first", "second"]
    assert {found.name for found in tmp_path.iterdir()} == {"access.json", ".access.json.lock"}


def test_a_link_to_the_access_file_stays_one(tmp_path):
    path, link = tmp_path / "real.json", tmp_path / "access.json"
    make_key(arguments(path, "first"))
    link.symlink_to(path)
    make_key(arguments(link, "second"))
    assert link.is_symlink()
    assert len(read_access_file(path).keys) == 2


# ----- what is no address


@pytest.mark.parametrize("origin", [b"http://[", b"http://[::1", b"null", b""])
def test_an_origin_that_is_no_address_is_another_site(origin):
    with pytest.raises(TaktlineError) as caught:
        _check_origin({"type": "websocket", "headers": [(b"origin", origin), (b"host", b"a")]})
    assert caught.value.code is ErrorCode.FORBIDDEN


def test_a_path_that_is_none_is_refused_without_a_trace(caplog):
    service = SimpleNamespace(connections=ConnectionCounts(8, 8), limits=SimpleNamespace(body_bytes=1_000))

    async def run():
        health = ("/healthz", "ok", "text/plain")
        listen = Listen("127.0.0.1", 0)
        listener = WebSocketListener("openpi", listen, service, None, health=health, keepalive_s=None)
        await listener.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(
            b"GET //[ HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await listener.close()
        return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 400 ")
    assert not [record for record in caplog.records if record.exc_info]
