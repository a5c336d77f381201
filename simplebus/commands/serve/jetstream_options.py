"""Options of `serve` for a stateless server in front of a JetStream cluster.

Secrets have no options, because every user can list command lines: they are read from environment
variables, see `SECRETS`. Heavy modules are imported when the command runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import option, parse_seconds, parse_size

if TYPE_CHECKING:
    import ssl

    from simplebus.core.settings import Settings
    from simplebus.jetstream.settings import JetStreamOptions
    from simplebus.net.nats_connection import NatsAddress

ENGINE = "Messages in a JetStream cluster"
"""Heading of these options in the help."""
SECRETS = {
    "user": "SIMPLEBUS_ENGINE_USER",
    "password": "SIMPLEBUS_ENGINE_PASSWORD",
    "token": "SIMPLEBUS_ENGINE_TOKEN",
    "seed": "SIMPLEBUS_ENGINE_SEED",
}
"""Environment variables with the server's NATS credentials: user and password, token, or nkey seed.
"""

_FLAGS = {
    "the prefix": "--engine-prefix",
    "replicas": "--engine-replicas",
    "storage": "--engine-storage",
    "ack_wait_seconds": "--engine-ack-wait",
    "duplicate_seconds": "--engine-duplicates",
    "max_bytes": "--engine-max-bytes",
}


def parse_servers(text: Any) -> Any:
    """Parse a comma-separated list of NATS servers. Raises typer.BadParameter."""
    from simplebus.net.nats_connection import NatsAddress

    if not isinstance(text, str):
        return text
    try:
        return tuple(NatsAddress.parse(each.strip()) for each in text.split(",") if each.strip())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def check_no_secret(servers: tuple[NatsAddress, ...] | None) -> None:
    """Raise ValueError if servers given on the command line contain credentials."""
    if any(each.credentials for each in servers or ()):
        raise ValueError(
            "--engine: the address contains credentials, which every user of this machine can "
            f"list: expected nats://HOST:PORT, and {SECRETS['user']} and {SECRETS['password']}, or "
            f"{SECRETS['token']}, in the environment"
        )


Engine = Annotated[
    Any,
    option(
        "--engine",
        "NATS servers with JetStream, as nats://HOST:PORT,nats://HOST:PORT. The cluster stores all "
        "messages, and any number of stateless servers can use it; see protocol/engine.md for the "
        "differences.",
        panel=ENGINE,
        parser=parse_servers,
        metavar="SERVERS",
        show_default="store messages in this server",
    ),
]
Prefix = Annotated[
    str,
    option(
        "--engine-prefix",
        "Prefix of the stream names. Servers with the same prefix form one bus.",
        panel=ENGINE,
        metavar="NAME",
    ),
]
Replicas = Annotated[
    int,
    option(
        "--engine-replicas",
        "Number of cluster servers that store each message, from 1 to 5.",
        panel=ENGINE,
        min=1,
        max=5,
        metavar="COUNT",
    ),
]
Storage = Annotated[
    str,
    option(
        "--engine-storage",
        "Storage of the streams: file or memory.",
        panel=ENGINE,
        metavar="KIND",
    ),
]
AckWait = Annotated[
    float,
    option(
        "--engine-ack-wait",
        "Time until the messages in flight of a server that has failed are redelivered by other "
        "servers.",
        panel=ENGINE,
        parser=parse_seconds,
        metavar="SECONDS",
        show_default="30",
    ),
]
Duplicates = Annotated[
    float,
    option(
        "--engine-duplicates",
        "Time during which the cluster detects a message that is published twice.",
        panel=ENGINE,
        parser=parse_seconds,
        metavar="SECONDS",
        show_default="120",
    ),
]
MaxBytes = Annotated[
    int,
    option(
        "--engine-max-bytes",
        "Maximum size of the messages of one class in the cluster. At this limit publishers wait.",
        panel=ENGINE,
        parser=parse_size,
        metavar="SIZE",
        show_default="no limit",
    ),
]
Ca = Annotated[
    Path | None,
    option(
        "--engine-ca",
        "PEM file of the certificate authorities that may sign the cluster's certificates.",
        panel=ENGINE,
        parser=Path,
        metavar="FILE",
        show_default="the system's authorities",
    ),
]


def engine_options(
    settings: Settings, *, environment: Mapping[str, str], **values: Any
) -> JetStreamOptions | None:
    """Return the JetStream options; None if this server stores the messages itself.

    Raises:
        ValueError: If the options contradict each other, or a file cannot be used.
    """
    if not values["engine"]:
        return None
    from simplebus.jetstream.names import JetStreamNames
    from simplebus.jetstream.settings import JetStreamOptions, unsupported_settings
    from simplebus.nats.client.credentials import Credentials

    errors = [
        f"--{name} cannot be combined with --engine, which stores messages in the cluster"
        for name in ("data-dir", "last-values")
        if values.get(name.replace("-", "_"))
    ]
    for key, what, why in unsupported_settings(settings):
        errors.append(f"{f'--{what}' if key is None else f'classes.{key}.{what}'}: {why}")
    credentials = {name: environment.get(key, "") for name, key in SECRETS.items()}
    result = None
    try:
        result = JetStreamOptions(
            servers=values["engine"],
            names=JetStreamNames(values["engine_prefix"]),
            replicas=values["engine_replicas"],
            storage=values["engine_storage"],
            ack_wait_seconds=values["engine_ack_wait"],
            duplicate_seconds=values["engine_duplicates"],
            max_bytes=values["engine_max_bytes"],
            credentials=Credentials(**credentials) if any(credentials.values()) else None,
            tls=_create_ssl_context(values["engine_ca"]),
        )
    except ValueError as error:
        text = str(error)
        for name, flag in _FLAGS.items():
            if text.startswith(f"{name} "):
                text = flag + text.removeprefix(name)
        errors.append(text)
    if errors:
        raise ValueError("\n".join(errors))
    return result


def _create_ssl_context(ca: Path | None) -> ssl.SSLContext | None:
    """Return a context that trusts only `ca`; None without `ca`."""
    import ssl

    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"--engine-ca: {ca} holds no certificate: {why}") from None
