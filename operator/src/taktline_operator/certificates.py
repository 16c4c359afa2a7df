"""Certificates of the admission webhook: an authority of its own, and its rotation in steps that refuse nobody.

Pure: what is stored and what the API server has been told in, what to store out. A new authority is first only added
to the bundle that the API server trusts; a certificate of it is issued in a later look, once the bundle was seen there.
Old authorities stay in the bundle until they run out (their keys are thrown away), so replicas that still serve an
older certificate are trusted as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from ipaddress import ip_address

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_FOR = timedelta(days=730)
SERVING_FOR = timedelta(days=90)
RENEW_SHARE = 1 / 3  # of its time; with less left a certificate is made anew
CLOCK_SKEW = timedelta(minutes=10)


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What the Secret holds, all PEM.

    Attributes:
        authorities: trusted authorities, the newest first.
        authority_key: key of the newest.
        certificate: what the webhook shows, with its `key`.
    """

    authorities: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes


def renewed(stored: Stored | None, hosts: Sequence[str], told: bytes, now: datetime) -> Stored:
    """What is to be stored now; `stored` itself where nothing is due.

    Args:
        stored: None where there is nothing, or nothing that can be read.
        hosts: names and addresses that the API server calls the webhook by.
        told: authorities that the API server has been told to trust, PEM.
        now: with a time zone.
    """
    if stored is None or not _is_sound(stored):
        return _begun(hosts, now)
    authorities = [found for found in x509.load_pem_x509_certificates(stored.authorities) if _valid(found, now)]
    if not authorities:
        return _begun(hosts, now)
    key = stored.authority_key
    if _is_due(authorities[0], now):
        fresh, fresh_key = _authority(now)
        authorities, key = [fresh, *authorities], _key_pem(fresh_key)
    bundle = b"".join(_pem(found) for found in authorities)
    found = msgspec.structs.replace(stored, authorities=bundle, authority_key=key)
    shown = x509.load_pem_x509_certificate(stored.certificate)
    current = shown.issuer == authorities[0].subject and not _is_due(shown, now) and _hosts(shown) == set(hosts)
    if current:
        return stored if found == stored else found
    trusted = _pem(authorities[0]) in told
    usable = _valid(shown, now) and _hosts(shown) == set(hosts)
    if usable and not trusted:
        return stored if found == stored else found  # the API server first
    certificate, serving_key = _serving(authorities[0], _load_key(key), hosts, now)
    return msgspec.structs.replace(found, certificate=certificate, key=serving_key)


def days_left(certificate: bytes, now: datetime) -> float:
    """Days until a certificate (PEM) runs out."""
    return (x509.load_pem_x509_certificate(certificate).not_valid_after_utc - now) / timedelta(days=1)


def _begun(hosts: Sequence[str], now: datetime) -> Stored:
    authority, key = _authority(now)
    certificate, serving_key = _serving(authority, key, hosts, now)
    return Stored(authorities=_pem(authority), authority_key=_key_pem(key), certificate=certificate, key=serving_key)


def _authority(now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # A name of its own for each, so that a certificate's issuer tells which one it was.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"taktline-webhook-ca-{serial:x}"[:60])])
    builder = _builder(name, name, key, serial, now, AUTHORITY_FOR)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()), key


def _serving(
    authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, hosts: Sequence[str], now: datetime
) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "taktline-webhook")])
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    builder = _builder(name, authority.subject, key, x509.random_serial_number(), now, SERVING_FOR)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
    )
    certificate = builder.add_extension(names, critical=False).sign(authority_key, hashes.SHA256())
    return _pem(certificate), _key_pem(key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    serial: int,
    now: datetime,
    valid_for: timedelta,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(serial).not_valid_before(now - CLOCK_SKEW).not_valid_after(now + valid_for)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _hosts(certificate: x509.Certificate) -> set[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}


def _valid(certificate: x509.Certificate, now: datetime) -> bool:
    return now < certificate.not_valid_after_utc


def _is_due(certificate: x509.Certificate, now: datetime) -> bool:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return ends - now < RENEW_SHARE * (ends - begins)


def _is_sound(stored: Stored) -> bool:
    """Whether all parts can be read and each key is that of its certificate."""
    try:
        newest = x509.load_pem_x509_certificates(stored.authorities)[0]
        pairs = ((newest, stored.authority_key), (x509.load_pem_x509_certificate(stored.certificate), stored.key))
        return all(_load_key(key).public_key() == certificate.public_key() for certificate, key in pairs)
    except (ValueError, TypeError, IndexError):
        return False


def _load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("the webhook's keys are elliptic")
    return key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
