"""TLS for a door: the certificate that it shows, whom it asks for one, and how both are read again.

Rule 1: a certificate or key that cannot be used is a sentence that names the file.
Rule 2: one that is read again is for handshakes to come; connections that are open stay. What
cannot be used leaves what was there.
"""

from __future__ import annotations

import contextlib
import ssl
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

HANDSHAKE_SECONDS = 5.0
"""How long one may take, unless told otherwise."""


class CertificateError(OSError):
    """A certificate, or its key, cannot be used; says which file, and why."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How a door speaks TLS."""

    cert: Path
    """Its certificate, and those between it and a root, as PEM."""
    key: Path
    """The certificate's private key, as PEM, without a password."""
    ca: Path | None = None
    """Who may have signed clients' certificates, as PEM; None for whom the system trusts."""
    verify: bool = False
    """Whether clients must have a certificate."""
    verify_and_map: bool = False
    """Whether that certificate also says which user they are."""
    handshake_first: bool = False
    """Whether TLS begins with the first byte, not behind INFO."""
    optional: bool = False
    """Whether clients may also go on without."""
    handshake_seconds: float = HANDSHAKE_SECONDS
    """How long a client of the binary door may take for its handshake."""

    @property
    def requires_client_certificate(self) -> bool:
        return self.verify or self.verify_and_map


def create_ssl_context(options: TlsOptions) -> ssl.SSLContext:
    """What sockets are wrapped with. Raises CertificateError."""
    ssl_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ssl_context.minimum_version = ssl.TLSVersion.TLSv1_2
    ssl_context.options |= ssl.OP_NO_RENEGOTIATION
    for problem in check_readable(options):
        raise problem
    try:
        ssl_context.load_cert_chain(options.cert, options.key, password=_raise_encrypted_key)
    except ssl.SSLError as error:
        raise CertificateError(
            f"{options.cert} and {options.key} are no certificate and its key, as PEM: "
            f"{_describe_ssl_error(error)}"
        ) from None
    except _EncryptedKeyError:
        raise CertificateError(
            f"the key {options.key} has a password; write it without one"
        ) from None
    if options.requires_client_certificate:
        ssl_context.verify_mode = ssl.CERT_REQUIRED
        if options.ca is None:
            ssl_context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
    if options.ca is not None:
        try:
            ssl_context.load_verify_locations(options.ca)
        except ssl.SSLError as error:
            raise CertificateError(
                f"{options.ca} holds no certificates as PEM: {_describe_ssl_error(error)}"
            ) from None
    return ssl_context


def check_readable(options: TlsOptions) -> list[CertificateError]:
    """Those of its files that cannot be read: why, a sentence each."""
    found = []
    for path, what in (
        (options.cert, "certificate"),
        (options.key, "key"),
        (options.ca, "CA certificate"),
    ):
        try:
            if path is not None:
                open(path, "rb").close()
        except OSError as error:
            told = f"the {what} {path} cannot be read: {error.strerror}"
            found.append(CertificateError(error.errno, told))
    return found


def certificate_warnings(options: TlsOptions) -> list[str]:
    """Why clients may not trust a certificate that can be used, and whom a key is not safe from:
    sentences. Raises CertificateError where it cannot be used."""
    found = []
    if (problem := _validity_problem(options)) is not None:
        found.append(f"the certificate {options.cert} {problem}: clients that check it stay away")
    with contextlib.suppress(OSError):
        if options.key.stat().st_mode & stat.S_IROTH:
            found.append(f"the key {options.key} can be read by every user; chmod 640 it, or 600")
    return found


_VALIDITY_ERRORS = {9: "is not valid yet", 10: "has expired"}
"""By what OpenSSL calls X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


def _validity_problem(options: TlsOptions) -> str | None:
    """What is wrong with the time of a certificate, as one hears who trusts nothing else."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(options.cert)
    come, go = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = create_ssl_context(replace(options, verify=False, verify_and_map=False, ca=None))
    ends = client.wrap_bio(come, go), theirs.wrap_bio(go, come, server_side=True)
    for end in (*ends, ends[0]):  # It says hello, hears of the certificate, and judges it.
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return _VALIDITY_ERRORS.get(error.verify_code)
    return None


class _EncryptedKeyError(Exception):
    """A key is encrypted. Without a way to say so, OpenSSL would ask on the terminal."""


def _raise_encrypted_key() -> NoReturn:
    raise _EncryptedKeyError


def _describe_ssl_error(error: ssl.SSLError) -> str:
    """What OpenSSL has against it, in words."""
    words = (error.reason or str(error)).replace("_", " ").lower()
    return {"pem lib": "no such part in the file", "no start line": "it is no PEM"}.get(
        words, words
    )


class ReloadableCertificate:
    """What a door shows and asks for, as it was read last. Raises CertificateError."""

    def __init__(self, options: TlsOptions) -> None:
        self.options = options
        self.context = create_ssl_context(options)
        """For the next handshake."""

    def reload(self) -> list[str]:
        """Read the files again, for handshakes to come. Returns `doubts`. Raises CertificateError
        when one is no good; then nothing has changed."""
        made = create_ssl_context(self.options)
        found = certificate_warnings(self.options)
        self.context = made
        return found
