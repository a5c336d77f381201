"""Tables of the configuration file that no option can set: users and their permissions.

Tables are msgspec Structs; their field names are the TOML keys. msgspec checks the values, and its
errors are translated to the terms of TOML, with the key's path in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import typer

from simplebus.config.errors import (
    MESSAGES_MAX,
    ConfigError,
    ErrorCollector,
    check_unique_names,
    describe_unknown_name,
)
from simplebus.config.parse import parse_size
from simplebus.config.setting import SECONDS
from simplebus.core.users.subject_permissions import ResponsePermission, SubjectPermissions

R = TypeVar("R")
T = TypeVar("T", bound="TomlTable")

_MSGSPEC_ERROR = re.compile(r"(?s)(?P<what>.*?)(?: - at `(?P<at>[^`]*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_STEP = re.compile(r"\.[^.\[]+|\[[^\]]*\]")
_MISSING = re.compile(r"Object missing required field `(.*)`")


class Seconds(float):
    """Seconds, written as a number or as a text with a unit."""


def _decode(kind: type[Any], value: Any) -> Any:
    """Return `Seconds` as the settings of the server are read. Raises ValueError."""
    try:
        return kind(SECONDS.parse_toml(value))
    except typer.BadParameter as error:
        raise ValueError(error.message) from None


class TomlTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the tables of the configuration file."""

    @classmethod
    def keys(cls) -> list[str]:
        """Return the keys of the table."""
        return [field.encode_name for field in msgspec.structs.fields(cls)]


class SubjectRulesTable(TomlTable, frozen=True):
    """Subjects that a user may publish or subscribe to.

    A subject to subscribe to may be followed by a space and a queue group.
    """

    allow: list[str] | str | None = None
    """None allows every subject."""
    deny: list[str] | str | None = None


class ResponsesTable(TomlTable, frozen=True):
    """Limits of replies to subjects that a user may not publish to otherwise."""

    max: int = 1
    """Maximum replies per request; negative for no limit."""
    expires: float = 120.0
    """Seconds to reply; negative for no limit."""


class SubjectPermissionsTable(TomlTable, frozen=True):
    """Permissions for subjects. A user without the table may use every subject."""

    publish: SubjectRulesTable | list[str] | str | None = None
    subscribe: SubjectRulesTable | list[str] | str | None = None
    allow_responses: ResponsesTable | bool = False


_TABLES: dict[str, type[TomlTable]] = {
    "permissions": SubjectPermissionsTable,
    "default_permissions": SubjectPermissionsTable,
    "publish": SubjectRulesTable,
    "subscribe": SubjectRulesTable,
    "allow_responses": ResponsesTable,
}
"""Table type by the last part of its path."""


def parse_table(table_type: type[T], values: dict[str, Any], path: str) -> T:
    """Return a valid table. Raises ConfigError with all errors and their paths."""
    errors = ErrorCollector()
    table = parse_valid_part(table_type, values, path, errors)
    errors.raise_if_any()
    assert table is not None
    return table


def parse_valid_part(
    table_type: type[T], values: dict[str, Any], table_path: str, errors: ErrorCollector
) -> T | None:
    """Return the table without its invalid values; None if nothing can be read.

    Errors are added to `errors`.
    """
    spellings: dict[str, str] = {}
    values = _normalize_keys(values, table_path, spellings)
    indexes: dict[int, list[int]] = {}
    for _ in range(MESSAGES_MAX):
        try:
            return msgspec.convert(values, table_type, dec_hook=_decode)
        except msgspec.ValidationError as error:
            match = _MSGSPEC_ERROR.fullmatch(str(error))
            assert match is not None
            path = [*map(_parse_step, _STEP.findall((match["at"] or "").removeprefix("$")))]
            suffix = _format_path(values, path, indexes, spellings)
            errors.messages.append(
                _describe_error(table_type, match["what"], table_path, suffix, spellings)
            )
            if unknown := _UNKNOWN.fullmatch(match["what"]):
                path.append(unknown[1])
            if _MISSING.fullmatch(match["what"]) or not _remove(values, path, indexes):
                break
    return None


def _describe_error(
    table_type: type[TomlTable],
    message: str,
    table_path: str,
    suffix: str,
    spellings: Mapping[str, str],
) -> str:
    """Translate one error of msgspec. `spelled` maps keys to their spelling in the file."""
    path = table_path + suffix
    if name := _UNKNOWN.fullmatch(message):
        last_key = re.sub(r"\[.*?\]$", "", path).rpartition(".")[2]
        known_table = (
            table_type
            if path == table_path
            else _TABLES.get(last_key.replace("-", "_"), table_type)
        )
        return describe_unknown_name(spellings.get(name[1], name[1]), known_table.keys(), path)
    if name := _MISSING.fullmatch(message):
        return f"{path}: {name[1].replace('_', '-')!r} is missing"
    return f"{path}: {_translate_types(message)}"


def _parse_step(word: str) -> str | int:
    """Return a step of a msgspec path, written as `.name` or `[7]`."""
    return word[1:] if word.startswith(".") else int(word[1:-1]) if word[1:-1].isdigit() else word


def _format_path(
    values: Any, path: list[str | int], indexes: dict[int, list[int]], spellings: Mapping[str, str]
) -> str:
    """Return a path as the file writes it.

    `numbers` maps lists to the original indexes of their remaining elements.
    """
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{indexes[id(values)][step] if id(values) in indexes else step}]"
        else:
            text += f".{spellings.get(step, step)}"
        try:
            values = values[step]
        except (LookupError, TypeError):
            values = None
    return text


def _remove(values: Any, path: list[str | int], indexes: dict[int, list[int]]) -> bool:
    """Remove an invalid value, so that the rest can be checked. Return False if it is missing."""
    try:
        *parents, last = path
        for step in parents:
            values = values[step]
        if isinstance(values, list):
            indexes.setdefault(id(values), list(range(len(values)))).pop(int(last))
        del values[last]
    except (LookupError, TypeError, ValueError):
        return False
    return True


def parse_size_value(value: int | str | None, path: str) -> int | None:
    """Return a size in bytes. Raises ConfigError."""
    try:
        return None if value is None else parse_size(value)
    except typer.BadParameter as error:
        raise ConfigError(f"{path}: {error.message}") from None


def build_located(path: str, build: Callable[[], R]) -> R:
    """Return the result of a constructor; raise ConfigError with the path for its ValueError."""
    try:
        return build()
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def build_subject_permissions(
    table: SubjectPermissionsTable | None, path: str
) -> SubjectPermissions | None:
    """Return NATS permissions. Raises ConfigError for an invalid pattern."""
    if table is None:
        return None
    publish, subscribe = _as_rules_table(table.publish), _as_rules_table(table.subscribe)
    response_table = table.allow_responses
    responses = ResponsePermission() if response_table is True else None
    if isinstance(response_table, ResponsesTable):
        responses = ResponsePermission(response_table.max, response_table.expires)
    try:
        return SubjectPermissions(
            publish_allow=None if publish.allow is None else _as_tuple(publish.allow),
            publish_deny=_as_tuple(publish.deny),
            subscribe_allow=None if subscribe.allow is None else _as_tuple(subscribe.allow),
            subscribe_deny=_as_tuple(subscribe.deny),
            responses=responses,
        )
    except ValueError as error:  # The message begins with the parameter's name.
        raise ConfigError(f"{path}.{str(error).replace('_', '.', 1)}") from None


def _as_rules_table(value: SubjectRulesTable | list[str] | str | None) -> SubjectRulesTable:
    return value if isinstance(value, SubjectRulesTable) else SubjectRulesTable(allow=value)


def _as_tuple(value: list[str] | str | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _normalize_keys(value_: Any, path: str, spellings: dict[str, str]) -> Any:
    """Return the value with `_` for `-` in all keys; record the original spelling.

    Raises ConfigError if a key is given in both forms.
    """
    if isinstance(value_, dict):
        check_unique_names(value_, path)
        table = {}
        for key, value in value_.items():
            spellings[normalized := key.replace("-", "_")] = key
            table[normalized] = _normalize_keys(value, f"{path}.{key}", spellings)
        return table
    if isinstance(value_, list):
        return [
            _normalize_keys(item, f"{path}[{index}]", spellings)
            for index, item in enumerate(value_)
        ]
    return value_


_TYPE_NAMES = {
    "object": "a table",
    "array": "a list",
    "str": "a text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
}
"""TOML names of msgspec's types."""


def _translate_types(message: str) -> str:
    """Return an error of msgspec with TOML's type names."""

    def translate(match: re.Match[str]) -> str:
        types = match[1].split(" | ")
        *most, last = [words for kind, words in _TYPE_NAMES.items() if kind in types] or [match[0]]
        return f"{', '.join(most)} or {last}" if most else last

    message = re.sub(r"`([a-z| ]+)`", translate, message)
    for msgspec_text, toml_text in (
        ("Expected", "expected"),
        (" <= ", " up to "),
        (" >= ", " from "),
    ):
        message = message.replace(msgspec_text, toml_text)
    return message
