"""Certificates for tests of TLS: an authority, and what it signs. All are for this machine and valid for a day."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM


class Authority:
    """Signs certificates. certificate: a file with its own, for those who shall trust it."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(name)
        signed = _builder(self._name, self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.certificate = _write(folder / f"{name}.pem", signed.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def issue(self, name: str, password: bytes | None = None) -> tuple[Path, Path]:
        """(certificate, key) of a server or client, as files; the key is encrypted if there is a password."""
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _builder(_subject(name), self._name, key.public_key()).add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, hidden)
        certificate = signed.sign(self._key, hashes.SHA256()).public_bytes(_PEM)
        return _write(self._folder / f"{name}.pem", certificate), _write(self._folder / f"{name}.key", secret)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    day = datetime.timedelta(days=1)
    return builder.not_valid_before(now - day).not_valid_after(now + day)


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
