"""Options of `serve` for the NATS listener.

Invalid values raise typer.BadParameter, contradicting options raise ValueError; both name the
options. Secrets have no options, because every user can list command lines. Heavy modules are
imported when the command runs, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import (
    NATS_PORT,
    format_size,
    option,
    parse_class,
    parse_port,
    parse_seconds,
    parse_size,
)
from simplebus.nats.limits import NatsLimits

if TYPE_CHECKING:
    from simplebus.core.protocol.requests import NamedClass
    from simplebus.core.users.users import Users
    from simplebus.nats.settings import NatsSettings
    from simplebus.nats.subject_permissions import SubjectPermissions
    from simplebus.nats.users import NatsAuth
    from simplebus.server.tls.certificates import TlsOptions

NATS, NATS_TLS = "NATS", "NATS over TLS"
"""Headings of these options in the help."""

DEFAULT_NATS = NatsLimits()

NATS_LIMIT_FLAGS = {
    "max_payload": "--nats-max-payload",
    "max_control_line": "--nats-max-control-line",
    "max_subs": "--nats-max-subs",
    "max_pending": "--nats-max-pending",
    "connections": "--nats-max-connections",
    "auth_seconds": "--nats-auth-timeout",
    "tls_seconds": "--nats-tls-timeout",
    "ping_seconds": "--nats-ping-interval",
    "pings_max": "--nats-max-pings-out",
    "write_seconds": "--nats-write-timeout",
    "lame_duck_grace_seconds": "--nats-lame-duck-grace",
    "lame_duck_seconds": "--nats-lame-duck-time",
}
"""The option of each field of `NatsLimits`."""

TLS_FLAGS = {
    "cert": "--nats-tls-cert",
    "key": "--nats-tls-key",
    "ca": "--nats-tls-ca",
    "verify": "--nats-tls-verify",
    "verify_and_map": "--nats-tls-verify-and-map",
    "handshake_first": "--nats-tls-handshake-first",
    "optional": "--nats-tls-optional",
}
"""The option of each field of `TlsOptions`."""

SECRETS = ("SIMPLEBUS_NATS_TOKEN", "SIMPLEBUS_NATS_USER", "SIMPLEBUS_NATS_PASSWORD")
"""Environment variables with a token, or a user and password, that NATS clients must present."""


def value_name(flag: str) -> str:
    """Return the parameter name of an option."""
    return flag.removeprefix("--").replace("-", "_")


def _size(flag: str, text: str, default: str) -> Any:
    return option(flag, text, panel=NATS, parser=parse_size, metavar="SIZE", show_default=default)


def _seconds(flag: str, text: str, default: float) -> Any:
    return option(
        flag,
        text,
        panel=NATS,
        parser=parse_seconds,
        metavar="SECONDS",
        show_default=f"{default:g}",
    )


def _count(flag: str, text: str, **more: Any) -> Any:
    return option(flag, text, panel=NATS, min=0, metavar="COUNT", **more)


def _file(flag: str, text: str) -> Any:
    return option(flag, text, panel=NATS_TLS, metavar="FILE", parser=Path, show_default=False)


def _switch(flag: str, text: str) -> Any:
    return option(flag, text, panel=NATS_TLS)


NatsPort = Annotated[
    int | None,
    option(
        "--nats-port",
        "TCP port for NATS clients. 0 picks a free port, which the ready line shows.",
        panel=NATS,
        parser=parse_port,
        metavar="PORT",
        show_default="4222, or 0 with --port 0",
    ),
]
NoNats = Annotated[bool, option("--no-nats", "Do not open the port for NATS clients.", panel=NATS)]
MaxPayload = Annotated[
    int,
    _size(
        "--nats-max-payload",
        "Maximum size of a message from a NATS client, including headers. The server disconnects a "
        "client that sends a longer one.",
        format_size(DEFAULT_NATS.max_payload),
    ),
]
MaxControlLine = Annotated[
    int,
    _size(
        "--nats-max-control-line",
        "Maximum size of a protocol line from a NATS client, without payload. The server "
        "disconnects a client that sends a longer one.",
        format_size(DEFAULT_NATS.max_control_line),
    ),
]
MaxSubs = Annotated[
    int,
    _count(
        "--nats-max-subs",
        "Maximum number of subscriptions of one NATS client. Further subscriptions are refused. 0 "
        "sets no limit.",
    ),
]
MaxPending = Annotated[
    int | None,
    _size(
        "--nats-max-pending",
        "Maximum size of the unsent data of one NATS client. Above it, the client is a slow "
        "consumer and is disconnected.",
        f"{format_size(DEFAULT_NATS.max_pending)}, at least --nats-max-payload",
    ),
]
MaxConnections = Annotated[
    int,
    _count(
        "--nats-max-connections",
        "Maximum number of connected NATS clients. Further clients receive an error and are "
        "disconnected.",
    ),
]
PingInterval = Annotated[
    float,
    _seconds(
        "--nats-ping-interval",
        "Time of silence after which the server sends PING to a NATS client.",
        DEFAULT_NATS.ping_seconds,
    ),
]
MaxPingsOut = Annotated[
    int,
    _count(
        "--nats-max-pings-out",
        "Maximum number of PINGs without an answer. The server then disconnects the NATS client.",
    ),
]
AuthTimeout = Annotated[
    float,
    _seconds(
        "--nats-auth-timeout",
        "Maximum time for a NATS client to authenticate, if users are configured.",
        DEFAULT_NATS.auth_seconds,
    ),
]
WriteTimeout = Annotated[
    float,
    _seconds(
        "--nats-write-timeout",
        "Time until a NATS client that reads nothing is disconnected, if data waits for it.",
        DEFAULT_NATS.write_seconds,
    ),
]
LameDuckGrace = Annotated[
    float,
    _seconds(
        "--nats-lame-duck-grace",
        "Time for NATS clients to disconnect by themselves after SIGUSR2 (lame duck mode).",
        DEFAULT_NATS.lame_duck_grace_seconds,
    ),
]
LameDuckTime = Annotated[
    float,
    _seconds(
        "--nats-lame-duck-time",
        "Period over which the server then disconnects the remaining NATS clients, one by one.",
        DEFAULT_NATS.lame_duck_seconds,
    ),
]
TlsTimeout = Annotated[
    float,
    _seconds(
        "--nats-tls-timeout",
        "Maximum time for the TLS handshake of a NATS client.",
        DEFAULT_NATS.tls_seconds,
    ),
]
TlsCert = Annotated[
    Path | None,
    _file(
        "--nats-tls-cert",
        "PEM file with the certificate of the NATS listener and the intermediate certificates. "
        "With it, NATS clients must use TLS.",
    ),
]
TlsKey = Annotated[
    Path | None,
    _file("--nats-tls-key", "PEM file with the unencrypted private key of --nats-tls-cert."),
]
TlsCa = Annotated[
    Path | None,
    _file(
        "--nats-tls-ca",
        "PEM file of the certificate authorities that may sign client certificates. By default, "
        "the system's authorities.",
    ),
]
TlsVerify = Annotated[
    bool, _switch("--nats-tls-verify", "Require a trusted certificate from every NATS client.")
]
TlsVerifyAndMap = Annotated[
    bool,
    _switch(
        "--nats-tls-verify-and-map",
        "Require a certificate and take the user from it: an email address, a DNS name or the "
        "certificate's subject.",
    ),
]
TlsHandshakeFirst = Annotated[
    bool,
    _switch(
        "--nats-tls-handshake-first",
        "Start TLS with the first byte, instead of after the server's INFO line.",
    ),
]
TlsOptional = Annotated[
    bool, _switch("--nats-tls-optional", "Accept NATS clients with TLS and without it.")
]


def parse_binding(text: str | NamedClass) -> NamedClass:
    """Return the class and its bound subject from "orders.>=7" or "orders.>=orders".

    Raises:
        typer.BadParameter: If the text is not a binding.
    """
    from simplebus.core.errors import RemoteProtocolError
    from simplebus.core.message_class.subject_bindings import check_subject
    from simplebus.core.protocol.requests import NamedClass

    if isinstance(text, NamedClass):
        return text
    subject, equals, class_ = text.rpartition("=")
    if not equals:
        raise typer.BadParameter(
            f"{text!r} is not a binding; write a subject, = and a class, such as orders.>=7"
        )
    try:
        check_subject(subject)
    except RemoteProtocolError as error:
        raise typer.BadParameter(error.sentence) from None
    class_id_or_name = parse_class(class_)
    if isinstance(class_id_or_name, int):
        return NamedClass(id=class_id_or_name, subjects=[subject])
    return NamedClass(name=class_id_or_name, subjects=[subject])


Bind = Annotated[
    list[Any] | None,
    option(
        "--bind",
        "Store messages that NATS clients publish on a subject in a class, until the class's "
        "subscribers have acknowledged them: [bold]orders.>=7[/bold], or "
        "[bold]orders.>=orders[/bold] by name. Repeat the option for more bindings.",
        panel=NATS,
        metavar="SUBJECT=CLASS",
        parser=parse_binding,
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """Settings of the NATS listener."""

    port: int | None
    """None if the listener is closed."""
    settings: NatsSettings
    tls: TlsOptions | None

    @property
    def connections(self) -> int:
        """Maximum number of open NATS connections."""
        return 0 if self.port is None else self.settings.limits.connections

    classes: tuple[NamedClass, ...] = ()
    """Classes of the configuration file and classes with bound subjects."""


def nats_options(
    given: Collection[str],
    *,
    auth: NatsAuth | None = None,
    classes: Mapping[str, NamedClass] | None = None,
    environment: Mapping[str, str] | None = None,
    shared: TlsOptions | None = None,
    users: Users | None = None,
    users_nats: Mapping[str, SubjectPermissions] | None = None,
    **values: Any,
) -> NatsOptions:
    """Return the settings of the NATS listener.

    Args:
        given: Names of the options on the command line.
        auth: NATS users of the configuration file.
        classes: Classes of the configuration file, by name.
        environment: Environment variables, which may contain `SECRETS`.
        shared: Certificate of all listeners, used if the NATS listener has none.
        users: Users of all listeners.
        users_nats: By user name, permissions for subjects that are bound to no class.
        values: Values of all options.

    Raises:
        ValueError: If the options contradict each other.
    """
    from simplebus.nats.settings import NatsSettings
    from simplebus.nats.users import NatsAuth

    port: int | None = values["nats_port"]
    if port is None:
        port = NATS_PORT if values["port"] else 0
    if values["no_nats"]:
        for name in sorted(given):
            if name.startswith("nats_") or name == "bind":
                raise ValueError(f"--no-nats and --{name.replace('_', '-')} contradict each other")
        port = None
    limits = {name: values[value_name(flag)] for name, flag in NATS_LIMIT_FLAGS.items()}
    if limits["max_pending"] is None:
        limits["max_pending"] = max(DEFAULT_NATS.max_pending, limits["max_payload"])
    tls = _tls(shared, **{name: values[value_name(flag)] for name, flag in TLS_FLAGS.items()})
    own_auth = _auth(auth or NatsAuth(), environment or {})
    if tls is None or not tls.verify_and_map:
        own_auth.check_credentials()
    try:
        settings = NatsSettings(
            limits=NatsLimits(**limits),
            auth=replace(own_auth, shared_users=users, shared_permissions=users_nats or {}),
            tls_required=tls is not None and not tls.optional,
            tls_available=tls is not None and tls.optional,
            tls_verify=tls is not None and tls.requires_client_certificate,
        )
    except ValueError as error:
        raise ValueError(name_limit_option(str(error))) from None
    named_classes = (classes or {}).values()
    return NatsOptions(port, settings, tls, (*named_classes, *(values["bind"] or ())))


def _auth(auth: NatsAuth, environment: Mapping[str, str]) -> NatsAuth:
    """Return `auth` with the secrets of the environment, which override those of the file."""
    from simplebus.nats.users import NatsUser

    token, name, password = (environment.get(variable, "") for variable in SECRETS)
    if bool(name) != bool(password):
        raise ValueError(f"{SECRETS[1]} and {SECRETS[2]} need each other")
    if token:
        auth = replace(auth, token=token)
    if name:
        others = tuple(user for user in auth.users if user.name != name)
        auth = replace(auth, users=(*others, NatsUser(name, password)))
    return auth


def _tls(
    shared: TlsOptions | None, *, cert: Path | None, key: Path | None, **options: Any
) -> TlsOptions | None:
    if cert is None and key is None and shared is not None:
        cert, key = shared.cert, shared.key
        options["ca"] = options["ca"] or shared.ca
        options["verify"] = options["verify"] or shared.verify
    if cert is None and key is None:
        for name, value in options.items():
            if value:
                raise ValueError(f"{TLS_FLAGS[name]} needs --nats-tls-cert and --nats-tls-key")
        return None
    if cert is None or key is None:
        both = "--nats-tls-cert", "--nats-tls-key"
        raise ValueError("{} needs {} too".format(*(both if key is None else both[::-1])))
    if options["handshake_first"] and options["optional"]:
        raise ValueError(
            "--nats-tls-handshake-first and --nats-tls-optional contradict each other: a client "
            "without TLS makes no handshake"
        )
    if options["verify_and_map"] and options["optional"]:
        raise ValueError(
            "--nats-tls-verify-and-map and --nats-tls-optional contradict each other: a client "
            "without TLS has no certificate"
        )
    from simplebus.server.tls.certificates import TlsOptions

    return TlsOptions(cert=cert, key=key, **options)


def name_limit_option(text: str) -> str:
    """Return an error message about a NATS limit with the option instead of the field name."""
    for name, flag in NATS_LIMIT_FLAGS.items():
        if text.startswith(f"limit {name} "):
            why = ""
            if name == "max_pending" and " from " in text:
                why = " (a message of --nats-max-payload must fit into it)"
            return text.replace(f"limit {name} ", f"{flag} ", 1) + why
    return text
