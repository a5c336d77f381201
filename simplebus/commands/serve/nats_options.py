"""The options of `serve` that are about the NATS door, and what they amount to.

Rule 1: nothing heavy is imported here, so that help is instant.
Rule 2: a word that makes no sense raises typer.BadParameter; words that contradict each other raise
ValueError. Both say it in a sentence, by the names of the options.
Rule 3: no secret has an option: whoever lists processes would read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import (
    NATS_PORT,
    option,
    parse_class,
    parse_port,
    parse_seconds,
    parse_size,
    show_size,
)
from simplebus.nats.limits import NatsLimits

if TYPE_CHECKING:
    from simplebus.core.protocol.requests import NamedClass
    from simplebus.core.users.users import Users
    from simplebus.nats.server.permissions import SubjectPermissions
    from simplebus.nats.server.users import NatsAuth
    from simplebus.nats.settings import NatsSettings
    from simplebus.server.tls.certificates import TlsOptions

NATS, NATS_TLS = "NATS", "NATS over TLS"
"""Under which headings the help lists them."""

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
"""Variables of the environment that let clients in who say the same."""


def value_name(flag: str) -> str:
    """What an option's value is called among the values of all."""
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
    return option(flag, text, panel=NATS_TLS, metavar="FILE", show_default=False)


def _switch(flag: str, text: str) -> Any:
    return option(flag, text, panel=NATS_TLS)


NatsPort = Annotated[
    int | None,
    option(
        "--nats-port",
        "The TCP port for NATS clients. 0 picks a free one; the ready line tells which.",
        panel=NATS,
        parser=parse_port,
        metavar="PORT",
        show_default="4222, or 0 with --port 0",
    ),
]
NoNats = Annotated[
    bool, option("--no-nats", "Let no NATS client connect: keep that port closed.", panel=NATS)
]
MaxPayload = Annotated[
    int,
    _size(
        "--nats-max-payload",
        "The longest message accepted from a NATS client, headers included. Who sends a longer one "
        "is disconnected.",
        show_size(DEFAULT_NATS.max_payload),
    ),
]
MaxControlLine = Annotated[
    int,
    _size(
        "--nats-max-control-line",
        "The longest line accepted from a NATS client, payloads apart. Who sends a longer one is "
        "disconnected.",
        show_size(DEFAULT_NATS.max_control_line),
    ),
]
MaxSubs = Annotated[
    int,
    _count(
        "--nats-max-subs",
        "Subscriptions of one NATS client. One more is refused. 0 sets no limit.",
    ),
]
MaxPending = Annotated[
    int | None,
    _size(
        "--nats-max-pending",
        "What may wait for one NATS client. One for whom more waits is too slow, and is "
        "disconnected.",
        f"{show_size(DEFAULT_NATS.max_pending)}, at least --nats-max-payload",
    ),
]
MaxConnections = Annotated[
    int,
    _count(
        "--nats-max-connections",
        "NATS clients connected at once. One more is told so and disconnected.",
    ),
]
PingInterval = Annotated[
    float,
    _seconds(
        "--nats-ping-interval",
        "How long a NATS client may be silent before it is asked whether it is still there.",
        DEFAULT_NATS.ping_seconds,
    ),
]
MaxPingsOut = Annotated[
    int,
    _count(
        "--nats-max-pings-out",
        "How often it may be asked without an answer. Once more, and it is disconnected.",
    ),
]
AuthTimeout = Annotated[
    float,
    _seconds(
        "--nats-auth-timeout",
        "How long a NATS client may take to say who it is, where it has to.",
        DEFAULT_NATS.auth_seconds,
    ),
]
WriteTimeout = Annotated[
    float,
    _seconds(
        "--nats-write-timeout",
        "How long a NATS client may take nothing of what waits for it before it is disconnected.",
        DEFAULT_NATS.write_seconds,
    ),
]
LameDuckGrace = Annotated[
    float,
    _seconds(
        "--nats-lame-duck-grace",
        "How long NATS clients are given to leave by themselves after SIGUSR2.",
        DEFAULT_NATS.lame_duck_grace_seconds,
    ),
]
LameDuckTime = Annotated[
    float,
    _seconds(
        "--nats-lame-duck-time",
        "Over how long those that have not left are disconnected then, one after the other.",
        DEFAULT_NATS.lame_duck_seconds,
    ),
]
TlsTimeout = Annotated[
    float,
    _seconds(
        "--nats-tls-timeout",
        "How long a NATS client may take for its TLS handshake.",
        DEFAULT_NATS.tls_seconds,
    ),
]
TlsCert = Annotated[
    Path | None,
    _file(
        "--nats-tls-cert",
        "The NATS door's certificate, as PEM, and those between it and its root. With it NATS "
        "clients must use TLS.",
    ),
]
TlsKey = Annotated[
    Path | None, _file("--nats-tls-key", "The certificate's private key, as PEM, unencrypted.")
]
TlsCa = Annotated[
    Path | None,
    _file(
        "--nats-tls-ca",
        "Who may have signed the certificates of clients, as PEM. Without it, whom this system "
        "trusts.",
    ),
]
TlsVerify = Annotated[
    bool, _switch("--nats-tls-verify", "Only clients that have a certificate are let in.")
]
TlsVerifyAndMap = Annotated[
    bool,
    _switch(
        "--nats-tls-verify-and-map",
        "The same, and the certificate says which user a client is: by an email address, a DNS "
        "name or else its subject.",
    ),
]
TlsHandshakeFirst = Annotated[
    bool,
    _switch(
        "--nats-tls-handshake-first",
        "TLS begins with the first byte, as elsewhere, and not behind the server's first line.",
    ),
]
TlsOptional = Annotated[
    bool, _switch("--nats-tls-optional", "Clients may use TLS, and may go on without it.")
]


def parse_binding(text: str | NamedClass) -> NamedClass:
    """A class and a subject that is bound to it, from "orders.>=7" or "orders.>=orders".

    Raises typer.BadParameter.
    """
    from simplebus.core.errors import RemoteProtocolError
    from simplebus.core.message_class.subject_bindings import check_subject
    from simplebus.core.protocol.requests import NamedClass

    if isinstance(text, NamedClass):
        return text
    subject, equals, class_ = text.rpartition("=")
    if not equals:
        raise typer.BadParameter(
            f"{text!r} binds nothing; write a subject, = and a class, such as orders.>=7"
        )
    try:
        check_subject(subject)
    except RemoteProtocolError as error:
        raise typer.BadParameter(error.sentence) from None
    found = parse_class(class_)
    if isinstance(found, int):
        return NamedClass(id=found, subjects=[subject])
    return NamedClass(name=found, subjects=[subject])


Bind = Annotated[
    list[Any] | None,
    option(
        "--bind",
        "What NATS clients publish on a subject is kept in a class, until the class's subscribers "
        "have acknowledged it: [bold]orders.>=7[/bold], or [bold]orders.>=orders[/bold] by name. "
        "Give it again for more.",
        panel=NATS,
        metavar="SUBJECT=CLASS",
        parser=parse_binding,
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """What the options amount to."""

    port: int | None
    """None for a closed door."""
    settings: NatsSettings
    tls: TlsOptions | None

    @property
    def connections(self) -> int:
        """How many there may be at once."""
        return 0 if self.port is None else self.settings.limits.connections

    classes: tuple[NamedClass, ...] = ()
    """Those of the file, and those that subjects are bound to."""


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
    """What the options amount to.

    `given` are the names of those that stand on the command line; `auth` and `classes` are what the
    configuration file says, `environment` is where secrets may stand too, see SECRETS. `shared` is
    the certificate of all doors, for one without its own; `users` are those of all doors, and
    `users_nats`, by name, what they may do with subjects that are bound to no class.

    Raises ValueError when they contradict each other.
    """
    from simplebus.nats.server.users import NatsAuth
    from simplebus.nats.settings import NatsSettings

    port: int | None = values["nats_port"]
    if port is None:
        port = NATS_PORT if values["port"] else 0
    if values["no_nats"]:
        for name in sorted(given):
            if name.startswith("nats_") or name == "bind":
                raise ValueError(f"--no-nats closes the door that --{name.replace('_', '-')} opens")
        port = None
    limits = {name: values[value_name(flag)] for name, flag in NATS_LIMIT_FLAGS.items()}
    if limits["max_pending"] is None:
        limits["max_pending"] = max(DEFAULT_NATS.max_pending, limits["max_payload"])
    tls = _tls(shared, **{name: values[value_name(flag)] for name, flag in TLS_FLAGS.items()})
    own = _auth(auth or NatsAuth(), environment or {})
    if tls is None or not tls.verify_and_map:
        own.check_credentials()
    try:
        settings = NatsSettings(
            limits=NatsLimits(**limits),
            auth=replace(own, shared=users, shared_permissions=users_nats or {}),
            tls_required=tls is not None and not tls.optional,
            tls_available=tls is not None and tls.optional,
            tls_verify=tls is not None and tls.requires_client_certificate,
        )
    except ValueError as error:
        raise ValueError(in_flags(str(error))) from None
    named = (classes or {}).values()
    return NatsOptions(port, settings, tls, (*named, *(values["bind"] or ())))


def _auth(auth: NatsAuth, environment: Mapping[str, str]) -> NatsAuth:
    """Who may come in: what the environment says goes before what the file does."""
    from simplebus.nats.server.users import NatsUser

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
    shared: TlsOptions | None, *, cert: Path | None, key: Path | None, **more: Any
) -> TlsOptions | None:
    if cert is None and key is None and shared is not None:
        cert, key = shared.cert, shared.key
        more["ca"] = more["ca"] or shared.ca
        more["verify"] = more["verify"] or shared.verify
    if cert is None and key is None:
        for name, value in more.items():
            if value:
                raise ValueError(f"{TLS_FLAGS[name]} needs --nats-tls-cert and --nats-tls-key")
        return None
    if cert is None or key is None:
        both = "--nats-tls-cert", "--nats-tls-key"
        raise ValueError("{} needs {} too".format(*(both if key is None else both[::-1])))
    if more["handshake_first"] and more["optional"]:
        raise ValueError(
            "--nats-tls-handshake-first and --nats-tls-optional contradict each other: who goes "
            "without TLS makes no handshake"
        )
    if more["verify_and_map"] and more["optional"]:
        raise ValueError(
            "--nats-tls-verify-and-map and --nats-tls-optional contradict each other: who goes "
            "without TLS shows no certificate"
        )
    from simplebus.server.tls.certificates import TlsOptions

    return TlsOptions(cert=cert, key=key, **more)


def in_flags(text: str) -> str:
    """A sentence about a limit of the NATS door, with its option instead of its name."""
    for name, flag in NATS_LIMIT_FLAGS.items():
        if text.startswith(f"limit {name} "):
            why = ""
            if name == "max_pending" and " from " in text:
                why = " (a message of --nats-max-payload must fit into it)"
            return text.replace(f"limit {name} ", f"{flag} ", 1) + why
    return text
