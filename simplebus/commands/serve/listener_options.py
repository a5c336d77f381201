"""Settings of the NATS and HTTP listeners, and users of all listeners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simplebus.commands.serve.tls_options import nats_tls_options, tls_options
from simplebus.config.configuration import Configuration
from simplebus.config.errors import ConfigError
from simplebus.config.file import ConfigFile
from simplebus.config.nats_users import NatsUsers
from simplebus.config.server_schema import NATS_LIMITS, SETTINGS, name_field_by_option
from simplebus.config.users import ConfiguredUsers, merge_users, read_users_file
from simplebus.nats.limits import NatsLimits
from simplebus.nats.settings import NatsSettings

if TYPE_CHECKING:
    from simplebus.core.protocol.requests import NamedClass
    from simplebus.core.users.users import Users
    from simplebus.server.tls.certificates import TlsOptions

_NATS_PORT = 4222
_HTTP_PORT = 8222


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """Settings of the NATS listener."""

    port: int | None
    """None if the listener is closed."""
    settings: NatsSettings
    tls: TlsOptions | None
    classes: tuple[NamedClass, ...] = ()
    """Classes of the configuration file and classes with bound subjects."""


def nats_options(
    configuration: Configuration, environment: Mapping[str, str], *, users: Users | None = None
) -> NatsOptions:
    """Return the settings of the NATS listener.

    Args:
        configuration: Values of all settings.
        environment: Environment variables, which may contain `environment.NATS_SECRETS`.
        users: Users of all listeners.

    Raises:
        ValueError: If settings contradict each other.
    """
    config, file = configuration.config, configuration.file
    tls = nats_tls_options(config.nats_tls, tls_options(config.tls))
    limits = config.values_of(NatsLimits)
    if limits["max_pending"] is None:
        limits["max_pending"] = max(NATS_LIMITS.max_pending, config.nats.max_payload)
    own_users = (file.nats_users if file else NatsUsers()).with_secrets(environment)
    users = own_users.to_users(users, has_certificates=tls is not None and tls.verify_and_map)
    try:
        settings = NatsSettings(
            limits=NatsLimits(**limits),
            users=users,
            connect_urls=config.nats.connect_url,
            tls_required=tls is not None and not tls.optional,
            tls_available=tls is not None and tls.optional,
            tls_verify=tls is not None and tls.requires_client_certificate,
        )
    except ValueError as error:
        raise name_field_by_option(error, NatsLimits) from None
    port = _port(configuration, "no_nats", config.nats.port, _NATS_PORT)
    classes = file.classes.values() if file else ()
    return NatsOptions(port, settings, tls, (*classes, *config.bind.bind))


def http_port(configuration: Configuration) -> int | None:
    """Return the port of the HTTP listener; None if it is closed.

    Raises:
        ValueError: If options contradict each other.
    """
    http = configuration.config.http
    if http.no_http and http.trace_messages:
        raise ValueError("--trace-messages needs the HTTP port, which --no-http does not open")
    return _port(configuration, "no_http", http.http_port, _HTTP_PORT)


def _port(configuration: Configuration, closing: str, port: int | None, default: int) -> int | None:
    """Return the port of a listener; None if the setting `closing` closes it.

    Raises ValueError if a closed listener has settings on the command line.
    """
    general, file = configuration.config.general, configuration.config
    if file.bind.no_nats if closing == "no_nats" else file.http.no_http:
        prefixes = ("nats_", "bind") if closing == "no_nats" else ("http_",)
        for name in configuration.names_on_command_line:
            if name.startswith(prefixes):
                raise ValueError(
                    f"{SETTINGS[closing].flag} and {SETTINGS[name].flag} contradict each other"
                )
        return None
    return (default if general.port else 0) if port is None else port


def configured_users(
    path: Path | None, file: ConfigFile | None
) -> tuple[ConfiguredUsers, tuple[str, ...]]:
    """Return the users of the users file and the configuration file, and warnings.

    Raises:
        ValueError: If a user is invalid.
    """
    groups, warnings = [] if file is None else [file.users], tuple[str, ...]()
    if path is not None:
        try:
            users_of_file, warning = read_users_file(path)
        except ConfigError as error:
            raise ConfigError(*(f"--users: {message}" for message in error.messages)) from None
        warnings = (warning,) if warning else ()
        groups.append(users_of_file)
    return merge_users(groups) if groups else ConfiguredUsers(), warnings
