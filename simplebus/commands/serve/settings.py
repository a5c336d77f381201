"""Complete server settings from the options of `serve`, and their comparison after a reload.

A reload reads the configuration file again; options of the command line and the environment keep
their values. A file with an error changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simplebus.commands.config_check import find_errors
from simplebus.commands.serve import jetstream_options
from simplebus.commands.serve.http_options import http_port
from simplebus.commands.serve.nats_options import nats_options
from simplebus.commands.serve.tls_options import (
    certificate_user_warnings,
    tls_options,
    tls_warnings,
)
from simplebus.commands.serve.user_options import configured_users
from simplebus.config import nats_users
from simplebus.config.changed_values import describe_changes, quote_key
from simplebus.config.configuration import (
    Configuration,
    name_options_by_source,
    old_value_warnings,
    read_configuration,
    settings_in,
)
from simplebus.config.errors import ConfigError
from simplebus.config.file import ConfigFile
from simplebus.config.parse import HOSTS
from simplebus.config.server_schema import SETTINGS, ServerConfig
from simplebus.config.server_settings import server_settings

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings
    from simplebus.core.settings import Settings
    from simplebus.core.users.users import User
    from simplebus.server.run import ServeOptions

SECRET_VARIABLES = (*nats_users.SECRETS, *jetstream_options.SECRETS.values())
"""Environment variables that `serve` reads and that no option sets."""

_RELOADABLE_KEYS = {setting.key for setting in SETTINGS.values() if setting.is_reloadable}
_RELOADABLE_TABLES = ("classes.", "nats.users", "users")


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Complete settings of a server."""

    settings: Settings
    options: ServeOptions
    log_level: str
    log_format: str
    bridges: tuple[BridgeSettings, ...]
    warnings: tuple[str, ...]
    values: Mapping[str, Any]
    """Values by their key in the configuration file, compared after a reload."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """Setting whose value differs after a reload."""

    description: str
    """Key and new value, without secrets."""
    is_reloaded: bool
    """True if the running server applies the new value."""
    key: str = ""
    value: str = ""
    """The new value; empty if it is not set, or a secret."""
    previous: str = ""

    def __str__(self) -> str:
        return self.description if self.is_reloaded else f"{self.description}: needs a restart"


def build_plan(configuration: Configuration) -> ServerPlan:
    """Build the server settings.

    Raises:
        ValueError: If a variable is invalid, or settings contradict each other.
        ConfigError: If the mistake is in the configuration file.
    """
    try:
        configuration.raise_errors()
    except ValueError as error:
        raise _with_other_errors(error, configuration) from None
    try:
        return _build_plan(configuration)
    except ValueError as error:
        named = name_options_by_source(error, configuration)
        raise _with_other_errors(named, configuration) from None


def _with_other_errors(error: ValueError, configuration: Configuration) -> ValueError:
    """Return an error together with all others of the configuration file."""
    if configuration.file is None:
        return error
    found = find_errors(configuration.file.path, configuration.flags)
    own = str(error).splitlines()
    # An error of the command line would be found again, without the conflicting key of the file.
    named = {setting.name for each in own for setting in settings_in(each)}
    messages = [each for each in own if each not in found] + [
        each
        for each in found
        if each in own or named.isdisjoint(setting.name for setting in settings_in(each))
    ]
    if isinstance(error, ConfigError):
        return ConfigError(*messages)
    return ValueError("\n".join(messages))


def _build_plan(configuration: Configuration) -> ServerPlan:
    from simplebus.core.users.rate_limit import RateLimit
    from simplebus.server.run import ServeOptions

    config, file = configuration.config, configuration.file
    if "engine" in configuration.names_on_command_line:
        jetstream_options.check_no_secret(config)
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
        cluster=jetstream_options.engine_options(config, settings, os.environ),
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
            *nats_users.secret_warnings(os.environ),
            *(file.ineffective_settings(settings) if file else ()),
            *tls_warnings(certificates),
            *certificate_user_warnings(configured, certificates),
        ),
        _setting_values(config, file) | {"users": configured},
    )


def _setting_values(config: ServerConfig, file: ConfigFile | None) -> dict[str, Any]:
    """Return the values of all settings, by their key in the configuration file."""
    values = {setting.key: setting.format_value(value) for setting, value in config.items()}
    if file is not None:
        values |= {quote_key("classes", name): each for name, each in file.class_tables.items()}
        values |= {"nats.users": file.nats_users, "bridges": file.bridges}
    return values


def reload_plan(configuration: Configuration) -> ServerPlan:
    """Build the server settings with the file read again. Raises ConfigError."""
    path = configuration.file.path if configuration.file else None
    try:
        return build_plan(read_configuration(configuration.flags, os.environ, path))
    except ValueError as error:
        raise ConfigError(*str(error).splitlines()) from None


def find_changes(old: ServerPlan, new: ServerPlan) -> list[SettingChange]:
    """Return the settings that differ, one for each key of the file."""
    return [
        SettingChange(
            change.description,
            is_reloaded=_is_reloadable(key),
            key=change.key,
            value=change.value,
            previous=change.previous,
        )
        for key in _differing_keys(old, new)
        for change in describe_changes(key, old.values.get(key), new.values.get(key))
    ]


def count_changes(changes: Sequence[SettingChange]) -> str:
    """Return how many changes were applied, and how many need a restart."""
    if not changes:
        return "no changes"
    applied = sum(change.is_reloaded for change in changes)
    text = f"{applied} change{'' if applied == 1 else 's'} applied"
    if waiting := len(changes) - applied:
        text += f", {waiting} need{'s' if waiting == 1 else ''} a restart"
    return text


def _is_reloadable(key: str) -> bool:
    return key in _RELOADABLE_KEYS or key.startswith(_RELOADABLE_TABLES)


def _differing_keys(old: ServerPlan, new: ServerPlan) -> list[str]:
    return [
        key
        for key in dict.fromkeys((*old.values, *new.values))
        if old.values.get(key) != new.values.get(key)
    ]


def find_widened_permissions(old: ServerPlan, new: ServerPlan) -> list[str]:
    """Return a warning for each user that gained unrestricted rights or lost denials.

    A file that was truncated while it was written has the same effect.
    """
    old_rights, warnings = _rights_by_user(old), []
    for name, (unrestricted, denied) in _rights_by_user(new).items():
        old_unrestricted, old_denied = old_rights.get(name, (unrestricted, denied))
        if gained := unrestricted - old_unrestricted:
            actions = sorted(gained) if len(unrestricted) < len(_RIGHTS) else ["do"]
            warnings.append(f"user {name} may {' and '.join(actions)} everything now")
        elif lost := old_denied - denied:
            warnings.append(f"user {name} is not denied any more: {', '.join(sorted(lost))}")
    return warnings


_RIGHTS = ("do", "publish to", "subscribe to")


def _rights_by_user(plan: ServerPlan) -> dict[str, tuple[set[str], set[str]]]:
    """Return, by user, the unrestricted rights and the denied classes or subjects."""
    users = plan.options.nats.users
    return {} if users is None else {repr(user.name): _rights(user) for user in users.users}


def _rights(user: User) -> tuple[set[str], set[str]]:
    """Return a user's unrestricted rights, and the classes or subjects that it is denied."""
    allowed: tuple[tuple[object, ...] | None, ...]
    denied: tuple[object, ...]
    if (permissions := user.permissions) is not None:
        allowed = permissions.publish.allow, permissions.subscribe.allow
        denied = (*permissions.publish.deny, *permissions.subscribe.deny)
    elif (subjects := user.subject_permissions) is not None:
        allowed = subjects.publish_allow, subjects.subscribe_allow
        denied = (*subjects.publish_deny, *subjects.subscribe_deny)
    else:
        return {*_RIGHTS}, set()
    unrestricted = {
        action
        for action, rules in zip(_RIGHTS[1:], allowed, strict=True)
        if rules is None or any(str(rule) in ("*", ">") for rule in rules)
    }
    return unrestricted, {repr(str(rule)) for rule in denied}


def apply_reload(old: ServerPlan, new: ServerPlan) -> ServerPlan:
    """Return the settings of the running server after a reload.

    Settings that need a restart keep their old values.
    """
    kept_keys = {key for key in _differing_keys(old, new) if not _is_reloadable(key)}
    values = {k: v for k, v in new.values.items() if k not in kept_keys}
    values |= {k: v for k, v in old.values.items() if k in kept_keys}
    return replace(new, values=values)
