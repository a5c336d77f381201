"""Settings of the NATS listener."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simplebus.commands.serve.tls_options import nats_tls_options, tls_options
from simplebus.config.configuration import Configuration
from simplebus.config.errors import ConfigError
from simplebus.config.server_schema import NATS_LIMITS, SETTINGS, name_field_by_option
from simplebus.nats.limits import NatsLimits
from simplebus.nats.settings import NatsSettings
from simplebus.nats.users import NatsAuth, NatsUser

if TYPE_CHECKING:
    from simplebus.core.protocol.requests import NamedClass
    from simplebus.core.users.users import Users
    from simplebus.nats.subject_permissions import SubjectPermissions
    from simplebus.server.tls.certificates import TlsOptions

SECRETS = ("SIMPLEBUS_NATS_TOKEN", "SIMPLEBUS_NATS_USER", "SIMPLEBUS_NATS_PASSWORD")
"""Environment variables with a token, or a user and password, that NATS clients must present.

They have no options, because every user can list command lines.
"""
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
    configuration: Configuration,
    environment: Mapping[str, str],
    *,
    users: Users | None = None,
    permissions: Mapping[str, SubjectPermissions] | None = None,
) -> NatsOptions:
    """Return the settings of the NATS listener.

    Args:
        configuration: Values of all settings.
        environment: Environment variables, which may contain `SECRETS`.
        users: Users of all listeners.
        permissions: By user name, permissions for subjects that are bound to no class.

    Raises:
        ValueError: If settings contradict each other.
    """
    config, file = configuration.config, configuration.file
    tls = nats_tls_options(config.nats_tls, tls_options(config.tls))
    limits = config.values_of(NatsLimits)
    if limits["max_pending"] is None:
        limits["max_pending"] = max(NATS_LIMITS.max_pending, config.nats.max_payload)
    auth = _add_secrets(file.auth if file else NatsAuth(), environment)
    if tls is None or not tls.verify_and_map:
        auth.check_credentials()
    if auth.default_permissions and not auth.users:
        raise ConfigError("nats.default_permissions: there are no users")
    try:
        settings = NatsSettings(
            limits=NatsLimits(**limits),
            auth=replace(auth, shared_users=users, shared_permissions=permissions or {}),
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


def _add_secrets(auth: NatsAuth, environment: Mapping[str, str]) -> NatsAuth:
    """Return `auth` with the secrets of the environment, which override those of the file."""
    token, name, password = (environment.get(variable, "") for variable in SECRETS)
    if bool(name) != bool(password):
        raise ValueError(f"{SECRETS[1]} and {SECRETS[2]} need each other")
    if token:
        auth = replace(auth, token=token)
    if name:
        others = tuple(user for user in auth.users if user.name != name)
        auth = replace(auth, users=(*others, NatsUser(name, password)))
    return auth
