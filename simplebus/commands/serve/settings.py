"""Complete server settings from the options of `serve`, and their comparison after a reload.

A reload reads the configuration file again; options of the command line and the environment keep
their values. A file with an error changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import typer

from simplebus.commands.serve import http_options, jetstream_options, nats_options, tls_options
from simplebus.commands.serve.option_values import convert_params
from simplebus.config.changed_values import describe_changes, quote_key
from simplebus.config.errors import ConfigError
from simplebus.config.file import ConfigCheck, ConfigFile
from simplebus.config.option_names import name_options_by_source, toml_key
from simplebus.config.parse import HOSTS, format_size
from simplebus.config.server_settings import server_settings

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings
    from simplebus.config.users import ConfiguredUsers
    from simplebus.core.settings import Settings
    from simplebus.core.users.users import Users
    from simplebus.server.run import ServeOptions

RELOADABLE_OPTIONS = {
    *("full", "keep_memory", "keep_messages", "keep_seconds", "last_values", "bind"),
    *("max_memory", "max_class_memory", "max_class_messages", "max_dead_letters", "max_pending"),
    *("max_total_pending", "max_connections", "max_classes", "max_subscriptions", "max_durables"),
    *("max_deliveries", "hello_timeout", "frame_timeout", "stall_timeout", "heartbeat"),
    *("users", "max_connections_per_address", "max_connection_rate"),
    *("max_message_rate", "max_byte_rate"),
    *("drain_timeout", "log_level", "log_format"),
    *("nats_max_payload", "nats_max_control_line", "nats_max_subs", "nats_max_pending"),
    *("nats_max_connections", "nats_ping_interval", "nats_max_pings_out", "nats_auth_timeout"),
    *("nats_write_timeout", "nats_lame_duck_grace", "nats_lame_duck_time"),
}
"""Parameter names of the options that a reload changes.

An open connection keeps the limits that it was given in the handshake.
"""
_RELOADABLE_KEYS = {toml_key(name) for name in RELOADABLE_OPTIONS}
_RELOADABLE_TABLES = ("classes.", "nats.users", "users")

SECRET_VARIABLES = (*nats_options.SECRETS, *jetstream_options.SECRETS.values())
"""Environment variables that `serve` reads and that no option sets."""


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

    def __str__(self) -> str:
        return self.description if self.is_reloaded else f"{self.description}: needs a restart"


def build_plan(context: typer.Context) -> ServerPlan:
    """Build the server settings from a context of `serve`.

    Raises:
        ValueError: If options contradict each other.
        ConfigError: If the contradiction is in the configuration file.
    """
    try:
        return _build_plan(context)
    except ValueError as error:
        raise name_options_by_source(error, context) from None


def _build_plan(context: typer.Context) -> ServerPlan:
    from simplebus.core.protocol.durability import Durability
    from simplebus.core.users.rate_limit import RateLimit
    from simplebus.server.run import ServeOptions

    convert_params(context)
    values = context.params
    config: ConfigFile | None = values["config"]
    source = context.get_parameter_source("engine")
    if source is not None and source.name == "COMMANDLINE":
        jetstream_options.check_no_secret(values["engine"])
    settings = server_settings(**values)
    configured = tls_options.configured_users(values["users"], config)
    users = configured.to_users(os.urandom(32))
    listener = nats_listener(context, configured, users)
    http = http_listener(context)
    options = ServeOptions(
        hosts=tuple(dict.fromkeys(values["host"] or HOSTS)),
        port=values["port"],
        nats_port=listener.port,
        nats=listener.settings,
        nats_tls=listener.tls,
        http_port=http.port,
        http_hosts=http.hosts,
        http_names=http.names,
        tls=tls_options.tls_options(**values),
        users=users,
        per_address=values["max_connections_per_address"],
        connection_rate=values["max_connection_rate"],
        publish_rate=RateLimit(values["max_message_rate"], values["max_byte_rate"]),
        classes=(*listener.classes, *(values["last_values"] or ())),
        data_dir=values["data_dir"],
        cluster=jetstream_options.engine_options(settings, environment=os.environ, **values),
        durability=Durability[values["durability"].name],
        drain_seconds=values["drain_timeout"],
        verbose=values["verbose"],
    )
    return ServerPlan(
        settings,
        options,
        values["log_level"],
        values["log_format"],
        config.bridges if config else (),
        (
            *((*config.warnings, *config.ineffective_settings(settings)) if config else ()),
            *tls_options.tls_warnings((options.tls, options.nats_tls)),
            *tls_options.certificate_user_warnings(configured, (options.tls, options.nats_tls)),
        ),
        _setting_values(context, config) | {"users": configured},
    )


def _setting_values(context: typer.Context, config: ConfigFile | None) -> dict[str, Any]:
    """Return the values of all settings, by their key in the configuration file."""
    values: dict[str, Any] = {}
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in ("config", "help"):
            value = context.params[name]
            is_size = parameter.metavar == "SIZE" and isinstance(value, int)
            values[toml_key(name)] = format_size(value) if is_size else value
    if config is not None:
        values |= {quote_key("classes", name): each for name, each in config.class_tables.items()}
        values |= {"nats.users": config.auth, "bridges": config.bridges}
    return values


def reload_plan(context: typer.Context) -> ServerPlan:
    """Build the server settings with the file read again. Raises ConfigError."""
    config: ConfigFile | None = context.params["config"]
    if config is None:
        return build_plan(context)
    check = ConfigCheck()
    try:
        new_context = context.command.make_context(
            context.info_name or "serve", ["--config", str(config.path)], obj=check
        )
    except typer.BadParameter as error:
        raise ConfigError(error.message) from None
    with new_context:
        if check.messages:
            raise ConfigError(*check.messages)
        for name in context.params:
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE" and name != "config":
                new_context.params[name] = context.params[name]
                new_context.set_parameter_source(name, source)
        try:
            return build_plan(cast(typer.Context, new_context))
        except ValueError as error:
            raise ConfigError(*str(error).splitlines()) from None


def find_changes(old: ServerPlan, new: ServerPlan) -> list[SettingChange]:
    """Return the settings that differ, one for each key of the file."""
    return [
        SettingChange(description, is_reloaded=_is_reloadable(key))
        for key in _differing_keys(old, new)
        for description in describe_changes(key, old.values.get(key), new.values.get(key))
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
    rights: dict[str, tuple[set[str], set[str]]] = {}
    users, auth = plan.options.users, plan.options.nats.auth
    for user in users.users if users is not None else ():
        if (permissions := user.permissions) is None:
            rights[repr(user.name)] = {*_RIGHTS}, set()
            continue
        unrestricted = {
            action
            for action, rules in zip(
                _RIGHTS[1:], (permissions.publish, permissions.subscribe), strict=True
            )
            if rules.allow is None or any(str(rule) == "*" for rule in rules.allow)
        }
        denied = (*permissions.publish.deny, *permissions.subscribe.deny)
        rights[repr(user.name)] = unrestricted, {repr(str(rule)) for rule in denied}
    for nats_user in auth.users:
        name = f"{(nats_user.name or nats_user.nkey)!r} of the NATS port"
        if (subjects := auth.permissions_of(nats_user)) is None:
            rights[name] = {*_RIGHTS}, set()
            continue
        allows = zip(_RIGHTS[1:], (subjects.publish_allow, subjects.subscribe_allow), strict=True)
        unrestricted = {action for action, allow in allows if not allow or ">" in allow}
        rights[name] = (
            unrestricted,
            {*map(repr, (*subjects.publish_deny, *subjects.subscribe_deny))},
        )
    return rights


def apply_reload(old: ServerPlan, new: ServerPlan) -> ServerPlan:
    """Return the settings of the running server after a reload.

    Settings that need a restart keep their old values.
    """
    kept_keys = {key for key in _differing_keys(old, new) if not _is_reloadable(key)}
    values = {k: v for k, v in new.values.items() if k not in kept_keys}
    values |= {k: v for k, v in old.values.items() if k in kept_keys}
    return replace(new, values=values)


def nats_listener(
    context: typer.Context, found: ConfiguredUsers | None = None, known: Users | None = None
) -> nats_options.NatsOptions:
    """Return the options of the NATS listener for the users of all listeners.

    Raises:
        ValueError: If the options contradict each other.
    """
    config: ConfigFile | None = context.params["config"]
    listener = nats_options.nats_options(
        _names_on_command_line(context),
        auth=config.auth if config else None,
        classes=config.classes if config else None,
        environment=os.environ,
        shared=tls_options.tls_options(**context.params),
        users=known,
        users_nats=found.nats if found else {},
        **{name: value for name, value in context.params.items() if name != "users"},
    )
    if config and config.auth.default_permissions and not listener.settings.auth.users:
        raise ConfigError(config.add_location("nats.default_permissions: there are no users"))
    return listener


def http_listener(context: typer.Context) -> http_options.HttpOptions:
    """Return the options of the HTTP listener.

    Raises:
        ValueError: If the options contradict each other.
    """
    return http_options.http_options(_names_on_command_line(context), **context.params)


def _names_on_command_line(context: typer.Context) -> set[str]:
    """Return the names of the options given on the command line."""
    return {name for name in context.params if _is_on_command_line(context, name)}


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
