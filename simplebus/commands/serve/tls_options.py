"""Options of `serve` for TLS, users and rates of all listeners.

Heavy modules are imported when the command runs, so that `--help` is fast.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from simplebus.config.errors import ConfigError
from simplebus.config.parse import option, parse_seconds, parse_size

if TYPE_CHECKING:
    from simplebus.config.file import ConfigFile
    from simplebus.config.users import ConfiguredUsers
    from simplebus.server.tls.certificates import TlsOptions

TLS, USERS = "TLS", "Users"
"""Headings of these options in the help."""

SECONDS = 5.0


def _file(flag: str, text: str) -> Any:
    return option(flag, text, panel=TLS, metavar="FILE", parser=Path, show_default=False)


Cert = Annotated[
    Path | None,
    _file(
        "--tls-cert",
        "PEM file with the server's certificate and the intermediate certificates. With it, "
        "clients must use TLS on every listener that has no certificate of its own. SIGHUP reloads "
        "it.",
    ),
]
Key = Annotated[
    Path | None, _file("--tls-key", "PEM file with the unencrypted private key of --tls-cert.")
]
Ca = Annotated[
    Path | None,
    _file(
        "--tls-ca",
        "PEM file of the certificate authorities that may sign client certificates. By default, "
        "the system's authorities.",
    ),
]
Verify = Annotated[
    bool, option("--tls-verify", "Require a trusted certificate from every client.", panel=TLS)
]
Timeout = Annotated[
    float,
    option(
        "--tls-timeout",
        "Maximum time for the TLS handshake of a client.",
        panel=TLS,
        parser=parse_seconds,
        metavar="SECONDS",
        show_default=f"{SECONDS:g}",
    ),
]
UsersFile = Annotated[
    Path | None,
    option(
        "--users",
        "File of users, as [bold]simplebus user[/bold] writes it. With it, or with users in the "
        "configuration file, clients must authenticate.",
        panel=USERS,
        metavar="FILE",
        parser=Path,
        show_default="no authentication",
    ),
]
PerAddress = Annotated[
    int,
    option(
        "--max-connections-per-address",
        "Maximum number of open connections from one address, to the binary and the NATS port "
        "together. Further connections are closed at once. 0 sets no limit.",
        panel=USERS,
        min=0,
        metavar="COUNT",
    ),
]
Rate = Annotated[
    float,
    option(
        "--max-connection-rate",
        "Sustained rate of new connections per second from one address; bursts may be ten times as "
        "large. Further connections are closed at once. 0 sets no limit.",
        panel=USERS,
        min=0,
        metavar="COUNT",
    ),
]
MessageRate = Annotated[
    float,
    option(
        "--max-message-rate",
        "Sustained rate of messages per second that all connections of one address together may "
        "publish; bursts may contain as many. Further messages wait and are not lost. 0 sets no "
        "limit.",
        panel=USERS,
        min=0,
        metavar="COUNT",
    ),
]
ByteRate = Annotated[
    int,
    option(
        "--max-byte-rate",
        "The same limit in bytes of published messages per second. 0 sets no limit.",
        panel=USERS,
        parser=parse_size,
        metavar="SIZE",
        show_default="0",
    ),
]


def configured_users(users: Path | None, config: ConfigFile | None) -> ConfiguredUsers:
    """Return the users of the users file and the configuration file. Raises ValueError."""
    from simplebus.config.users import ConfiguredUsers, merge_users, read_users_file

    groups = [] if config is None else [config.users]
    if users is not None:
        try:
            users_of_file, warning = read_users_file(users)
        except ConfigError as error:
            raise ConfigError(*(f"--users: {each}" for each in error.messages)) from None
        if warning:
            logging.getLogger("simplebus").warning(warning)
        groups.append(users_of_file)
    return merge_users(groups) if groups else ConfiguredUsers()


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
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"user {names[0]!r}{others} can authenticate by certificate only, and no listener asks for "
        "certificates: set --tls-verify"
    ]


def tls_options(
    *,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    tls_verify: bool,
    tls_timeout: float,
    **_: Any,
) -> TlsOptions | None:
    """Return the TLS settings of all listeners; None without TLS.

    Raises:
        ValueError: If the options contradict each other.
    """
    if tls_cert is None and tls_key is None:
        for flag, value in (("--tls-ca", tls_ca), ("--tls-verify", tls_verify)):
            if value:
                raise ValueError(f"{flag} needs --tls-cert and --tls-key")
        return None
    if tls_cert is None or tls_key is None:
        both = "--tls-cert", "--tls-key"
        raise ValueError("{} needs {} too".format(*(both if tls_key is None else both[::-1])))
    if not tls_timeout:
        raise ValueError("--tls-timeout must be above 0")
    from simplebus.server.tls.certificates import TlsOptions

    return TlsOptions(tls_cert, tls_key, tls_ca, tls_verify, handshake_seconds=tls_timeout)
