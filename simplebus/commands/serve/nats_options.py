"""Settings of the NATS listener."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simplebus.commands.serve.tls_options import nats_tls_options, tls_options
from simplebus.config.configuration import Configuration
from simplebus.config.nats_users import NatsUsers
from simplebus.config.server_schema import NATS_LIMITS, SETTINGS, name_field_by_option
from simplebus.nats.limits import NatsLimits
from simplebus.nats.settings import NatsSettings

if TYPE_CHECKING:
    from simplebus.core.protocol.requests import NamedClass
    from simplebus.core.users.users import Users
    from simplebus.server.tls.certificates import TlsOptions

_PORT = 4222


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
        environment: Environment variables, which may contain `nats_users.SECRETS`.
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
    classes = file.classes.values() if file else ()
    return NatsOptions(_port(configuration), settings, tls, (*classes, *config.bind.bind))


def _port(configuration: Configuration) -> int | None:
    """Return the port; None if the listener is closed. Raises ValueError for contradictions."""
    config = configuration.config
    if config.bind.no_nats:
        for name in configuration.names_on_command_line:
            if name.startswith("nats_") or name == "bind":
                flag = SETTINGS[name].flag
                raise ValueError(f"--no-nats and {flag} contradict each other")
        return None
    return (_PORT if config.general.port else 0) if config.nats.port is None else config.nats.port
