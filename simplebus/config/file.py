"""Configuration file of `serve`, in TOML.

The file may set every option of `serve`. The command line takes precedence over the environment,
and the environment over the file. All errors are reported at once, each with file, line and key;
unknown keys are errors.

    [serve]                     options:         max-memory = "4GiB"      --max-memory
    [nats]                      NATS listener:   max-payload = "8MiB"     --nats-max-payload
    [nats.tls]                                   cert = "server.pem"      --nats-tls-cert
    [tls]                       all listeners:   cert = "server.pem"      --tls-cert
    [classes.orders]            id = 7, subjects = ["orders.>"], keep-seconds = 3600
    [[users]]                   users of all listeners and their permissions
    [[bridges]]                 bridges to other servers

Paths are relative to the file's directory. In names `_` may stand for `-`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from simplebus.config.errors import (
    ConfigError,
    ErrorCollector,
    describe_toml_error,
    describe_unknown_name,
    find_repeated_names,
    limit_messages,
    shorten,
)
from simplebus.config.nats_users import (
    NatsTable,
    NatsUsers,
    deprecation_warnings,
    parse_nats_table,
)
from simplebus.config.server_schema import SETTING_TABLES, SETTINGS, ClassTable
from simplebus.config.server_settings import class_settings, named_class
from simplebus.config.setting import Setting, describe_toml, normalize
from simplebus.config.toml_lines import add_location, locate_keys
from simplebus.config.users import ConfiguredUsers, parse_users
from simplebus.core import toml
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import ClassSettings, FullPolicy, Settings

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings

_TOP_TABLES = (*(each for each in SETTING_TABLES if "." not in each), "classes", "bridges", "users")
_BYTES_MAX = 4 << 20
_SUGGESTIONS_MAX = 4
"""Maximum number of keys suggested for an unknown table."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Content of a configuration file."""

    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of settings, by name."""
    nats_users: NatsUsers = field(default_factory=NatsUsers)
    """Users of the deprecated `[nats]` table."""
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
    reader = _Reader(path.parent)
    errors = reader.errors
    reader.check_names(document, _TOP_TABLES, "")
    tables: dict[str, dict[str, Any]] = {}
    for name in SETTING_TABLES:
        outer, _, key = name.rpartition(".")
        value = tables[outer].pop(key, {}) if outer else document.get(name, {})
        tables[name] = reader.copy_table(value, name)
    options: dict[str, Any] = {}
    user_keys = NatsTable.keys()
    for name, values in tables.items():
        settings = [each for each in SETTINGS.values() if each.toml_table == name]
        other_keys = user_keys if name == "nats" else ()
        options |= reader.read_settings(values, settings, name, other_keys)
    user_values = {key: each for key, each in tables["nats"].items() if normalize(key) in user_keys}
    reader.warnings += deprecation_warnings(user_values)
    nats_users, has_secrets = NatsUsers(), "@" in str(tables["serve"].get("engine", ""))
    with errors.collect():
        nats_users, nats_has_secrets = parse_nats_table(user_values, errors)
        has_secrets |= nats_has_secrets
    class_tables = reader.read_class_tables(document.get("classes", {}))
    settings_of_classes: dict[int | str, ClassSettings] = {}
    classes: dict[str, NamedClass] = {}
    for name, table in class_tables.items():
        settings_of_classes[name] = class_settings(table, f"classes.{name}", errors)
        with errors.collect():
            classes[name] = named_class(table, name, f"classes.{name}")
    bridges: tuple[BridgeSettings, ...] = ()
    if "bridges" in document:
        from simplebus.config.bridges import parse_bridges  # Imports the client.

        with errors.collect():
            configured = parse_bridges(document["bridges"], path.parent, is_served=True)
            bridges = configured.bridges
            has_secrets |= configured.has_secrets
            reader.warnings += configured.warnings
    users = ConfiguredUsers()
    if "users" in document:
        with errors.collect():
            users = parse_users(document["users"])
            has_secrets |= any(user.password or user.token for user in users.users)
    lines = locate_keys(text)
    warnings = [add_location(each, path, lines) for each in reader.warnings]
    if has_secrets and mode & stat.S_IROTH:
        warnings.append(f"{path} holds passwords or tokens, and every user may read it")
    config = ConfigFile(
        path,
        options=options,
        nats_users=nats_users,
        classes=classes,
        class_settings=settings_of_classes,
        class_tables=class_tables,
        bridges=bridges,
        users=users,
        warnings=tuple(warnings),
        lines=lines,
    )
    return config, limit_messages([*map(config.add_location, errors.messages)])


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


class _Reader:
    """Reader of the tables of settings in a parsed file. Collects all errors and warnings."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        """Directory of the file, from which relative paths count."""
        self.errors = ErrorCollector()
        self.warnings: list[str] = []

    def copy_table(self, value: Any, path: str) -> dict[str, Any]:
        """Return a copy of a table; empty if the value is not a table."""
        if isinstance(value, dict):
            return dict(value)
        self.errors.messages.append(f"{path}: expected a table, got {describe_toml(value)}")
        return {}

    def read_settings(
        self,
        values: Mapping[str, Any],
        settings: Iterable[Setting],
        path: str,
        other_keys: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Return the valid values of a table, by the name of the setting.

        `other_keys` are keys of the table that are no settings.
        """
        current = {each.field_name: each for each in settings}
        former = {old.field_name: each for each in current.values() for old in each.former}
        self.check_names(values, {*current, *former, *other_keys}, path)
        valid: dict[str, Any] = {}
        for key in sorted(values, key=lambda key: normalize(key) not in former):
            setting = current.get(normalize(key))
            if setting is None and (setting := former.get(normalize(key))) is not None:
                self.warnings.append(f"{path}.{key} is deprecated: use {path}.{setting.toml_key}")
            if setting is None:
                continue
            if setting.is_list and isinstance(values[key], list):
                items = [
                    self._parse(setting.kind.parse_toml, item, f"{path}.{key}[{index}]")
                    for index, item in enumerate(values[key])
                ]
                if None not in items:
                    valid[setting.name] = tuple(items)
                continue
            parse = partial(setting.parse_toml, folder=self._folder)
            if (value := self._parse(parse, values[key], f"{path}.{key}")) is not None:
                valid[setting.name] = value
        return valid

    def _parse(self, parse: Callable[[Any], Any], value: Any, path: str) -> Any:
        """Return a parsed value; None after an error."""
        try:
            return parse(value)
        except typer.BadParameter as error:
            self.errors.messages.append(f"{path}: {shorten(error.message)}")
            return None

    def read_class_tables(self, tables: Any) -> dict[str, ClassTable]:
        """Return the valid parts of the tables of single classes, by name."""
        valid: dict[str, ClassTable] = {}
        owners: dict[int, str] = {}
        for name, value in self.copy_table(tables, "classes").items():
            path = f"classes.{name}"
            values = self.copy_table(value, path)
            table = ClassTable(**self.read_settings(values, ClassTable.settings(), path))
            valid[name] = table
            if table.id is not None and (owner := owners.setdefault(table.id, name)) != name:
                self.errors.messages.append(f"{path}.id: {table.id} is the id of {owner!r} too")
        return valid

    def check_names(self, names: Iterable[str], known_names: Collection[str], path: str) -> None:
        """Add an error for each unknown or duplicate name of a table."""
        self.errors.messages += find_repeated_names(names, path)
        for name in names:
            if normalize(name) in known_names:
                continue
            suggestion = _suggest_place(normalize(name), is_table=not path)
            self.errors.messages.append(
                f"{path + ': ' if path else ''}{name!r} is unknown; did you mean {suggestion}?"
                if suggestion
                else describe_unknown_name(name, known_names, path)
            )


def _suggest_place(name: str, *, is_table: bool) -> str:
    """Return the place of a name in another table, for a "did you mean"; empty without one.

    The name may include the table's prefix, as on the command line, or be that of an unknown table
    such as [http], which is the prefix of options.
    """
    for table in _TOP_TABLES:
        if any((each.toml_table, each.field_name) == (table, name) for each in SETTINGS.values()):
            return f"it to stand in [{table}]"
    if not is_table and name in _TOP_TABLES:
        return f"the table [{name}]"
    if (setting := SETTINGS.get(name)) is not None:
        return f"{setting.toml_key!r} in [{setting.toml_table}]"
    option_keys = [
        each.toml_key
        for each in SETTINGS.values()
        if is_table and each.toml_table == "serve" and each.name.startswith(f"{name}_")
    ]
    if 0 < len(option_keys) <= _SUGGESTIONS_MAX:
        *most, last = map(repr, option_keys)
        return f"{', '.join(most)}{' or ' if most else ''}{last} in [serve]"
    return ""
