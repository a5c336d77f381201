"""The options of `serve` that make it a door before a JetStream cluster, and what they amount to.

Rule 1: nothing heavy is imported here, so that help is instant.
Rule 2: a word that makes no sense raises typer.BadParameter; words that contradict each other raise
ValueError. Both say it in a sentence, by the names of the options.
Rule 3: no secret has an option: whoever lists processes would read it. They stand in the
environment: SECRETS.
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

ENGINE = "Before a JetStream cluster"
"""Under which heading the help lists them."""
SECRETS = {
    "user": "SIMPLEBUS_ENGINE_USER",
    "password": "SIMPLEBUS_ENGINE_PASSWORD",
    "token": "SIMPLEBUS_ENGINE_TOKEN",
    "seed": "SIMPLEBUS_ENGINE_SEED",
}
"""Who the door is to the cluster: a name and a password, a token, or the seed of a key."""

_FLAGS = {
    "the prefix": "--engine-prefix",
    "replicas": "--engine-replicas",
    "storage": "--engine-storage",
    "ack_wait_seconds": "--engine-ack-wait",
    "duplicate_seconds": "--engine-duplicates",
    "max_bytes": "--engine-max-bytes",
}


def parse_servers(text: Any) -> Any:
    """Servers with commas between them, as NATS clients name them."""
    from simplebus.net.nats_connection import NatsAddress

    if not isinstance(text, str):
        return text
    try:
        return tuple(NatsAddress.parse(each.strip()) for each in text.split(",") if each.strip())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def check_no_secret(servers: tuple[NatsAddress, ...] | None) -> None:
    """Raise ValueError where servers that were named on the command line say who the door is."""
    if any(each.credentials for each in servers or ()):
        raise ValueError(
            "--engine: it says who the door is, and whoever lists processes reads that: expected "
            f"nats://HOST:PORT, and {SECRETS['user']} and {SECRETS['password']}, or "
            f"{SECRETS['token']}, in the environment"
        )


Engine = Annotated[
    Any,
    option(
        "--engine",
        "NATS servers with JetStream, as nats://HOST:PORT,nats://HOST:PORT. They keep the messages "
        "then, and this server is one of any number of doors to them: what differs is in "
        "protocol/engine.md.",
        panel=ENGINE,
        parser=parse_servers,
        metavar="SERVERS",
        show_default="messages are kept here",
    ),
]
Prefix = Annotated[
    str,
    option(
        "--engine-prefix",
        "What names of streams begin with. Doors with the same prefix are one bus.",
        panel=ENGINE,
        metavar="NAME",
    ),
]
Replicas = Annotated[
    int,
    option(
        "--engine-replicas",
        "How many servers of the cluster keep each message.",
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
        "Where they keep it: file or memory.",
        panel=ENGINE,
        metavar="KIND",
    ),
]
AckWait = Annotated[
    float,
    option(
        "--engine-ack-wait",
        "How long what a door holds is its own when nothing is heard of it; then other doors get "
        "it.",
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
        "How long the cluster knows a message that it has, should it be published again.",
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
        "What the messages of one class may take in the cluster. At this limit publishers wait.",
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
        "Who may have signed the certificates of the cluster's servers, as PEM.",
        panel=ENGINE,
        parser=Path,
        metavar="FILE",
        show_default="whom the system trusts",
    ),
]


def engine_options(
    settings: Settings, *, environment: Mapping[str, str], **values: Any
) -> JetStreamOptions | None:
    """What the options amount to; None for a bus that keeps its messages itself.

    Raises ValueError when they contradict each other, or a file is no good.
    """
    if not values["engine"]:
        return None
    from simplebus.jetstream.names import JetStreamNames
    from simplebus.jetstream.settings import JetStreamOptions, unsupported_settings
    from simplebus.nats.client.credentials import Credentials

    wrong = [
        f"--{name} is for a bus that keeps its messages: with --engine the cluster does"
        for name in ("data-dir", "last-values")
        if values.get(name.replace("-", "_"))
    ]
    for key, what, why in unsupported_settings(settings):
        wrong.append(f"{f'--{what}' if key is None else f'classes.{key}.{what}'}: {why}")
    said = {name: environment.get(key, "") for name, key in SECRETS.items()}
    made = None
    try:
        made = JetStreamOptions(
            servers=values["engine"],
            names=JetStreamNames(values["engine_prefix"]),
            replicas=values["engine_replicas"],
            storage=values["engine_storage"],
            ack_wait_seconds=values["engine_ack_wait"],
            duplicate_seconds=values["engine_duplicates"],
            max_bytes=values["engine_max_bytes"],
            credentials=Credentials(**said) if any(said.values()) else None,
            tls=_trusting(values["engine_ca"]),
        )
    except ValueError as error:
        text = str(error)
        for name, flag in _FLAGS.items():
            if text.startswith(f"{name} "):
                text = flag + text.removeprefix(name)
        wrong.append(text)
    if wrong:
        raise ValueError("\n".join(wrong))
    return made


def _trusting(ca: Path | None) -> ssl.SSLContext | None:
    """Who is trusted; None for whom the system trusts."""
    import ssl

    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"--engine-ca: {ca} holds no certificate: {why}") from None
