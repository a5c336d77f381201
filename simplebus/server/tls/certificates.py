"""Certificates of a TLS listener: loading, checks and reloading.

A file that cannot be used raises an error with its path. Reloaded certificates apply to new
connections only.
"""

from __future__ import annotations

import contextlib
import ssl
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

HANDSHAKE_SECONDS = 5.0
"""Default time limit of a handshake."""


class CertificateError(OSError):
    """A certificate or key file cannot be used; the message says which one and why."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """TLS options of a listener."""

    cert: Path
    """PEM file with the server certificate and its chain."""
    key: Path
    """PEM file with the private key, without a password."""
    ca: Path | None = None
    """PEM file with the CA certificates for client certificates; None for the system's."""
    verify: bool = False
    """True if clients must present a certificate."""
    verify_and_map: bool = False
    """True if the client certificate also selects the user."""
    handshake_first: bool = False
    """True if TLS starts with the first byte instead of after INFO."""
    optional: bool = False
    """True if clients may also continue without TLS."""
    handshake_seconds: float = HANDSHAKE_SECONDS
    """Time limit of a binary client's handshake."""

    @property
    def requires_client_certificate(self) -> bool:
        return self.verify or self.verify_and_map


def create_ssl_context(options: TlsOptions) -> ssl.SSLContext:
    """Return the context for server sockets. Raises CertificateError."""
    ssl_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ssl_context.minimum_version = ssl.TLSVersion.TLSv1_2
    ssl_context.options |= ssl.OP_NO_RENEGOTIATION
    for problem in check_readable(options):
        raise problem
    try:
        ssl_context.load_cert_chain(options.cert, options.key, password=_raise_encrypted_key)
    except ssl.SSLError as error:
        raise CertificateError(
            f"{options.cert} and {options.key} are not a PEM certificate and its key: "
            f"{_describe_ssl_error(error)}"
        ) from None
    except _EncryptedKeyError:
        raise CertificateError(
            f"the key {options.key} is encrypted; expected one without a password"
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
                f"{options.ca} contains no PEM certificates: {_describe_ssl_error(error)}"
            ) from None
    return ssl_context


def check_readable(options: TlsOptions) -> list[CertificateError]:
    """Return an error for each file that cannot be read."""
    found = []
    for path, description in (
        (options.cert, "certificate"),
        (options.key, "key"),
        (options.ca, "CA certificate"),
    ):
        try:
            if path is not None:
                open(path, "rb").close()
        except OSError as error:
            text = f"the {description} {path} cannot be read: {error.strerror}"
            found.append(CertificateError(error.errno, text))
    return found


def certificate_warnings(options: TlsOptions) -> list[str]:
    """Return reasons why clients may reject a usable certificate, or why its key is not safe.

    Raises:
        CertificateError: The certificate cannot be used.
    """
    found = []
    if (problem := _validity_problem(options)) is not None:
        found.append(
            f"the certificate {options.cert} {problem}: clients that verify it will not connect"
        )
    with contextlib.suppress(OSError):
        if options.key.stat().st_mode & stat.S_IROTH:
            found.append(f"the key {options.key} is readable by every user; run chmod 640 on it")
    return found


_VALIDITY_ERRORS = {9: "is not valid yet", 10: "has expired"}
"""Texts for OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


def _validity_problem(options: TlsOptions) -> str | None:
    """Return why the certificate is not valid now, found by a handshake in memory."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(options.cert)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = create_ssl_context(replace(options, verify=False, verify_and_map=False, ca=None))
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for end in (*ends, ends[0]):  # Client hello, server certificate, and the client's check.
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return _VALIDITY_ERRORS.get(error.verify_code)
    return None


class _EncryptedKeyError(Exception):
    """The key is encrypted. Without a password callback OpenSSL would ask on the terminal."""


def _raise_encrypted_key() -> NoReturn:
    raise _EncryptedKeyError


def _describe_ssl_error(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason in words."""
    words = (error.reason or str(error)).replace("_", " ").lower()
    return {"pem lib": "no such part in the file", "no start line": "it is no PEM"}.get(
        words, words
    )


class ReloadableCertificate:
    """The current SSL context of a listener. Raises CertificateError."""

    def __init__(self, options: TlsOptions) -> None:
        self.options = options
        self.context = create_ssl_context(options)
        """Context for the next handshake."""

    def reload(self) -> list[str]:
        """Read the files again for new connections. Returns `certificate_warnings`.

        Raises:
            CertificateError: A file cannot be used; the previous context stays.
        """
        made = create_ssl_context(self.options)
        found = certificate_warnings(self.options)
        self.context = made
        return found
