"""Reader of the tables of a parsed configuration file.

Every table is declared as a `SettingsTable`. The reader continues after an error, so that all
errors of a file are reported at once, each with the path of its key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import typer

from simplebus.config.errors import (
    ErrorCollector,
    describe_unknown_name,
    find_repeated_names,
    shorten,
)
from simplebus.config.server_schema import SETTING_TABLES, SETTINGS
from simplebus.config.setting import Setting, SettingsTable, describe_toml, normalize

T = TypeVar("T", bound=SettingsTable)

TOP_TABLES = (
    *(setting_table for setting_table in SETTING_TABLES if "." not in setting_table),
    "classes",
    "bridges",
    "users",
)
"""Tables of the configuration file of `serve`."""
_SUGGESTIONS_MAX = 4
"""Maximum number of keys suggested for an unknown table."""


class TableReader:
    """Values of tables, and the errors and warnings found so far."""

    def __init__(self, folder: Path) -> None:
        """Create a reader. Relative paths in the file count from `folder`."""
        self.folder = folder
        self.errors = ErrorCollector()
        self.warnings: list[str] = []
        self.has_secrets = False
        """True if a table contained a password, token or seed."""

    def copy_table(self, value: Any, path: str) -> dict[str, Any]:
        """Return a copy of a table; empty, after an error, if the value is not a table."""
        if isinstance(value, dict):
            return dict(value)
        self.errors.messages.append(f"{path}: expected a table, got {describe_toml(value)}")
        return {}

    def read_table(self, table: type[T], value: Any, path: str) -> T:
        """Return a table. Invalid values are left out."""
        values = self.copy_table(value, path)
        return table(**self.read_values(values, table.settings(), path))

    def read_tables(self, table: type[T], value: Any, path: str) -> list[tuple[str, T, bool]]:
        """Return the path and the table of each element of a list; and False after an error."""
        if not isinstance(value, list):
            self.errors.messages.append(f"{path}: expected tables, as [[{path}]] begins them")
            return []
        tables, names = [], set[object]()
        for index, values in enumerate(value):
            element, count = f"{path}[{index}]", len(self.errors.messages)
            if isinstance(values, dict) and isinstance(name := values.get("name"), str):
                if name in names:
                    kind = path.removesuffix("s")
                    self.errors.messages.append(f"{element}.name: there is another {kind} {name!r}")
                names.add(name)
            read = self.read_table(table, values, element)
            tables.append((element, read, len(self.errors.messages) == count))
        return tables

    def read_values(
        self, values: Mapping[str, Any], settings: Sequence[Setting], path: str
    ) -> dict[str, Any]:
        """Return the valid values of a table, by the name of the setting."""
        current = {setting.field_name.strip("_"): setting for setting in settings}
        former = {old.field_name: setting for setting in settings for old in setting.former}
        self.check_names(values, {*current, *former}, path)
        valid: dict[str, Any] = {}
        for key in sorted(values, key=lambda key: normalize(key) not in former):
            setting, place = current.get(normalize(key)), f"{path}.{key}"
            if setting is None and (setting := former.get(normalize(key))) is not None:
                self.warnings.append(f"{place} is deprecated: use {path}.{setting.toml_key}")
            if setting is None:
                continue
            if setting.table and setting.table.DEPRECATED:
                self.warnings.append(f"{place} is deprecated; {setting.table.DEPRECATED}")
            self.has_secrets |= setting.kind.is_secret and bool(values[key])
            if (value := self._read_value(setting, values[key], place)) is not None:
                valid[setting.name] = value
        for setting in settings:
            if setting.is_required and normalize(setting.toml_key) not in map(normalize, values):
                self.errors.messages.append(f"{path}: {setting.toml_key!r} is missing")
        return valid

    def _read_value(self, setting: Setting, value: Any, path: str) -> Any:
        """Return the value of a key; None after an error."""
        kind = setting.kind
        if isinstance(value, dict) and kind.table is not None and not setting.is_list_of_tables:
            return self.read_table(kind.table, value, path)
        if setting.is_list_of_tables and kind.table is not None:
            return tuple(self.read_tables(kind.table, value, path))
        if setting.is_list:
            items = value if isinstance(value, list) else [value]
            paths = [f"{path}[{i}]" for i in range(len(items))] if items is value else [path]
            read = tuple(map(self._parse, [setting] * len(items), items, paths))
            return None if None in read else read
        return self._parse(setting, value, path)

    def _parse(self, setting: Setting, value: Any, path: str) -> Any:
        """Return a parsed value; None after an error."""
        try:
            parsed = setting.kind.parse_toml(value)
        except typer.BadParameter as error:
            self.errors.messages.append(f"{path}: {shorten(error.message)}")
            return None
        except ValueError as error:
            self.errors.messages.append(f"{path}: {shorten(str(error))}")
            return None
        return self.folder / parsed if isinstance(parsed, Path) else parsed

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
    for setting in SETTINGS.values():
        if setting.field_name == name and "." not in setting.toml_table:
            return f"it to stand in [{setting.toml_table}]"
    if not is_table and name in TOP_TABLES:
        return f"the table [{name}]"
    if (found := SETTINGS.get(name)) is not None:
        return f"{found.toml_key!r} in [{found.toml_table}]"
    keys = [
        repr(setting.toml_key)
        for setting in SETTINGS.values()
        if is_table and setting.toml_table == "serve" and setting.name.startswith(f"{name}_")
    ]
    return f"{' or '.join(keys)} in [serve]" if 0 < len(keys) <= _SUGGESTIONS_MAX else ""
