"""Options of a stateless server in front of a JetStream cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from simplebus.config.environment import ENGINE_SECRETS
from simplebus.config.server_schema import ServerConfig

if TYPE_CHECKING:
    import ssl

    from simplebus.core.settings import Settings
    from simplebus.jetstream.settings import JetStreamOptions

_FLAGS = {
    "the prefix": "--engine-prefix",
    "replicas": "--engine-replicas",
    "storage": "--engine-storage",
    "ack_wait_seconds": "--engine-ack-wait",
    "duplicate_seconds": "--engine-duplicates",
    "max_bytes": "--engine-max-bytes",
}
"""The option by the first words of an error of `JetStreamOptions`."""


def engine_options(
    config: ServerConfig, settings: Settings, environment: Mapping[str, str]
) -> JetStreamOptions | None:
    """Return the JetStream options; None if this server stores the messages itself.

    Raises:
        ValueError: If settings contradict each other, or a file cannot be used.
    """
    engine = config.engine
    if not engine.engine:
        return None
    from simplebus.jetstream.names import JetStreamNames
    from simplebus.jetstream.settings import JetStreamOptions, unsupported_settings
    from simplebus.nats.client.credentials import Credentials

    own_storage = {
        "--data-dir": config.durability.data_dir,
        "--last-values": config.memory.last_values,
    }
    errors = [
        f"{flag} cannot be combined with --engine, which stores messages in the cluster"
        for flag, value in own_storage.items()
        if value
    ]
    for key, setting, reason in unsupported_settings(settings):
        errors.append(f"{f'--{setting}' if key is None else f'classes.{key}.{setting}'}: {reason}")
    credentials = {name: environment.get(key, "") for name, key in ENGINE_SECRETS.items()}
    result = None
    try:
        result = JetStreamOptions(
            servers=engine.engine,
            names=JetStreamNames(engine.engine_prefix),
            replicas=engine.engine_replicas,
            storage=engine.engine_storage,
            ack_wait_seconds=engine.engine_ack_wait,
            duplicate_seconds=engine.engine_duplicates,
            max_bytes=engine.engine_max_bytes,
            credentials=Credentials(**credentials) if any(credentials.values()) else None,
            tls=_create_ssl_context(engine.engine_ca),
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


def check_no_secret(config: ServerConfig) -> None:
    """Raise ValueError if servers given on the command line contain credentials."""
    if any(address.credentials for address in config.engine.engine or ()):
        raise ValueError(
            "--engine: the address contains credentials, which every user of this machine can "
            "list: expected nats://HOST:PORT, and SIMPLEBUS_ENGINE_USER and "
            "SIMPLEBUS_ENGINE_PASSWORD, or SIMPLEBUS_ENGINE_TOKEN, in the environment"
        )


def _create_ssl_context(ca: Path | None) -> ssl.SSLContext | None:
    """Return a context that trusts only `ca`; None without `ca`."""
    import ssl

    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"--engine-ca: {ca} holds no certificate: {reason}") from None
