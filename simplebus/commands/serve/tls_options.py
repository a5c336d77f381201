"""The options of `serve` about TLS and users at all doors, and what they amount to.

Rule 1: nothing heavy is imported here, so that help is instant.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from simplebus.config.mistakes import ConfigError
from simplebus.config.parse import option, parse_seconds, parse_size

if TYPE_CHECKING:
    from simplebus.config.file import Config
    from simplebus.config.users import ConfiguredUsers
    from simplebus.server.tls.certificates import TlsOptions

TLS, USERS = "TLS", "Users"
"""Under which headings the help lists them."""

SECONDS = 5.0


def _file(flag: str, text: str) -> Any:
    return option(flag, text, panel=TLS, metavar="FILE", show_default=False)


Cert = Annotated[
    Path | None,
    _file(
        "--tls-cert",
        "The server's certificate, as PEM, and those between it and its root. With it clients must "
        "use TLS, at every door that has no certificate of its own. SIGHUP reads it again.",
    ),
]
Key = Annotated[Path | None, _file("--tls-key", "Its private key, as PEM, unencrypted.")]
Ca = Annotated[
    Path | None,
    _file(
        "--tls-ca",
        "Who may have signed the certificates of clients, as PEM. Without it, whom this system "
        "trusts.",
    ),
]
Verify = Annotated[
    bool, option("--tls-verify", "Only clients that have a certificate are let in.", panel=TLS)
]
Timeout = Annotated[
    float,
    option(
        "--tls-timeout",
        "How long a client may take for its TLS handshake.",
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
        "A file of users, as [bold]simplebus user[/bold] writes it: with it, or with users in the "
        "configuration file, whoever connects has to show who it is.",
        panel=USERS,
        metavar="FILE",
        parser=Path,
        show_default="everybody may connect",
    ),
]
PerAddress = Annotated[
    int,
    option(
        "--max-connections-per-address",
        "Connections that one address may have open at once, at the binary and the NATS port "
        "together. One more is closed as soon as it comes. 0 sets no limit.",
        panel=USERS,
        min=0,
        metavar="COUNT",
    ),
]
Rate = Annotated[
    float,
    option(
        "--max-connection-rate",
        "Connections a second that one address may make for long; ten times as many at once. One "
        "more is closed as soon as it comes. 0 sets no limit.",
        panel=USERS,
        min=0,
        metavar="COUNT",
    ),
]
MessageRate = Annotated[
    float,
    option(
        "--max-message-rate",
        "Messages a second that all connections of one address together may publish for long; as "
        "many at once. What is beyond that waits, and is not lost. 0 sets no limit.",
        panel=USERS,
        min=0,
        metavar="COUNT",
    ),
]
ByteRate = Annotated[
    int,
    option(
        "--max-byte-rate",
        "Bytes a second of what they publish, in the same way. 0 sets no limit.",
        panel=USERS,
        parser=parse_size,
        metavar="SIZE",
        show_default="0",
    ),
]


def configured_users(users: Path | None, config: Config | None) -> ConfiguredUsers:
    """Those of both files. Raises ValueError."""
    from simplebus.config.users import ConfiguredUsers, read_users, together

    groups = [] if config is None else [config.users]
    if users is not None:
        try:
            found, warning = read_users(users)
        except ConfigError as error:
            raise ConfigError(*(f"--users: {each}" for each in error.messages)) from None
        if warning:
            logging.getLogger("simplebus").warning(warning)
        groups.append(found)
    return together(groups) if groups else ConfiguredUsers()


def trusting(doors: Iterable[TlsOptions | None]) -> list[str]:
    """Warnings: where more certificates are good than is likely to be meant, and where the door's
    own is no good to clients. One that cannot be used is told elsewhere."""
    from simplebus.server.tls.certificates import certificate_warnings

    used = dict.fromkeys(door for door in doors if door)
    found: dict[str, None] = {}
    if any(door.requires_client_certificate and door.ca is None for door in used):
        found[
            "clients must show a certificate, and one of any authority that this system trusts is "
            "good, as there is no --tls-ca"
        ] = None
    for door in used:
        with contextlib.suppress(OSError):
            found |= dict.fromkeys(certificate_warnings(door))
    return list(found)


def shut_out(users: ConfiguredUsers | None, doors: Iterable[TlsOptions | None]) -> list[str]:
    """A warning: who has nothing but a certificate to show, where nobody asks for one."""
    if users is None or any(
        door is not None and door.requires_client_certificate for door in doors
    ):
        return []
    names = [
        user.name
        for user in users.users
        if user.certificates and not (user.password or user.token or user.nkey or user.addresses)
    ]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"user {names[0]!r}{more} can show a certificate and nothing else, and no door asks for "
        "one: --tls-verify does"
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
    """What the options amount to; None for doors in clear. Raises ValueError when they contradict
    each other."""
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
