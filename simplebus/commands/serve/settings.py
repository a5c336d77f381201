"""Complete server settings from the options of `serve`.

A reload reads the configuration file again; options of the command line and the environment keep
their values. A file with an error changes nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simplebus.commands.config_check import find_errors
from simplebus.commands.serve.jetstream_options import check_no_secret, engine_options
from simplebus.commands.serve.listener_options import configured_users, http_port, nats_options
from simplebus.commands.serve.tls_options import (
    certificate_user_warnings,
    tls_options,
    tls_warnings,
)
from simplebus.config.changed_values import Tables, compared_values
from simplebus.config.configuration import (
    Configuration,
    name_options_by_source,
    old_value_warnings,
    read_configuration,
    settings_in,
)
from simplebus.config.errors import ConfigError
from simplebus.config.nats_users import secret_warnings
from simplebus.config.parse import HOSTS
from simplebus.config.server_settings import server_settings

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings
    from simplebus.core.settings import Settings
    from simplebus.server.run import ServeOptions


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Complete settings of a server."""

    settings: Settings
    options: ServeOptions
    log_level: str
    log_format: str
    bridges: tuple[BridgeSettings, ...]
    warnings: tuple[str, ...]
    values: Tables
    """Values by table and key of the configuration file, compared after a reload."""


def build_plan(configuration: Configuration) -> ServerPlan:
    """Build the server settings.

    Raises:
        ValueError: If a variable is invalid, or settings contradict each other.
        ConfigError: If the mistake is in the configuration file.
    """
    try:
        configuration.raise_errors()
        return _build_plan(configuration)
    except ValueError as error:
        named = name_options_by_source(error, configuration)
        raise _with_other_errors(named, configuration) from None


def _with_other_errors(error: ValueError, configuration: Configuration) -> ValueError:
    """Return an error together with all others of the configuration file."""
    if configuration.file is None:
        return error
    found = find_errors(configuration.file.document.path, configuration.flags)
    own = str(error).splitlines()
    # An error of the command line would be found again, without the conflicting key of the file.
    named = {setting.name for each in own for setting in settings_in(each)}
    messages = [each for each in own if each not in found] + [
        each
        for each in found
        if each in own or named.isdisjoint(setting.name for setting in settings_in(each))
    ]
    return (
        ConfigError(*messages)
        if isinstance(error, ConfigError)
        else ValueError("\n".join(messages))
    )


def _build_plan(configuration: Configuration) -> ServerPlan:
    from simplebus.core.users.rate_limit import RateLimit
    from simplebus.server.run import ServeOptions

    config, file = configuration.config, configuration.file
    if "engine" in configuration.names_on_command_line:
        check_no_secret(config)
    settings = server_settings(config, file.class_settings if file else None)
    configured, users_warnings = configured_users(config.users.users, file)
    users = configured.to_users(os.urandom(32))
    nats = nats_options(configuration, os.environ, users=users)
    general, limits = config.general, config.users
    options = ServeOptions(
        hosts=tuple(dict.fromkeys(general.host or HOSTS)),
        port=general.port,
        nats_port=nats.port,
        nats=nats.settings,
        nats_tls=nats.tls,
        http_port=http_port(configuration),
        http_hosts=tuple(dict.fromkeys(config.http.http_host or HOSTS)),
        http_names=config.http.http_name,
        tls=tls_options(config.tls),
        users=users,
        per_address=limits.max_connections_per_address,
        connection_rate=limits.max_connection_rate,
        publish_rate=RateLimit(limits.max_message_rate, limits.max_byte_rate),
        classes=(*nats.classes, *config.memory.last_values),
        data_dir=config.durability.data_dir,
        cluster=engine_options(config, settings, os.environ),
        durability=config.durability.durability,
        drain_seconds=config.timeouts.drain_timeout,
        verbose=general.verbose,
    )
    certificates = options.tls, options.nats_tls
    return ServerPlan(
        settings,
        options,
        general.log_level,
        general.log_format,
        file.bridges if file else (),
        (
            *configuration.warnings,
            *old_value_warnings(configuration),
            *users_warnings,
            *secret_warnings(os.environ),
            *(file.ineffective_settings(settings) if file else ()),
            *tls_warnings(certificates),
            *certificate_user_warnings(configured, certificates),
        ),
        compared_values(config, file.document.tables if file else {}, configured.tables),
    )


def reload_plan(configuration: Configuration) -> ServerPlan:
    """Build the server settings with the file read again. Raises ConfigError."""
    path = configuration.file.document.path if configuration.file else None
    try:
        return build_plan(read_configuration(configuration.flags, os.environ, path))
    except ValueError as error:
        raise ConfigError(*str(error).splitlines()) from None
