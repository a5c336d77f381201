"""Certificates for tests: an authority, servers and clients."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class CertificatePair:
    """A certificate and its private key, as PEM files."""

    cert: Path
    key: Path


class CertificateAuthority:
    """Certificate authority for tests; `path` is its own certificate."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(name)
        builder = self._build_certificate(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def _build_certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        shift: datetime.timedelta = datetime.timedelta(),
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC) + shift
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    def issue(
        self,
        name: str,
        *,
        email: str = "",
        unit: str = "",
        password: bytes = b"",
        shift: datetime.timedelta = datetime.timedelta(),
        usage: x509.ObjectIdentifier | None = None,
    ) -> CertificatePair:
        """Issue a certificate for `name`; for "localhost" it includes 127.0.0.1.

        It is valid from an hour ago until tomorrow; `shift` moves that period. `usage` is its only
        extended key usage; None allows all.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = []
        if name == "localhost":
            alternatives += [
                x509.DNSName(name),
                x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            ]
        if email:
            alternatives.append(x509.RFC822Name(email))
        builder = self._build_certificate(_subject(name, unit), key.public_key(), shift)
        if alternatives:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(alternatives), critical=False
            )
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        pair = CertificatePair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        pair.cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        encryption: serialization.KeySerializationEncryption = (
            serialization.BestAvailableEncryption(password)
            if password
            else serialization.NoEncryption()
        )
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
            )
        )
        return pair


def _subject(name: str, unit: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit)] if unit else []
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def client_ssl_context(
    authority: CertificateAuthority, pair: CertificatePair | None = None
) -> ssl.SSLContext:
    """Return the context of a client that trusts `authority`; `pair` is its own certificate."""
    context = ssl.create_default_context(cafile=str(authority.path))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context
