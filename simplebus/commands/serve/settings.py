"""What the options of `serve` amount to, all together; and what is different when they are read
again.

Rule 1: nothing heavy is imported before it is wanted, so that help is instant.
Rule 2: what was on the command line, or in the environment, stays as it was: a file is what is read
again. A file with a mistake changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import typer

from simplebus.commands.serve import http_options, jetstream_options, nats_options, tls_options
from simplebus.commands.serve.option_values import convert_params
from simplebus.config.file import Check, Config
from simplebus.config.messages import name_options_by_source, toml_key
from simplebus.config.mistakes import ConfigError
from simplebus.config.parse import HOSTS, show_size
from simplebus.config.server_settings import server_settings

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings
    from simplebus.config.users import ConfiguredUsers
    from simplebus.core.settings import Settings
    from simplebus.core.users.users import Users
    from simplebus.server.run import ServeOptions

RELOADED = {
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
"""Options that a running server takes over, by the names of their values. What a connection was
told when it came, or was made with, holds for it until it goes."""
_RELOADED_TABLES = ("classes.", "nats.users", "users")

SECRET_VARIABLES = (*nats_options.SECRETS, *jetstream_options.SECRETS.values())
"""Environment variables that `serve` reads and that no option sets."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A server as it is to be."""

    settings: Settings
    options: ServeOptions
    log_level: str
    log_format: str
    bridges: tuple[BridgeSettings, ...]
    warnings: tuple[str, ...]
    values: Mapping[str, Any]
    """What was set, by key as in the file: for what has changed."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is set otherwise than before."""

    key: str
    old_value: str
    """Empty for what is not shown: it is long, or a secret."""
    new_value: str
    is_reloaded: bool
    """Whether the running server takes it over."""

    def __str__(self) -> str:
        what = f"{self.key} is not as it was"
        if self.old_value:
            what = f"{self.key} is now {self.new_value}, was {self.old_value}"
        return what if self.is_reloaded else f"{what}: this needs a restart"


def planned(context: typer.Context) -> Plan:
    """What the options of a context of `serve` amount to. Raises ValueError when they contradict
    each other; ConfigError where that stands in the file."""
    try:
        return _planned(context)
    except ValueError as error:
        raise name_options_by_source(error, context) from None


def _planned(context: typer.Context) -> Plan:
    from simplebus.core.protocol.durability import Durability
    from simplebus.core.users.rate_limit import RateLimit
    from simplebus.server.run import ServeOptions

    convert_params(context)
    values = context.params
    config: Config | None = values["config"]
    source = context.get_parameter_source("engine")
    if source is not None and source.name == "COMMANDLINE":
        jetstream_options.check_no_secret(values["engine"])
    chosen = server_settings(**values)
    found = tls_options.configured_users(values["users"], config)
    known = found.to_users(os.urandom(32))
    door = nats_listener(context, found, known)
    operators = http_listener(context)
    options = ServeOptions(
        hosts=tuple(dict.fromkeys(values["host"] or HOSTS)),
        port=values["port"],
        nats_port=door.port,
        nats=door.settings,
        nats_tls=door.tls,
        http_port=operators.port,
        http_hosts=operators.hosts,
        http_names=operators.names,
        tls=tls_options.tls_options(**values),
        users=known,
        per_address=values["max_connections_per_address"],
        connection_rate=values["max_connection_rate"],
        publish_rate=RateLimit(values["max_message_rate"], values["max_byte_rate"]),
        classes=(*door.classes, *(values["last_values"] or ())),
        data_dir=values["data_dir"],
        cluster=jetstream_options.engine_options(chosen, environment=os.environ, **values),
        durability=Durability[values["durability"].name],
        drain_seconds=values["drain_timeout"],
        verbose=values["verbose"],
    )
    return Plan(
        chosen,
        options,
        values["log_level"],
        values["log_format"],
        config.bridges if config else (),
        (
            *((*config.warnings, *config.ineffective_settings(chosen)) if config else ()),
            *tls_options.trusting((options.tls, options.nats_tls)),
            *tls_options.shut_out(found, (options.tls, options.nats_tls)),
        ),
        _said(context, config) | {"users": found},
    )


def _said(context: typer.Context, config: Config | None) -> dict[str, Any]:
    """Everything that was set, by key."""
    said: dict[str, Any] = {}
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in ("config", "help"):
            value = context.params[name]
            is_size = parameter.metavar == "SIZE" and isinstance(value, int)
            said[toml_key(name)] = show_size(value) if is_size else value
    if config is not None:
        said |= {f"classes.{name}": config.class_settings[name] for name in config.class_settings}
        said |= {f"classes.{name} subjects": each for name, each in config.classes.items()}
        said |= {"nats.users": config.auth, "bridges": config.bridges}
    return said


def again(context: typer.Context) -> Plan:
    """The same as `planned`, with the file as it is now. Raises ConfigError."""
    config: Config | None = context.params["config"]
    if config is None:
        return planned(context)
    check = Check()
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
            return planned(cast(typer.Context, fresh))
        except ValueError as error:
            raise ConfigError(*str(error).splitlines()) from None


def changes(before: Plan, now: Plan) -> list[Change]:
    """What is set otherwise now."""
    reloaded = {toml_key(name) for name in RELOADED}
    found = []
    for key in dict.fromkeys((*before.values, *now.values)):
        was, value = before.values.get(key), now.values.get(key)
        if was != value:
            can = key in reloaded or key.startswith(_RELOADED_TABLES)
            is_plain = all(isinstance(each, str | int | float | None) for each in (was, value))
            shown = (_shown(was), _shown(value)) if is_plain else ("", "")
            found.append(Change(key, *shown, is_reloaded=can))
    return found


def set_free(before: Plan, now: Plan) -> list[str]:
    """Warnings: which users may do everything now, or publish or subscribe to everything, who might
    not before, or are denied less. It is so, too, where a file was cut off in the middle."""
    was, found = _bounds(before), []
    for name, (free, denied) in _bounds(now).items():
        was_free, was_denied = was.get(name, (free, denied))
        if more := free - was_free:
            what = sorted(more) if len(free) < len(_RIGHTS) else ["do"]
            found.append(f"user {name} may {' and '.join(what)} everything now")
        elif less := was_denied - denied:
            found.append(f"user {name} is not denied any more: {', '.join(sorted(less))}")
    return found


_RIGHTS = ("do", "publish to", "subscribe to")


def _bounds(plan: Plan) -> dict[str, tuple[set[str], set[str]]]:
    """By user, what it may do with all classes, or all subjects, and what of these is denied."""
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


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def taken_over(before: Plan, now: Plan) -> Plan:
    """What a running server has become that was told of a change: what needs a restart is as it
    was."""
    stays = {change.key for change in changes(before, now) if not change.is_reloaded}
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
    config: Config | None = context.params["config"]
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
