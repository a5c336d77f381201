"""TLS options of the listeners from the settings, and warnings about them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simplebus.config.server_schema import NatsTlsSettings, TlsSettings

if TYPE_CHECKING:
    from simplebus.config.users import ConfiguredUsers
    from simplebus.server.tls.certificates import TlsOptions


def tls_options(table: TlsSettings) -> TlsOptions | None:
    """Return the TLS options of all listeners; None without TLS.

    Raises:
        ValueError: If the settings contradict each other.
    """
    if table.cert is not None and table.key is not None and not table.timeout:
        raise ValueError("--tls-timeout must be above 0")
    return _build(table, ca=table.ca, verify=table.verify, handshake_seconds=table.timeout)


def nats_tls_options(table: NatsTlsSettings, shared: TlsOptions | None) -> TlsOptions | None:
    """Return the TLS options of the NATS listener; None without TLS.

    Args:
        table: Settings of the NATS listener.
        shared: Options of all listeners, used if the NATS listener has no certificate.

    Raises:
        ValueError: If the settings contradict each other.
    """
    if table.cert is None and table.key is None and shared is not None:
        table = replace(
            table,
            cert=shared.cert,
            key=shared.key,
            ca=table.ca or shared.ca,
            verify=table.verify or shared.verify,
        )
    for name, reason in (
        ("handshake_first", "a client without TLS makes no handshake"),
        ("verify_and_map", "a client without TLS has no certificate"),
    ):
        if table.cert and table.key and table.optional and getattr(table, name):
            flag = f"--nats-tls-{name.replace('_', '-')}"
            raise ValueError(f"{flag} and --nats-tls-optional contradict each other: {reason}")
    return _build(
        table,
        ca=table.ca,
        verify=table.verify,
        verify_and_map=table.verify_and_map,
        handshake_first=table.handshake_first,
        optional=table.optional,
    )


def _build(table: TlsSettings | NatsTlsSettings, **options: Any) -> TlsOptions | None:
    """Return the options of a listener. Raises ValueError if the certificate or key is missing."""
    flags = {setting.field_name: setting.flag for setting in table.settings()}
    if table.cert is None and table.key is None:
        for name, value in options.items():
            if value and name in flags:
                raise ValueError(f"{flags[name]} needs {flags['cert']} and {flags['key']}")
        return None
    if table.cert is None or table.key is None:
        present, missing = ("cert", "key") if table.key is None else ("key", "cert")
        raise ValueError(f"{flags[present]} needs {flags[missing]} too")
    from simplebus.server.tls.certificates import TlsOptions

    return TlsOptions(table.cert, table.key, **options)


def tls_warnings(listeners: Iterable[TlsOptions | None]) -> list[str]:
    """Return warnings about certificates that clients reject or that accept too many clients.

    Unreadable files are skipped; they are reported elsewhere.
    """
    from simplebus.server.tls.certificates import certificate_warnings

    configured = dict.fromkeys(listener for listener in listeners if listener)
    warnings: dict[str, None] = {}
    if any(listener.requires_client_certificate and listener.ca is None for listener in configured):
        warnings[
            "--tls-verify without --tls-ca accepts client certificates of every authority that "
            "this system trusts"
        ] = None
    for listener in configured:
        with contextlib.suppress(OSError):
            warnings |= dict.fromkeys(certificate_warnings(listener))
    return list(warnings)


def certificate_user_warnings(
    users: ConfiguredUsers | None, listeners: Iterable[TlsOptions | None]
) -> list[str]:
    """Warn about users that only have a certificate, if no listener asks for certificates."""
    if users is None or any(
        listener is not None and listener.requires_client_certificate for listener in listeners
    ):
        return []
    names = [
        user.name
        for user in users.users
        if user.certificates and not (user.password or user.token or user.nkey or user.addresses)
    ]
    if not names:
        return []
    other_users = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"user {names[0]!r}{other_users} can authenticate by certificate only, and no listener "
        "asks for certificates: set --tls-verify"
    ]
