"""A certificate authority for tests: issues PEM files for servers and clients."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """One authority and what it has issued, as files in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._signed(self._name, self._key, authority=True)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *hosts: str, ends: datetime.datetime | None = None) -> tuple[Path, Path]:
        """Certificate and key of `name`, good for `hosts`, for a day or until `ends`."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._signed(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, hosts, ends=ends)
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        form = serialization.PrivateFormat.PKCS8
        plain = serialization.NoEncryption()
        for path, data in zip(
            paths,
            (
                certificate.public_bytes(serialization.Encoding.PEM),
                key.private_bytes(serialization.Encoding.PEM, form, plain),
            ),
            strict=True,
        ):
            path.write_bytes(data)
        return paths

    def _signed(self, subject, key, hosts=(), *, authority=False, ends=None) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(ends or now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), False)
        return builder.sign(self._key, hashes.SHA256())


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
