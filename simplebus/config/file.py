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
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
)
from simplebus.config.schema import ClassTable, NatsTable, parse_nats_table, parse_valid_part
from simplebus.config.server_schema import SETTINGS
from simplebus.config.setting import Setting, describe_toml, normalize
from simplebus.config.toml_lines import add_location, locate_keys
from simplebus.config.users import ConfiguredUsers, parse_users
from simplebus.core import toml
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import ClassSettings, FullPolicy, Settings
from simplebus.nats.users import NatsAuth

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings

_OWN_TABLES = ("serve", "nats", "tls", "classes", "bridges", "users")
_BYTES_MAX = 4 << 20
_SUGGESTIONS_MAX = 4
"""Maximum number of keys suggested for an unknown table."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Content of a configuration file."""

    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of settings, by name."""
    auth: NatsAuth = field(default_factory=NatsAuth)
    """Users of the NATS listener."""
    classes: Mapping[str, NamedClass] = field(default_factory=dict)
    """Classes by name."""
    class_settings: Mapping[int | str, ClassSettings] = field(default_factory=dict)
    """Settings of single classes."""
    class_tables: Mapping[str, ClassTable] = field(default_factory=dict)
    """Tables of single classes, as in the file."""
    bridges: tuple[BridgeSettings, ...] = ()
    users: ConfiguredUsers = field(default_factory=ConfiguredUsers)
    """Users of all listeners."""
    warnings: tuple[str, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each key."""

    def add_location(self, mistake: str) -> str:
        """Return an error message that begins with its key, with file and line in front."""
        return add_location(mistake, self.path, self.lines)

    def ineffective_settings(self, settings: Settings) -> list[str]:
        """Return a warning for each class setting without effect under `settings`."""
        return [
            self.add_location(f"classes.{name}.max-disk has no effect: the class does not spill")
            for name, own in self.class_settings.items()
            if own.disk_bytes_max is not None
            and (own.full_policy or settings.full_policy) is not FullPolicy.SPILL
        ]


def read_config(path: Path) -> tuple[ConfigFile, tuple[str, ...]]:
    """Return the valid part of a file, and the error messages.

    Raises:
        ConfigError: If the file cannot be read or is not TOML.
    """
    text, mode = _read_text(path)
    try:
        document = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(describe_toml_error(path, str(error))) from None
    errors = ErrorCollector()
    with errors.collect():
        _check_names(document, _OWN_TABLES, "", _settings_by_table())
    tables = {name: _take_table(document, name, errors) for name in ("serve", "tls", "nats")}
    tables["nats.tls"] = _take_table(tables["nats"], "tls", errors, prefix="nats.")
    tables["nats"].pop("tls", None)
    warnings = list[str]()
    options, nats = _read_options(tables, NatsTable.keys(), path.parent, errors, warnings)
    auth, has_secrets = NatsAuth(), False
    with errors.collect():
        auth, has_secrets = parse_nats_table(nats, errors)
    class_tables = _read_class_tables(_take_table(document, "classes", errors), errors)
    class_settings: dict[int | str, ClassSettings] = {}
    classes: dict[str, NamedClass] = {}
    for name, table in class_tables.items():
        class_settings[name] = table.to_settings(f"classes.{name}", errors)
        with errors.collect():
            classes[name] = table.to_class(name, f"classes.{name}")
    has_secrets |= "@" in str(tables["serve"].get("engine", ""))
    bridges: tuple[BridgeSettings, ...] = ()
    if "bridges" in document:
        from simplebus.config.bridges import parse_bridges  # Imports the client.

        with errors.collect():
            configured = parse_bridges(document["bridges"], path.parent, is_served=True)
            bridges = configured.bridges
            has_secrets |= configured.has_secrets
            warnings += configured.warnings
    users = ConfiguredUsers()
    with errors.collect():
        users = parse_users(document["users"]) if "users" in document else users
        has_secrets |= any(user.password or user.token for user in users.users)
    lines = locate_keys(text)
    warnings = [add_location(each, path, lines) for each in warnings]
    if has_secrets and mode & stat.S_IROTH:
        warnings.append(f"{path} holds passwords or tokens, and every user may read it")
    config = ConfigFile(
        path,
        options,
        auth,
        classes,
        class_settings,
        class_tables,
        bridges,
        users,
        tuple(warnings),
        lines,
    )
    return config, tuple(map(config.add_location, errors.messages[:MESSAGES_MAX]))


def _read_class_tables(tables: Mapping[str, Any], errors: ErrorCollector) -> dict[str, ClassTable]:
    """Return the valid parts of the tables of single classes. Errors are added to `errors`."""
    valid: dict[str, ClassTable] = {}
    owners: dict[int, str] = {}
    for name, values in tables.items():
        path = f"classes.{name}"
        with errors.collect():
            table = parse_valid_part(ClassTable, _copy_table(values, path), path, errors)
            if table is not None:
                valid[name] = table
            if table is None or table.id is None:
                continue
            if (owner := owners.setdefault(table.id, name)) != name:
                raise ConfigError(f"{path}.id: {table.id} is the id of {owner!r} too")
    return valid


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


def _read_options(
    tables: Mapping[str, dict[str, Any]],
    other_keys: Iterable[str],
    folder: Path,
    errors: ErrorCollector,
    warnings: list[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the valid values of settings by name, and the keys of [nats] that are no settings.

    Relative paths are relative to `folder`. Errors and warnings are added to the lists.
    """
    settings = _settings_by_table()
    former = {
        (old.toml_table, old.field_name): setting
        for setting in SETTINGS.values()
        for old in setting.former
    }
    values: dict[str, Any] = {}
    other_values: dict[str, Any] = {}
    for table, values_in_table in tables.items():
        known = {*settings[table], *(other_keys if table == "nats" else ())}
        old_keys = {key for old_table, key in former if old_table == table}
        with errors.collect():
            _check_names(values_in_table, known | old_keys, table, settings)
        former_first = sorted(values_in_table, key=lambda key: normalize(key) not in old_keys)
        for key in former_first:
            value = values_in_table[key]
            setting = settings[table].get(normalize(key))
            if (current := former.get((table, normalize(key)))) is not None:
                warnings.append(f"{table}.{key} is deprecated: use {current.key}")
                setting = current
            if setting is None:
                if normalize(key) in known:
                    other_values[key] = value
                continue
            try:
                values[setting.name] = setting.parse_toml(value, folder)
            except typer.BadParameter as error:
                errors.messages.append(f"{table}.{key}: {error.message}")
    return values, other_values


def _settings_by_table() -> dict[str, dict[str, Setting]]:
    """Return the settings by table, longest table name first, and key."""
    tables: dict[str, dict[str, Setting]] = {"nats.tls": {}, "nats": {}, "tls": {}, "serve": {}}
    for setting in SETTINGS.values():
        tables[setting.toml_table][setting.field_name] = setting
    return tables


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
        raise ConfigError(f"{path}: expected a table, got {describe_toml(value)}")
    return dict(value)


def _check_names(
    names: Iterable[str],
    known_names: Iterable[str],
    path: str,
    settings: Mapping[str, Mapping[str, Setting]],
) -> None:
    """Raise ConfigError for unknown or duplicate names.

    `settings` are those of all tables, which are searched for a suggestion.
    """
    known_names, names, errors = set(known_names), list(names), ErrorCollector()
    with errors.collect():
        check_unique_names(names, path)
    for name in names:
        if normalize(name) not in known_names:
            suggestion = _suggest_place(normalize(name), settings)
            errors.messages.append(
                f"{path + ': ' if path else ''}{name!r} is unknown; did you mean {suggestion}?"
                if suggestion
                else describe_unknown_name(name, known_names, path)
            )
    errors.raise_if_any()


def _suggest_place(name: str, settings: Mapping[str, Mapping[str, Setting]]) -> str:
    """Return the place of a name in another table, for a "did you mean"; empty without one.

    The name may include the table's prefix, as on the command line.
    """
    for table, keys in reversed([*settings.items()]):
        if name in keys:
            return f"it to stand in [{table}]"
    if (setting := SETTINGS.get(name)) is not None:
        return f"{setting.toml_key!r} in [{setting.toml_table}]"
    # An unknown table such as [http], whose name is the prefix of options.
    option_keys = [key.replace("_", "-") for key in settings["serve"] if key.startswith(f"{name}_")]
    if 0 < len(option_keys) <= _SUGGESTIONS_MAX:
        *most, last = map(repr, option_keys)
        return f"{', '.join(most)}{' or ' if most else ''}{last} in [serve]"
    return ""
