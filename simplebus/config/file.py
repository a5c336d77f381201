"""Configuration file of `serve`, in TOML.

The file may set every option of `serve`. The command line takes precedence over the environment,
and the environment over the file. All errors are reported at once, each with file, line and key;
unknown keys are errors.

    [serve]                     options:         max-memory = "4GiB"      --max-memory
    [nats]                      NATS listener:   max-payload = "8MiB"     --nats-max-payload
    [nats.tls]                                   cert = "server.pem"      --nats-tls-cert
    [tls]                       all listeners:   cert = "server.pem"      --tls-cert
    [[nats.users]]              users of the NATS listener and their permissions
    [classes.orders]            id = 7, subjects = ["orders.>"], keep-seconds = 3600
    [[users]]                   users of all listeners and their permissions
    [[bridges]]                 bridges to other servers

Paths are relative to the file's directory. In names `_` may stand for `-`.
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

from simplebus.config.errors import (
    MESSAGES_MAX,
    ConfigError,
    ErrorCollector,
    check_unique_names,
    describe_toml_error,
    describe_unknown_name,
    describe_value_error,
)
from simplebus.config.parse import option
from simplebus.config.toml_lines import add_location, locate_keys
from simplebus.console.errors import CONFIG_STATUS, fail
from simplebus.core import toml

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings
    from simplebus.config.schema import ClassTable
    from simplebus.config.users import ConfiguredUsers
    from simplebus.core.protocol.requests import NamedClass
    from simplebus.core.settings import ClassSettings, Settings
    from simplebus.nats.users import NatsAuth

_OWN_TABLES = ("serve", "nats", "tls", "classes", "bridges", "users")
_BYTES_MAX = 4 << 20
_NO_OPTIONS = {"config", "help"}
_SUGGESTIONS_MAX = 4
"""Maximum number of keys suggested for an unknown table."""


def _no_users() -> ConfiguredUsers:
    from simplebus.config.users import ConfiguredUsers

    return ConfiguredUsers()


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Content of a configuration file."""

    path: Path
    options: Mapping[str, Any]
    """Values of options as in the file, by parameter name."""
    auth: NatsAuth
    """Users of the NATS listener."""
    classes: Mapping[str, NamedClass]
    """Classes by name."""
    class_settings: Mapping[int | str, ClassSettings]
    """Settings of single classes."""
    class_tables: Mapping[str, ClassTable] = field(default_factory=dict)
    """Tables of single classes, as in the file."""
    bridges: tuple[BridgeSettings, ...] = ()
    users: ConfiguredUsers = field(default_factory=_no_users)
    """Users of all listeners."""
    warnings: tuple[str, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each key."""

    @classmethod
    def empty(cls, path: Path) -> ConfigFile:
        """Return the content of an empty file."""
        from simplebus.nats.users import NatsAuth

        return cls(path, {}, NatsAuth(), {}, {})

    def add_location(self, mistake: str) -> str:
        """Return an error message that begins with its key, with file and line in front."""
        return add_location(mistake, self.path, self.lines)

    def ineffective_settings(self, settings: Settings) -> list[str]:
        """Return a warning for each class setting without effect under `settings`."""
        from simplebus.core.settings import FullPolicy

        return [
            self.add_location(f"classes.{name}.max-disk has no effect: the class does not spill")
            for name, own in self.class_settings.items()
            if own.disk_bytes_max is not None
            and (own.full_policy or settings.full_policy) is not FullPolicy.SPILL
        ]


@dataclass(slots=True)
class ConfigCheck:
    """Result of `check-config`, stored as `obj` of the typer context."""

    messages: list[str] = field(default_factory=list)
    ignored_options: set[str] = field(default_factory=set)
    """Parameter names of options in the file to ignore."""


def config_option() -> Any:
    """Return the option `--config`. Its value is a `ConfigFile`, or None."""
    return option(
        "--config",
        "TOML file that sets these options, users, classes and bridges. Options on the command "
        "line take precedence.",
        metavar="FILE",
        show_default=False,
        parser=Path,
        is_eager=True,
        callback=_read_option_file,
    )


def _read_option_file(context: typer.Context, path: Path | None) -> ConfigFile | None:
    """Read the file before other options are parsed, and use its values as their defaults."""
    if path is None or context.resilient_parsing:
        return None
    check = context.obj if isinstance(context.obj, ConfigCheck) else None
    try:
        config, messages = read_config(path, context)
    except ConfigError as error:
        config, messages = ConfigFile.empty(path), error.messages
    if check is not None:
        check.messages = [*messages]
        config = replace(
            config,
            options={n: v for n, v in config.options.items() if n not in check.ignored_options},
        )
    elif messages:
        fail("\n".join(messages), status=CONFIG_STATUS)
    context.default_map = {**config.options}
    return config


def read_config(path: Path, context: typer.Context) -> tuple[ConfigFile, tuple[str, ...]]:
    """Read and check a file.

    Args:
        path: The file.
        context: The typer context of `serve`.

    Returns:
        The valid part of the file, and the error messages.

    Raises:
        ConfigError: If the file cannot be read or is not TOML.
    """
    from simplebus.config.schema import ClassTable, NatsTable, parse_nats_table, parse_valid_part
    from simplebus.config.users import parse_users

    text, mode = _read_text(path)
    try:
        document = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(describe_toml_error(path, str(error))) from None
    errors = ErrorCollector()
    with errors.collect():
        _check_names(document, _OWN_TABLES, "", _options_by_table(context))
    tables = {name: _take_table(document, name, errors) for name in ("serve", "tls", "nats")}
    tables["nats.tls"] = _take_table(tables["nats"], "tls", errors, prefix="nats.")
    tables["nats"].pop("tls", None)
    options, nats = _read_options(tables, NatsTable.keys(), path, context, errors)
    config, has_secrets = ConfigFile.empty(path), False
    auth = config.auth
    with errors.collect():
        auth, has_secrets = parse_nats_table(nats, errors)
    classes: dict[str, NamedClass] = {}
    class_settings: dict[int | str, ClassSettings] = {}
    class_tables: dict[str, ClassTable] = {}
    for name, table in _take_table(document, "classes", errors).items():
        where = f"classes.{name}"
        with errors.collect():
            class_table = parse_valid_part(ClassTable, _copy_table(table, where), where, errors)
            if class_table is not None:
                class_tables[name] = class_table
                class_settings[name] = class_table.to_settings(where, errors)
                classes[name] = class_table.to_class(name, where)
    with errors.collect():
        _check_ids({name: table.id for name, table in class_tables.items()})
    has_secrets |= "@" in str(tables["serve"].get("engine", ""))
    bridges: tuple[BridgeSettings, ...] = ()
    with errors.collect():
        bridges, bridges_have_secrets = _read_bridges(document)
        has_secrets |= bridges_have_secrets
    users = _no_users()
    with errors.collect():
        users = parse_users(document["users"]) if "users" in document else _no_users()
        has_secrets |= any(user.password or user.token for user in users.users)
    warnings = []
    if has_secrets and mode & stat.S_IROTH:
        warnings.append(f"{path} holds passwords or tokens, and every user may read it")
    config = replace(
        config,
        auth=auth,
        options=options,
        classes=classes,
        class_settings=class_settings,
        class_tables=class_tables,
        bridges=bridges,
        users=users,
        warnings=tuple(warnings),
        lines=locate_keys(text),
    )
    return config, tuple(map(config.add_location, errors.messages[:MESSAGES_MAX]))


def _read_text(path: Path) -> tuple[str, int]:
    """Return the text and mode of a file. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_BYTES_MAX + 1)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > _BYTES_MAX:
        raise ConfigError(
            f"{path} is longer than {_BYTES_MAX >> 20} MiB: it is not a configuration file"
        )
    try:
        return raw.decode("utf-8-sig"), mode
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not TOML: it is not UTF-8") from None


def _read_bridges(document: dict[str, Any]) -> tuple[tuple[BridgeSettings, ...], bool]:
    """Return the bridges of the file, and whether they contain secrets."""
    if "bridges" not in document:
        return (), False
    from simplebus.config.bridges import (
        parse_bridges,  # It brings the client, which few servers need.
    )

    bridges, has_secrets = parse_bridges(document["bridges"], is_served=True)
    return tuple(bridges), has_secrets


def _read_options(
    tables: Mapping[str, dict[str, Any]],
    other_keys: Iterable[str],
    path: Path,
    context: typer.Context,
    errors: ErrorCollector,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the valid option values, and the keys of [nats] that are no options."""
    parameters, names = _parameters(context), _options_by_table(context)
    values: dict[str, Any] = {}
    other_values: dict[str, Any] = {}
    for table, values_in_table in tables.items():
        known = {*names[table], *(other_keys if table == "nats" else ())}
        with errors.collect():
            _check_names(values_in_table, known, table, names)
        for key, value in values_in_table.items():
            name = names[table].get(normalized := key.replace("-", "_"))
            if name is None:
                if normalized in known:
                    other_values[key] = value
                continue
            try:
                values[name] = _check_value(parameters[name], value, path, context)
            except (typer.BadParameter, ValueError) as error:
                message = describe_value_error(getattr(error, "message", "") or str(error), value)
                errors.messages.append(f"{table}.{key}: {message}")
    return values, other_values


def _parameters(context: typer.Context) -> dict[str, Any]:
    """Return the options by parameter name."""
    named = {str(p.name): p for p in context.command.params}
    return {name: p for name, p in named.items() if name not in _NO_OPTIONS}


def _options_by_table(context: typer.Context) -> dict[str, dict[str, str]]:
    """Return, by table, the parameter name of each key."""
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


def _check_value(parameter: Any, value: Any, path: Path, context: typer.Context) -> Any:
    """Return an option's value as for the command line. Raises BadParameter or ValueError."""
    is_list = isinstance(value, list) and parameter.multiple
    for item in value if is_list else [value]:
        if not isinstance(item, bool | int | float | str):
            raise ValueError(f"expected a single value, got {_describe_type(item)}")
        if parameter.is_flag != isinstance(item, bool):
            expected = "true or false" if parameter.is_flag else "a value, not true or false"
            raise ValueError(f"expected {expected}, got {_describe_type(item)}")
    if parameter.multiple and not is_list:
        value = [value]
    try:
        parsed = parameter.process_value(context, value)
    except (AttributeError, TypeError):  # The option's parser expected a text.
        raise ValueError(f"expected a text, got {value!r}") from None
    for item, raw_item in (
        zip(parsed, value, strict=True) if parameter.multiple else [(parsed, value)]
    ):
        if (
            isinstance(item, int | float)
            and isinstance(raw_item, str)
            and not _accepts_text(parameter, raw_item)
        ):
            raise ValueError(f"expected a number, got {raw_item!r}")
        if isinstance(item, int) and isinstance(raw_item, float) and item != raw_item:
            # typer before 0.29 truncates the number.
            raise ValueError(f"it should be a valid integer, got {raw_item!r}")
        if isinstance(item, str | Path) and not isinstance(raw_item, str):
            raise ValueError(f"expected a text, got {raw_item!r}")
        if isinstance(item, Path) and "\0" in raw_item:
            raise ValueError(f"{raw_item!r} is not a path: it contains a zero byte")
    return str(path.parent / parsed) if isinstance(parsed, Path) else value


def _take_table(
    document: dict[str, Any], name: str, errors: ErrorCollector, *, prefix: str = ""
) -> dict[str, Any]:
    """Return a copy of a subtable; empty if it is missing or invalid."""
    with errors.collect():
        return _copy_table(document.get(name, {}), prefix + name)
    return {}


def _copy_table(value: Any, path: str) -> dict[str, Any]:
    """Return a copy of a table. Raises ConfigError for another type."""
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a table, got {_describe_type(value)}")
    return dict(value)


def _check_names(
    names: Iterable[str],
    known_names: Iterable[str],
    path: str,
    other_tables: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Raise ConfigError for unknown or duplicate names.

    `elsewhere` has the names of other tables, see `_options_by_table`.
    """
    known_names, names, errors = set(known_names), list(names), ErrorCollector()
    with errors.collect():
        check_unique_names(names, path)
    for name in names:
        normalized = name.replace("-", "_")
        if normalized not in known_names:
            suggestion = _suggest_place(normalized, other_tables or {})
            errors.messages.append(
                f"{path + ': ' if path else ''}{name!r} is unknown; did you mean {suggestion}?"
                if suggestion
                else describe_unknown_name(name, known_names, path)
            )
    errors.raise_if_any()


def _suggest_place(name: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """Return the place of a name in another table, for a "did you mean"; empty without one.

    The name may include the table's prefix, as on the command line.
    """
    for table, keys in reversed([*names.items()]):
        if name in keys:
            return f"it to stand in [{table}]"
    for table, keys in names.items():
        for key, value_name in keys.items():
            if name == value_name:
                return f"{key.replace('_', '-')!r} in [{table}]"
    # An unknown table such as [http], whose name is the prefix of options.
    option_keys = [
        key.replace("_", "-") for key in names.get("serve", ()) if key.startswith(name + "_")
    ]
    if 0 < len(option_keys) <= _SUGGESTIONS_MAX:
        *most, last = map(repr, option_keys)
        return f"{', '.join(most)}{' or ' if most else ''}{last} in [serve]"
    return ""


def _check_ids(ids: Mapping[str, int | None]) -> None:
    """Raise ConfigError if two classes have the same id. `ids` is by class name."""
    owners: dict[int, str] = {}
    errors = ErrorCollector()
    for name, class_id in ids.items():
        if class_id is not None and owners.setdefault(class_id, name) != name:
            errors.messages.append(
                f"classes.{name}.id: {class_id} is the id of {owners[class_id]!r} too"
            )
    errors.raise_if_any()


def _accepts_text(parameter: Any, text: str) -> bool:
    """Return True if the text is a valid number: a size, or seconds with a unit."""
    has_unit = re.fullmatch(r"[0-9.]*", text) is None
    return parameter.metavar == "SIZE" or (parameter.metavar == "SECONDS" and has_unit)


def _describe_type(value: Any) -> str:
    words = {dict: "a table", list: "a list", bool: str(value).lower()}
    return words.get(type(value), repr(value))
