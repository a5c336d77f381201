"""The configuration file of `serve`: TOML, checked to the last key.

Rule 1: every option of `serve` can stand in it, under its own name; the command line wins over the
environment, and the environment over the file.
Rule 2: a mistake is a sentence with the file, the line, the key and what was expected. All are told
at once. Nothing is ignored.

    [serve]                     options:        max-memory = "4GiB"      --max-memory
    [nats]                      the NATS door:  max-payload = "8MiB"     --nats-max-payload
    [nats.tls]                                  cert = "server.pem"      --nats-tls-cert
    [tls]                       all doors:      cert = "server.pem"      --tls-cert
    [[nats.users]]              who may come in, and what they may do
    [classes.orders]            id = 7, subjects = ["orders.>"], keep-seconds = 3600
    [[users]]                   who may come in through any door, and what they may do
    [[bridges]]                 what is copied to and from other servers

Paths are relative to the file's folder. In names `_` may stand for `-`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from simplebus.config.mistakes import (
    MESSAGES_MAX,
    ConfigError,
    ErrorCollector,
    describe_toml_error,
    describe_value_error,
    check_unique_names,
    describe_unknown_name,
)
from simplebus.config.parse import option
from simplebus.config.toml_lines import locate_keys, add_location
from simplebus.console.errors import CONFIG_STATUS, fail
from simplebus.core import toml

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings
    from simplebus.config.users import ConfiguredUsers
    from simplebus.core.protocol.requests import NamedClass
    from simplebus.core.settings import ClassSettings, Settings
    from simplebus.nats.server.users import NatsAuth

_OWN_TABLES = ("serve", "nats", "tls", "classes", "bridges", "users")
_BYTES_MAX = 4 << 20
_NO_OPTIONS = {"config", "help"}
_BELOW_MAX = 4
"""So many keys are named where a table was meant to hold them."""


def _nobody() -> ConfiguredUsers:
    from simplebus.config.users import ConfiguredUsers

    return ConfiguredUsers()


@dataclass(frozen=True, slots=True)
class Config:
    """What a file says."""

    path: Path
    options: Mapping[str, Any]
    """Values of options, by the names of their values, as they stand in the file."""
    auth: NatsAuth
    """Who may come in through the NATS door."""
    classes: Mapping[str, NamedClass]
    """Classes by their names."""
    class_settings: Mapping[int | str, ClassSettings]
    """What they do in their own way."""
    bridges: tuple[BridgeSettings, ...] = ()
    users: ConfiguredUsers = field(default_factory=_nobody)
    """Who may come in, through any door."""
    warnings: tuple[str, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    """In which line each key stands."""

    @classmethod
    def empty(cls, path: Path) -> Config:
        """Of a file that says nothing."""
        from simplebus.nats.server.users import NatsAuth

        return cls(path, {}, NatsAuth(), {}, {})

    def add_location(self, mistake: str) -> str:
        """A mistake that begins with its key, with the file, and with the line if it has one."""
        return add_location(mistake, self.path, self.lines)

    def ineffective_settings(self, settings: Settings) -> list[str]:
        """Warnings: what it says of classes that nothing comes of, with these settings of all."""
        from simplebus.core.settings import FullPolicy

        return [
            self.add_location(f"classes.{name}.max-disk has no effect: the class does not spill")
            for name, own in self.class_settings.items()
            if own.disk_bytes_max is not None
            and (own.full_policy or settings.full_policy) is not FullPolicy.SPILL
        ]


@dataclass(slots=True)
class Check:
    """What a file is looked over for, all of it: as the object of the context."""

    messages: list[str] = field(default_factory=list)
    ignored_options: set[str] = field(default_factory=set)
    """Options that the file is read without, by the names of their values."""


def config_option() -> Any:
    """The option that names the file. Its value is a `Config`, or None without one."""
    return option(
        "--config",
        "A TOML file in which any of these options can stand, by its name, and the users of the "
        "NATS door and the subjects that are bound to classes. Options that are given win.",
        metavar="FILE",
        show_default=False,
        parser=Path,
        is_eager=True,
        callback=_read_for,
    )


def _read_for(context: typer.Context, path: Path | None) -> Config | None:
    """Read the file before other options are looked at, and make it their defaults."""
    if path is None or context.resilient_parsing:
        return None
    check = context.obj if isinstance(context.obj, Check) else None
    try:
        config, mistakes = read_config(path, context)
    except ConfigError as error:
        config, mistakes = Config.empty(path), error.messages
    if check is not None:
        check.messages = [*mistakes]
        config = replace(
            config, options={n: v for n, v in config.options.items() if n not in check.ignored_options}
        )
    elif mistakes:
        fail("\n".join(mistakes), status=CONFIG_STATUS)
    context.default_map = {**config.options}
    return config


def read(path: Path, context: typer.Context) -> tuple[Config, tuple[str, ...]]:
    """Read and check a file. `context` is that of `serve`. Returns what is good of it, and what is
    not. Raises ConfigError for one that cannot be read, or is no TOML."""
    from simplebus.config.schema import ClassTable, NatsTable, nats_of, what_is_good
    from simplebus.config.users import users_of

    text, mode = _text(path)
    try:
        raw = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(describe_toml_error(path, str(error))) from None
    mistakes = ErrorCollector()
    with mistakes.collect():
        _known(raw, _OWN_TABLES, "", _names(context))
    parts = {name: _taken(raw, name, mistakes) for name in ("serve", "tls", "nats")}
    parts["nats.tls"] = _taken(parts["nats"], "tls", mistakes, under="nats.")
    parts["nats"].pop("tls", None)
    options, nats = _options(parts, NatsTable.keys(), path, context, mistakes)
    config, has_secrets = Config.empty(path), False
    auth = config.auth
    with mistakes.collect():
        auth, has_secrets = nats_of(nats, mistakes)
    classes: dict[str, NamedClass] = {}
    own: dict[int | str, ClassSettings] = {}
    ids: dict[str, int | None] = {}
    for name, given in _taken(raw, "classes", mistakes).items():
        where = f"classes.{name}"
        with mistakes.collect():
            each = what_is_good(ClassTable, _named(given, where), where, mistakes)
            if each is not None:
                ids[name], own[name] = each.id, each.to_settings(where, mistakes)
                classes[name] = each.to_class(name, where)
    with mistakes.collect():
        _check_ids(ids)
    has_secrets |= "@" in str(parts["serve"].get("engine", ""))
    bridges: tuple[BridgeSettings, ...] = ()
    with mistakes.collect():
        bridges, theirs = _bridges(raw)
        has_secrets |= theirs
    known = _nobody()
    with mistakes.collect():
        known = users_of(raw["users"]) if "users" in raw else _nobody()
        has_secrets |= any(user.password or user.token for user in known.users)
    warnings = []
    if has_secrets and mode & stat.S_IROTH:
        warnings.append(f"{path} holds passwords or tokens, and every user may read it")
    config = replace(
        config,
        auth=auth,
        options=options,
        classes=classes,
        class_settings=own,
        bridges=bridges,
        users=known,
        warnings=tuple(warnings),
        lines=locate_keys(text),
    )
    return config, tuple(map(config.add_location, mistakes.messages[:MESSAGES_MAX]))


def _text(path: Path) -> tuple[str, int]:
    """What a file says, and its mode. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_BYTES_MAX + 1)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > _BYTES_MAX:
        raise ConfigError(f"{path} is longer than {_BYTES_MAX >> 20} MiB: it is no configuration")
    try:
        return raw.decode("utf-8-sig"), mode
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is no TOML: it is not UTF-8") from None


def _bridges(raw: dict[str, Any]) -> tuple[tuple[BridgeSettings, ...], bool]:
    """The bridges of the file, and whether they hold secrets."""
    if "bridges" not in raw:
        return (), False
    from simplebus.config.bridges import parse_bridges  # It brings the client, which few servers need.

    bridges, has_secrets = parse_bridges(raw["bridges"], is_served=True)
    return tuple(bridges), has_secrets


def _options(
    parts: Mapping[str, dict[str, Any]],
    others: Iterable[str],
    path: Path,
    context: typer.Context,
    mistakes: ErrorCollector,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of options that are good; and what of [nats] is none."""
    parameters, names = _parameters(context), _names(context)
    values: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for part, given in parts.items():
        known = {*names[part], *(others if part == "nats" else ())}
        with mistakes.collect():
            _known(given, known, part, names)
        for key, value in given.items():
            name = names[part].get(plain := key.replace("-", "_"))
            if name is None:
                if plain in known:
                    rest[key] = value
                continue
            try:
                values[name] = _checked(parameters[name], value, path, context)
            except (typer.BadParameter, ValueError) as error:
                what = describe_value_error(getattr(error, "message", "") or str(error), value)
                mistakes.messages.append(f"{part}.{key}: {what}")
    return values, rest


def _parameters(context: typer.Context) -> dict[str, Any]:
    """The options, by the names of their values."""
    named = {str(p.name): p for p in context.command.params}
    return {name: p for name, p in named.items() if name not in _NO_OPTIONS}


def _names(context: typer.Context) -> dict[str, dict[str, str]]:
    """What may stand in which table, and which option it is."""
    options = _parameters(context)
    return {
        "nats.tls": {n.removeprefix("nats_tls_"): n for n in options if "nats_tls_" in n},
        "nats": {
            n.removeprefix("nats_"): n
            for n in options
            if n.startswith("nats_") and "nats_tls_" not in n
        },
        "tls": {n.removeprefix("tls_"): n for n in options if n.startswith("tls_")},
        "serve": {n: n for n in options if not n.startswith(("nats_", "tls_"))},
    }


def _checked(parameter: Any, value: Any, path: Path, context: typer.Context) -> Any:
    """The value of an option as the command line would give it. Raises BadParameter, ValueError."""
    several = isinstance(value, list) and parameter.multiple
    for part in value if several else [value]:
        if not isinstance(part, bool | int | float | str):
            raise ValueError(f"expected a single value, got {_kind(part)}")
        if parameter.is_flag != isinstance(part, bool):
            expected = "true or false" if parameter.is_flag else "a value, not true or false"
            raise ValueError(f"expected {expected}, got {_kind(part)}")
    if parameter.multiple and not several:
        value = [value]
    try:
        meant = parameter.process_value(context, value)
    except (AttributeError, TypeError):  # What reads words was given something else.
        raise ValueError(f"expected a text, got {value!r}") from None
    for part, given in zip(meant, value, strict=True) if parameter.multiple else [(meant, value)]:
        if (
            isinstance(part, int | float)
            and isinstance(given, str)
            and not _may_be(parameter, given)
        ):
            raise ValueError(f"expected a number, got {given!r}")
        if isinstance(part, str | Path) and not isinstance(given, str):
            raise ValueError(f"expected a text, got {given!r}")
        if isinstance(part, Path) and "\0" in given:
            raise ValueError(f"{given!r} is no path: there is a zero byte in it")
    return str(path.parent / meant) if isinstance(meant, Path) else value


def _taken(
    raw: dict[str, Any], name: str, mistakes: ErrorCollector, *, under: str = ""
) -> dict[str, Any]:
    """A table below another, empty if it is none or not there."""
    with mistakes.collect():
        return _named(raw.get(name, {}), under + name)
    return {}


def _named(value: Any, where: str) -> dict[str, Any]:
    """A copy of a table."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a table, got {_kind(value)}")
    return dict(value)


def _known(
    given: Iterable[str],
    known: Iterable[str],
    where: str,
    elsewhere: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Raise ConfigError for names that are none, or are there twice. `elsewhere` are those of other
    tables, see `_names`."""
    known, given, mistakes = set(known), list(given), ErrorCollector()
    with mistakes.collect():
        check_unique_names(given, where)
    for name in given:
        plain = name.replace("-", "_")
        if plain not in known:
            meant = _meant(plain, elsewhere or {})
            mistakes.messages.append(
                f"{where + ': ' if where else ''}{name!r} is unknown; did you mean {meant}?"
                if meant
                else describe_unknown_name(name, known, where)
            )
    mistakes.raise_if_any()


def _meant(name: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """Where else a name may stand, by itself or with the table in front as on the command line;
    empty for nowhere."""
    for part, of in reversed([*names.items()]):
        if name in of:
            return f"it to stand in [{part}]"
    for part, of in names.items():
        for key, value_name in of.items():
            if name == value_name:
                return f"{key.replace('_', '-')!r} in [{part}]"
    # A table that is none, of options that begin with its name: [http].
    below = [key.replace("_", "-") for key in names.get("serve", ()) if key.startswith(name + "_")]
    if 0 < len(below) <= _BELOW_MAX:
        *most, last = map(repr, below)
        return f"{', '.join(most)}{' or ' if most else ''}{last} in [serve]"
    return ""


def _check_ids(ids: Mapping[str, int | None]) -> None:
    """Raise ConfigError for ids, by the names of classes, that two have."""
    whose: dict[int, str] = {}
    mistakes = ErrorCollector()
    for name, class_id in ids.items():
        if class_id is not None and whose.setdefault(class_id, name) != name:
            mistakes.messages.append(
                f"classes.{name}.id: {class_id} is the id of {whose[class_id]!r} too"
            )
    mistakes.raise_if_any()


def _may_be(parameter: Any, text: str) -> bool:
    """Whether a number may be written as this text: a size, and seconds with their unit."""
    has_unit = re.fullmatch(r"[0-9.]*", text) is None
    return parameter.metavar == "SIZE" or (parameter.metavar == "SECONDS" and has_unit)


def _kind(value: Any) -> str:
    words = {dict: "a table", list: "a list", bool: str(value).lower()}
    return words.get(type(value), repr(value))
