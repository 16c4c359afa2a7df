"""The webhook's certificate: renewed in time, rotated in steps, never one that the API server was not told to trust."""

from __future__ import annotations

import base64
import contextlib
import copy
import ssl
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from taktline_operator import certificates, certifying
from taktline_operator.kube import ApiError

NOW = datetime(2026, 3, 1, 8, 0, tzinfo=UTC)
HOSTS = ("taktline-webhook.factory.svc",)
Json = dict[str, Any]


def parsed(bundle: bytes) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(bundle)


def trusts(bundle: bytes, certificate: bytes) -> bool:
    """Whether some authority of the bundle signed the certificate."""
    shown = x509.load_pem_x509_certificate(certificate)
    for authority in parsed(bundle):
        if authority.subject == shown.issuer:
            shown.verify_directly_issued_by(authority)
            return True
    return False


def test_the_first_certificate_is_of_its_own_authority_and_names_the_hosts() -> None:
    found = certificates.renewed(None, (*HOSTS, "127.0.0.1"), b"", NOW)
    assert trusts(found.authorities, found.certificate)
    names = x509.load_pem_x509_certificate(found.certificate).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == list(HOSTS)
    assert len(names.value.get_values_for_type(x509.IPAddress)) == 1


def test_a_fresh_certificate_is_left_alone() -> None:
    first = certificates.renewed(None, HOSTS, b"", NOW)
    assert certificates.renewed(first, HOSTS, first.authorities, NOW + timedelta(days=50)) is first


def test_a_certificate_is_renewed_with_a_third_of_its_time_left_by_the_same_authority() -> None:
    first = certificates.renewed(None, HOSTS, b"", NOW)
    later = certificates.renewed(first, HOSTS, first.authorities, NOW + timedelta(days=61))
    assert later.certificate != first.certificate
    assert later.authorities == first.authorities
    assert trusts(first.authorities, later.certificate)


def test_a_new_authority_is_trusted_before_it_is_used() -> None:
    first = certificates.renewed(None, HOSTS, b"", NOW)
    now = NOW + timedelta(days=500)
    shown = certificates.renewed(first, HOSTS, first.authorities, now - timedelta(days=20))  # its first authority holds
    added = certificates.renewed(shown, HOSTS, first.authorities, now)
    assert len(parsed(added.authorities)) == 2
    assert added.certificate == shown.certificate
    assert certificates.renewed(added, HOSTS, first.authorities, now) == added  # until the API server was told
    used = certificates.renewed(added, HOSTS, added.authorities, now)
    assert used.certificate != shown.certificate
    assert trusts(parsed(used.authorities)[0].public_bytes(certificates.serialization.Encoding.PEM), used.certificate)
    assert trusts(used.authorities, shown.certificate)  # a replica that has not looked yet still shows it


def test_over_years_no_certificate_is_ever_shown_that_the_api_server_does_not_trust() -> None:
    told, stored = b"", None
    now = NOW
    authorities = set()
    for _ in range(200):
        previous = stored
        stored = certificates.renewed(stored, HOSTS, told, now)
        for shown in filter(None, (previous, stored)):  # one replica has looked, another not yet
            assert not told or trusts(told, shown.certificate), now
            assert trusts(stored.authorities, shown.certificate), now
        assert x509.load_pem_x509_certificate(stored.certificate).not_valid_after_utc > now
        told = stored.authorities
        authorities.add(parsed(told)[0].subject)
        assert len(parsed(told)) <= 2
        now += timedelta(days=14)
    assert len(authorities) >= 5


def test_an_authority_that_ran_out_is_dropped_and_a_dead_one_replaced_at_once() -> None:
    first = certificates.renewed(None, HOSTS, b"", NOW)
    late = certificates.renewed(first, HOSTS, first.authorities, NOW + timedelta(days=800))
    assert len(parsed(late.authorities)) == 1
    assert trusts(late.authorities, late.certificate)


def test_another_name_of_the_service_is_another_certificate() -> None:
    first = certificates.renewed(None, HOSTS, b"", NOW)
    assert certificates.renewed(first, ("other.svc",), first.authorities, NOW).certificate != first.certificate


@pytest.mark.parametrize("part", ["authorities", "authority_key", "certificate", "key"])
def test_what_cannot_be_read_or_does_not_belong_together_is_made_anew(part: str) -> None:
    first, second = (certificates.renewed(None, HOSTS, b"", NOW) for _ in range(2))
    for broken in (b"nonsense", getattr(second, part)):
        parts = {name: getattr(first, name) for name in first.__struct_fields__}
        found = certificates.renewed(certificates.Stored(**parts | {part: broken}), HOSTS, b"", NOW)
        assert trusts(found.authorities, found.certificate)
        assert certificates.renewed(found, HOSTS, found.authorities, NOW) is found


class Api:
    """One Secret and one configuration; a write with an old version is refused."""

    def __init__(self) -> None:
        self.secret: Json | None = {"metadata": {"name": "s", "namespace": "n", "resourceVersion": "1"}}
        hooks = [{"name": "a", "clientConfig": {"service": {}}}]
        self.configuration: Json | None = {"metadata": {"name": "c"}, "webhooks": hooks}
        self.writes: list[str] = []

    async def get(self, kind: str, namespace: str | None, name: str) -> Json | None:
        return copy.deepcopy(self.secret if kind == "Secret" else self.configuration)

    async def replace(self, body: Json) -> Json:
        assert self.secret is not None
        if body["metadata"]["resourceVersion"] != self.secret["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "somebody was faster")
        self.writes.append("Secret")
        self.secret = copy.deepcopy(body)
        self.secret["metadata"]["resourceVersion"] += "1"
        return self.secret

    async def apply(self, desired: Json, subresource: str = "") -> Json:
        assert self.configuration is not None
        self.writes.append("Configuration")
        self.configuration["webhooks"][0]["clientConfig"] |= desired["webhooks"][0]["clientConfig"]
        return self.configuration


def managed(api: Api, now: list[datetime]) -> certifying.SelfManaged:
    return certifying.SelfManaged(api, "n", "s", "c", HOSTS, lambda: now[0])


async def test_a_first_look_stores_tells_and_shows_and_a_second_writes_nothing() -> None:
    api, context = Api(), certifying.Context()
    source = managed(api, [NOW])
    assert await source.look(context) == ""
    assert api.writes == ["Secret", "Configuration"]
    assert context.certificate
    assert await source.look(context) == ""
    assert len(api.writes) == 2
    assert api.configuration is not None
    bundle = base64.b64decode(api.configuration["webhooks"][0]["clientConfig"]["caBundle"])
    assert trusts(bundle, context.certificate)


async def test_a_replica_that_comes_second_takes_over_what_the_first_wrote() -> None:
    api = Api()
    first, second = certifying.Context(), certifying.Context()
    await managed(api, [NOW]).look(first)
    await managed(api, [NOW]).look(second)
    assert second.certificate == first.certificate
    assert api.writes == ["Secret", "Configuration"]


async def test_of_two_replicas_that_renew_at_once_one_is_refused_and_shows_nothing_of_its_own() -> None:
    api, context = Api(), certifying.Context()
    held = await api.get("Secret", "n", "s")
    await managed(api, [NOW]).look(certifying.Context())
    current, api.secret = api.secret, held
    slow = managed(api, [NOW])

    async def outdated(kind: str, namespace: str | None, name: str) -> Json | None:
        found = copy.deepcopy(held if kind == "Secret" else api.configuration)
        api.secret = current
        return found

    api.get = outdated  # type: ignore[method-assign]
    with pytest.raises(ApiError) as caught:
        await slow.look(context)
    assert certifying.is_conflict(caught.value)
    assert context.certificate == b""


async def test_trust_that_was_taken_out_of_the_configuration_is_told_again() -> None:
    api, context = Api(), certifying.Context()
    source = managed(api, [NOW])
    await source.look(context)
    assert api.configuration is not None
    del api.configuration["webhooks"][0]["clientConfig"]["caBundle"]
    await source.look(context)
    assert api.writes == ["Secret", "Configuration", "Configuration"]


async def test_what_is_missing_is_named() -> None:
    api, context = Api(), certifying.Context()
    api.configuration = None
    assert "nothing asks this webhook" in await managed(api, [NOW]).look(context)
    assert context.certificate  # it answers as soon as somebody asks
    api.secret = None
    assert "Secret n/s does not exist" in await managed(api, [NOW]).look(context)


def shown(context: certifying.Context) -> bytes:
    """The certificate (PEM) that a client gets to see; it trusts any, for those of the tests are of another time."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.ssl.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    der = client.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)


async def test_files_that_somebody_else_renews_are_followed_and_a_broken_pair_keeps_the_last(tmp_path: Any) -> None:
    context, source = certifying.Context(), certifying.FromFiles(tmp_path)
    assert "no usable certificate" in await source.look(context)
    first, second = (certificates.renewed(None, HOSTS, b"", NOW) for _ in range(2))
    (tmp_path / "tls.crt").write_bytes(first.certificate)
    (tmp_path / "tls.key").write_bytes(first.key)
    assert await source.look(context) == ""
    (tmp_path / "tls.crt").write_bytes(second.certificate)  # its key is not there yet
    assert "no usable certificate" in await source.look(context)
    assert context.certificate == first.certificate
    assert shown(context) == first.certificate, "it still answers"
    (tmp_path / "tls.key").write_bytes(second.key)
    assert await source.look(context) == ""
    assert context.certificate == second.certificate
    assert shown(context) == second.certificate


class Killed(BaseException):
    """The replica's process ends here."""


class Door:
    """The API as one replica calls it; the process ends before, or just after, its n-th call."""

    def __init__(self, api: Api, kill_at: int, *, after: bool) -> None:
        self._api, self._kill_at, self._after = api, kill_at, after
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._api, name)

        async def counted(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == self._kill_at and not self._after:
                raise Killed
            result = await call(*arguments)
            if self.calls == self._kill_at:
                raise Killed
            return result

        return counted


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kill_at", range(1, 16))
async def test_a_replica_that_dies_at_any_call_of_a_rotation_leaves_a_certificate_that_is_trusted(
    kill_at: int, after: bool
) -> None:
    """Two replicas, one of which dies and starts anew; from the first look to past the change of the authority."""
    api, now = Api(), [NOW]
    contexts = [certifying.Context(), certifying.Context()]
    door = Door(api, kill_at, after=after)
    sources = [managed(door, now), managed(api, now)]  # type: ignore[arg-type]
    deaths = 0
    for day in (0, 0, 0, 61, 61, 430, 487, 487, 487, 487, 500, 560):
        now[0] = NOW + timedelta(days=day)
        for number in range(2):
            try:
                await sources[number].look(contexts[number])
            except Killed:
                deaths += 1
                contexts[number], sources[number] = certifying.Context(), managed(api, now)
        assert api.configuration is not None
        told = base64.b64decode(api.configuration["webhooks"][0]["clientConfig"].get("caBundle", ""))
        for context in contexts:
            assert not context.certificate or trusts(told, context.certificate), day
    assert deaths == 1
    assert contexts[0].certificate == contexts[1].certificate
    assert len(parsed(told)) == 2
    assert x509.load_pem_x509_certificate(contexts[0].certificate).issuer == parsed(told)[0].subject
