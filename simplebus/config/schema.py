"""Tables of the configuration file that no option can set: users and their permissions.

Tables are msgspec Structs; their field names are the TOML keys. msgspec checks the values, and its
errors are translated to the terms of TOML, with the key's path in front.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar, get_args

import msgspec
import typer

from simplebus.config.errors import (
    MESSAGES_MAX,
    ConfigError,
    ErrorCollector,
    describe_unknown_name,
    find_repeated_names,
)
from simplebus.config.parse import parse_size
from simplebus.config.setting import SECONDS
from simplebus.core.users.subject_permissions import ResponsePermission, SubjectPermissions

Path: TypeAlias = tuple[str | int, ...]
"""Keys, and indexes of lists, from a table to a value."""
R = TypeVar("R")
T = TypeVar("T", bound="TomlTable")

_MSGSPEC_ERROR = re.compile(r"(?s)(?P<what>.*?)(?: - at `(?P<at>[^`]*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_BOUNDS = re.compile(r" [<>]=? ")
_PLACEHOLDER = "unnamed"
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
    expires: float | str = 120.0
    """Seconds to reply, or a text with a unit; negative for no limit."""


class SubjectPermissionsTable(TomlTable, frozen=True):
    """Permissions for subjects. A user without the table may use every subject."""

    publish: SubjectRulesTable | list[str] | str | None = None
    subscribe: SubjectRulesTable | list[str] | str | None = None
    allow_responses: ResponsesTable | bool = False


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
    values = _normalize_keys(values, table_path, spellings, errors)
    indexes: dict[int, list[int]] = {}
    reported: set[Path] = set()
    for _ in range(MESSAGES_MAX):
        try:
            return msgspec.convert(values, table_type, dec_hook=_decode)
        except msgspec.ValidationError as error:
            match = _MSGSPEC_ERROR.fullmatch(str(error))
            assert match is not None
            what = match["what"]
            path = (*map(_parse_step, _STEP.findall((match["at"] or "").removeprefix("$"))),)
            place = table_path + _format_path(values, path, indexes, spellings)
            if name := _MISSING.fullmatch(what):
                path = (*path, name[1])
                if path not in reported:
                    errors.messages.append(f"{place}: {name[1].replace('_', '-')!r} is missing")
                is_removed = _insert(values, path)
            elif name := _UNKNOWN.fullmatch(what):
                known = _find_table_type(table_type, path).keys()
                spelled = spellings.get(name[1], name[1])
                errors.messages.append(describe_unknown_name(spelled, known, place))
                is_removed = _remove(values, (*path, name[1]), indexes)
            else:
                value = _find(values, path)
                got = f", got {value!r}" if _BOUNDS.search(what) else ""
                errors.messages.append(f"{place}: {_translate_types(what)}{got}")
                reported.add(path)
                is_removed = _remove(values, path, indexes)
            if not is_removed:
                break
    return None


def _find_table_type(table_type: type[TomlTable], path: Path) -> type[TomlTable]:
    """Return the type of the table at a path below a table of `table_type`."""
    for step in path:
        types = {each.encode_name: each.type for each in msgspec.structs.fields(table_type)}
        table_type = next(_table_types(types.get(str(step))), table_type)
    return table_type


def _table_types(annotation: Any) -> Iterator[type[TomlTable]]:
    """Yield the types of tables in an annotation such as `list[X] | Y`."""
    if isinstance(annotation, type) and issubclass(annotation, TomlTable):
        yield annotation
    for each in get_args(annotation):
        yield from _table_types(each)


def _parse_step(word: str) -> str | int:
    """Return a step of a msgspec path, written as `.name` or `[7]`."""
    return word[1:] if word.startswith(".") else int(word[1:-1]) if word[1:-1].isdigit() else word


def _format_path(
    values: Any, path: Path, indexes: dict[int, list[int]], spellings: Mapping[str, str]
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


def _find(values: Any, path: Path) -> Any:
    """Return the value at a path. Raises LookupError or TypeError if there is none."""
    for step in path:
        values = values[step]
    return values


def _insert(values: Any, path: Path) -> bool:
    """Insert a text for a required key, so that the rest can be checked. Return False if it is
    there. All required keys are texts.
    """
    table, last = _find(values, path[:-1]), path[-1]
    return bool(table.setdefault(last, _PLACEHOLDER) is _PLACEHOLDER)


def _remove(values: Any, path: Path, indexes: dict[int, list[int]]) -> bool:
    """Remove an invalid value, so that the rest can be checked. Return False if it is missing."""
    try:
        values, last = _find(values, path[:-1]), path[-1]
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
    errors = ErrorCollector()
    if isinstance(response_table, ResponsesTable):
        with errors.collect():
            seconds = _parse_expiry(response_table.expires, f"{path}.allow_responses.expires")
            responses = ResponsePermission(response_table.max, seconds)
    patterns: dict[str, Any] = {
        "publish_allow": None if publish.allow is None else _as_tuple(publish.allow),
        "publish_deny": _as_tuple(publish.deny),
        "subscribe_allow": None if subscribe.allow is None else _as_tuple(subscribe.allow),
        "subscribe_deny": _as_tuple(subscribe.deny),
    }
    for name, texts in patterns.items():
        for text in texts or ():
            try:
                SubjectPermissions(**dict[str, Any]({name: (text,)}))
            except ValueError as error:  # The message begins with the parameter's name.
                errors.messages.append(f"{path}.{str(error).replace('_', '.', 1)}")
    errors.raise_if_any()
    return SubjectPermissions(responses=responses, **patterns)


def _parse_expiry(value: float | str, path: str) -> float:
    """Return seconds, which may be negative. Raises ConfigError."""
    try:
        seconds = float(SECONDS.parse_toml(value)) if isinstance(value, str) else value
    except typer.BadParameter as error:
        raise ConfigError(f"{path}: {error.message}") from None
    if not math.isfinite(seconds):
        raise ConfigError(f"{path}: expected a finite number of seconds, got {value!r}")
    return seconds


def _as_rules_table(value: SubjectRulesTable | list[str] | str | None) -> SubjectRulesTable:
    return value if isinstance(value, SubjectRulesTable) else SubjectRulesTable(allow=value)


def _as_tuple(value: list[str] | str | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _normalize_keys(
    value_: Any, path: str, spellings: dict[str, str], errors: ErrorCollector
) -> Any:
    """Return the value with `_` for `-` in all keys; record the original spelling.

    Keys that are given in both forms are added to `errors`.
    """
    if isinstance(value_, dict):
        errors.messages += find_repeated_names(value_, path)
        table = {}
        for key, value in value_.items():
            spellings[normalized := key.replace("-", "_")] = key
            table[normalized] = _normalize_keys(value, f"{path}.{key}", spellings, errors)
        return table
    if isinstance(value_, list):
        return [
            _normalize_keys(item, f"{path}[{index}]", spellings, errors)
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
