"""Complete server settings from the options of `serve`, and their comparison after a reload.

A reload reads the configuration file again; options of the command line and the environment keep
their values. A file with an error changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import typer

from simplebus.commands.serve import http_options, jetstream_options, nats_options, tls_options
from simplebus.commands.serve.option_values import convert_params
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

    key: str
    old_value: str
    """Empty if the value is long or a secret."""
    new_value: str
    is_reloaded: bool
    """True if the running server applies the new value."""

    def __str__(self) -> str:
        what = f"{self.key} is not as it was"
        if self.old_value:
            what = f"{self.key} is now {self.new_value}, was {self.old_value}"
        return what if self.is_reloaded else f"{what}: this needs a restart"


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
    chosen = server_settings(**values)
    found = tls_options.configured_users(values["users"], config)
    known = found.to_users(os.urandom(32))
    listener = nats_listener(context, found, known)
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
        users=known,
        per_address=values["max_connections_per_address"],
        connection_rate=values["max_connection_rate"],
        publish_rate=RateLimit(values["max_message_rate"], values["max_byte_rate"]),
        classes=(*listener.classes, *(values["last_values"] or ())),
        data_dir=values["data_dir"],
        cluster=jetstream_options.engine_options(chosen, environment=os.environ, **values),
        durability=Durability[values["durability"].name],
        drain_seconds=values["drain_timeout"],
        verbose=values["verbose"],
    )
    return ServerPlan(
        chosen,
        options,
        values["log_level"],
        values["log_format"],
        config.bridges if config else (),
        (
            *((*config.warnings, *config.ineffective_settings(chosen)) if config else ()),
            *tls_options.tls_warnings((options.tls, options.nats_tls)),
            *tls_options.certificate_user_warnings(found, (options.tls, options.nats_tls)),
        ),
        _setting_values(context, config) | {"users": found},
    )


def _setting_values(context: typer.Context, config: ConfigFile | None) -> dict[str, Any]:
    """Return the values of all settings, by their key in the configuration file."""
    said: dict[str, Any] = {}
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in ("config", "help"):
            value = context.params[name]
            is_size = parameter.metavar == "SIZE" and isinstance(value, int)
            said[toml_key(name)] = format_size(value) if is_size else value
    if config is not None:
        said |= {f"classes.{name}": config.class_settings[name] for name in config.class_settings}
        said |= {f"classes.{name} subjects": each for name, each in config.classes.items()}
        said |= {"nats.users": config.auth, "bridges": config.bridges}
    return said


def reload_plan(context: typer.Context) -> ServerPlan:
    """The same as `planned`, with the file as it is now. Raises ConfigError."""
    config: ConfigFile | None = context.params["config"]
    if config is None:
        return build_plan(context)
    check = ConfigCheck()
    try:
        fresh = context.command.make_context(
            context.info_name or "serve", ["--config", str(config.path)], obj=check
        )
    except typer.BadParameter as error:
        raise ConfigError(error.message) from None
    with fresh:
        if check.messages:
            raise ConfigError(*check.messages)
        for name in context.params:
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE" and name != "config":
                fresh.params[name] = context.params[name]
                fresh.set_parameter_source(name, source)
        try:
            return build_plan(cast(typer.Context, fresh))
        except ValueError as error:
            raise ConfigError(*str(error).splitlines()) from None


def find_changes(before: ServerPlan, now: ServerPlan) -> list[SettingChange]:
    """Return the settings that differ."""
    reloaded = {toml_key(name) for name in RELOADABLE_OPTIONS}
    found = []
    for key in dict.fromkeys((*before.values, *now.values)):
        was, value = before.values.get(key), now.values.get(key)
        if was != value:
            can = key in reloaded or key.startswith(_RELOADABLE_TABLES)
            is_plain = all(isinstance(each, str | int | float | None) for each in (was, value))
            shown = (_format_value(was), _format_value(value)) if is_plain else ("", "")
            found.append(SettingChange(key, *shown, is_reloaded=can))
    return found


def find_widened_permissions(before: ServerPlan, now: ServerPlan) -> list[str]:
    """Return a warning for each user that gained unrestricted rights or lost denials.

    A file that was truncated while it was written has the same effect.
    """
    was, found = _rights_by_user(before), []
    for name, (free, denied) in _rights_by_user(now).items():
        was_free, was_denied = was.get(name, (free, denied))
        if more := free - was_free:
            what = sorted(more) if len(free) < len(_RIGHTS) else ["do"]
            found.append(f"user {name} may {' and '.join(what)} everything now")
        elif less := was_denied - denied:
            found.append(f"user {name} is not denied any more: {', '.join(sorted(less))}")
    return found


_RIGHTS = ("do", "publish to", "subscribe to")


def _rights_by_user(plan: ServerPlan) -> dict[str, tuple[set[str], set[str]]]:
    """Return, by user, the unrestricted rights and the denied classes or subjects."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    users, auth = plan.options.users, plan.options.nats.auth
    for user in users.users if users is not None else ():
        if (may := user.permissions) is None:
            found[repr(user.name)] = {*_RIGHTS}, set()
            continue
        free = {
            what
            for what, rules in zip(_RIGHTS[1:], (may.publish, may.subscribe), strict=True)
            if rules.allow is None or any(str(rule) == "*" for rule in rules.allow)
        }
        denied = (*may.publish.deny, *may.subscribe.deny)
        found[repr(user.name)] = free, {repr(str(rule)) for rule in denied}
    for each in auth.users:
        name = f"{(each.name or each.nkey)!r} of the NATS port"
        if (says := auth.permissions_of(each)) is None:
            found[name] = {*_RIGHTS}, set()
            continue
        allows = zip(_RIGHTS[1:], (says.publish_allow, says.subscribe_allow), strict=True)
        free = {what for what, allow in allows if not allow or ">" in allow}
        found[name] = free, {*map(repr, (*says.publish_deny, *says.subscribe_deny))}
    return found


def _format_value(value: Any) -> str:
    return "not set" if value is None else str(value)


def apply_reload(before: ServerPlan, now: ServerPlan) -> ServerPlan:
    """Return the settings of the running server after a reload.

    Settings that need a restart keep their old values.
    """
    stays = {change.key for change in find_changes(before, now) if not change.is_reloaded}
    values = {k: v for k, v in now.values.items() if k not in stays}
    values |= {k: v for k, v in before.values.items() if k in stays}
    return replace(now, values=values)


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
