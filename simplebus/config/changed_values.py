"""Values of a configuration that differ between two readings, without secrets.

Values are compared by table and key of the file. A change is described as in the file:
`classes.orders.keep-seconds = 1800, was 3600`.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simplebus.config.nats_users import NatsTable
from simplebus.config.server_schema import SETTINGS, ServerConfig
from simplebus.core.protocol.requests import NamedClass

Tables = Mapping[str, Mapping[str, Any]]
"""Values by table and by key of the file. None and a missing key are the same."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_CREDENTIALS = re.compile(r"//[^/@]*@")
_SECRET_KEYS = ("password", "token", "seed")
_SHOWN_CHARACTERS = 500
_NATS_KEYS = {setting.toml_key for setting in NatsTable.settings()} - {"users"}
_RELOADED_TABLES = ("classes.", "users.", "nats.users.")
_RELOADED_KEYS = {setting.key for setting in SETTINGS.values() if setting.is_reloadable}
_RELOADED_KEYS |= {f"nats.{key}" for key in _NATS_KEYS}


@dataclass(frozen=True, slots=True)
class ValueChange:
    """Table, or key of a table, whose value differs."""

    key: str
    description: str
    is_reloaded: bool
    """True if the running server applies the new value."""
    value: str = ""
    """The new value, as in the file; empty if it is not set, or a secret."""
    previous: str = ""

    def __str__(self) -> str:
        return self.description if self.is_reloaded else f"{self.description}: needs a restart"


def compared_values(
    config: ServerConfig, document: Mapping[str, Any], users: Sequence[Any] = ()
) -> Tables:
    """Return the values of all settings, and those of classes, users and bridges.

    Args:
        config: Values of all settings.
        document: The parsed configuration file.
        users: Tables of all users, as parsed.
    """
    tables: dict[str, dict[str, Any]] = {}
    for setting, value in config.items():
        table = tables.setdefault(setting.toml_table, {})
        table[setting.toml_key] = setting.format_value(value)
    nats = document.get("nats", {})
    tables["nats"] |= {
        key: value for key, value in _flatten(nats) if key.partition(".")[0] in _NATS_KEYS
    }
    lists = {"users": users, "bridges": document.get("bridges", ())}
    for path, elements in (lists | {"nats.users": nats.get("users", ())}).items():
        for element in elements:
            name = element.get("name", element.get("user", element.get("nkey")))
            tables[quote_key(path, str(name))] = dict(_flatten(element))
    for name, values in document.get("classes", {}).items():
        tables[quote_key("classes", name)] = dict(_flatten(values))
    return tables


def _flatten(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and the values of a table and the tables in it."""
    for name, value in table.items():
        key = name.replace("_", "-")
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", each) for inner, each in _flatten(value))
        else:
            yield key, value


def find_changes(old: Tables, new: Tables) -> list[ValueChange]:
    """Return one change for each key whose value differs, and for each added or removed table."""
    changes = []
    for table in dict.fromkeys((*old, *new)):
        if table in old and table in new:
            changes += [
                _describe(table, key, old[table].get(key), new[table].get(key))
                for key in _differing_keys(old[table], new[table])
            ]
        else:
            word = "added" if table in new else "removed"
            changes.append(ValueChange(table, f"{table} was {word}", _is_reloaded(table)))
    return changes


def count_changes(changes: Sequence[ValueChange]) -> str:
    """Return how many changes were applied, and how many need a restart."""
    if not changes:
        return "no changes"
    applied = sum(change.is_reloaded for change in changes)
    text = f"{applied} change{'' if applied == 1 else 's'} applied"
    if waiting := len(changes) - applied:
        text += f", {waiting} need{'s' if waiting == 1 else ''} a restart"
    return text


def apply_reload(old: Tables, new: Tables) -> Tables:
    """Return the values of the running server after a reload.

    Settings that need a restart keep their old values.
    """
    tables = {
        name: dict((new if _is_reloaded(name) else old)[name])
        for name in dict.fromkeys((*old, *new))
        if name in (new if _is_reloaded(name) else old)
    }
    for name in tables.keys() & new.keys():
        for key in _differing_keys(tables[name], new[name]):
            if _is_reloaded(name, key):
                tables[name][key] = new[name].get(key)
    return tables


def _is_reloaded(table: str, key: str = "") -> bool:
    return table.startswith(_RELOADED_TABLES) or (
        f"{table}.{key}" in _RELOADED_KEYS or f"{table}.{key.partition('.')[0]}" in _RELOADED_KEYS
    )


def _differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]


def _describe(table: str, key: str, old: Any, new: Any) -> ValueChange:
    is_secret = key.rpartition(".")[2] in _SECRET_KEYS
    previous, value = ("" if is_secret else _format_value(raw_value) for raw_value in (old, new))
    name = f"{table}.{key}"
    if new is None:
        description = f"{name} is not set"
    elif value:
        description = f"{name} = {value}"
    else:
        description = f"{name} has changed"
    if previous:
        description += f", was {previous}"
    return ValueChange(name, description, _is_reloaded(table, key), value, previous)


def quote_key(table: str, name: str) -> str:
    """Return the key of `name` in a table, with quotes where TOML requires them."""
    shown = name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)
    return f"{table}.{shown}"


def _format_value(value: Any) -> str:
    """Return a value as in TOML; empty if it has no text, or contains credentials."""
    text = ""
    match value:
        case bool():
            text = str(value).lower()
        case enum.Enum():
            text = _format_value(value.value)
        case int():
            text = str(value)
        case float():
            text = str(int(value)) if value.is_integer() else str(value)
        case str() | Path():
            if not _CREDENTIALS.search(str(value)):
                text = json.dumps(str(value), ensure_ascii=False)
        case NamedClass():
            name = str(value.id if value.name is None else value.name)
            text = _format_value("=".join((*value.subjects, name)))
        case list() | tuple():
            parts = [_format_value(part) for part in value]
            text = f"[{', '.join(parts)}]" if all(parts) else ""
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
