r"""TOML files: reading them, and the lines of their keys, which tomllib does not report.

Keys are written as in error messages, such as nats.users[0].password, with `_` for `-`:

    locate_keys("[serve]\nport = 1") == {"serve": 1, "serve.port": 2}
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from simplebus.config.errors import ConfigError, limit_messages
from simplebus.core import toml

_BYTES_MAX = 4 << 20
_MISTAKE = re.compile(r"(?s)(.*) \(at line (\d+), column (\d+)\)")
_HEAD = re.compile(
    r"(?P<where>[^']*?)(?:: )?'(?P<name>[^']+)' "
    r"(?:is unknown|is missing|and '[^']+' are the same)"
)
_VALUE_END = re.compile(r"[\]}]|\"\"\"|'''")
"""Text in every last line of a value that has several lines."""


@dataclass(frozen=True, slots=True)
class TomlDocument:
    """Parsed TOML file."""

    path: Path
    text: str = ""
    mode: int = 0
    """Permissions of the file."""
    tables: Mapping[str, Any] = field(default_factory=dict)

    def find_line(self, message: str) -> int | None:
        """Return the line of the key that an error message begins with; None without one."""
        return find_line(message, locate_keys(self.text))

    def add_location(self, message: str) -> str:
        """Return an error message that begins with its key, with file and line in front."""
        line = self.find_line(message)
        return f"{self.path}{'' if line is None else f':{line}'}: {message}"

    def locate(self, messages: Iterable[str]) -> tuple[str, ...]:
        """Return a limited number of error messages with their locations, in order of lines."""
        ordered = sorted(
            dict.fromkeys(messages), key=lambda each: self.find_line(each) or sys.maxsize
        )
        return limit_messages([*map(self.add_location, ordered)])


def read_document(path: Path, bytes_max: int = _BYTES_MAX) -> TomlDocument:
    """Read a TOML file of up to `bytes_max`. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            raw = file.read(bytes_max + 1)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > bytes_max:
        raise ConfigError(f"{path} is longer than {bytes_max >> 20} MiB, which is the maximum")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not TOML: it is not UTF-8") from None
    return parse_document(text, path, mode)


def parse_document(text: str, path: Path, mode: int = 0) -> TomlDocument:
    """Parse the text of a file. Raises ConfigError if it is not TOML."""
    try:
        return TomlDocument(path, text, mode, toml.loads(text))
    except toml.TOMLDecodeError as error:
        if (match := _MISTAKE.fullmatch(str(error))) is None:
            raise ConfigError(f"{path}: is not TOML: {error}") from None
        raise ConfigError(
            f"{path}:{match[2]}: is not TOML: {match[1]}, in column {match[3]}"
        ) from None


# Lines of keys ----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def locate_keys(text: str) -> Mapping[str, int]:
    """Return the first line, from 1, of each key and table.

    The keys and elements of a value that has several lines are in its first line.
    """
    places: dict[str, int] = {}
    table, statement, start = "", "", 1
    elements: dict[str, int] = {}
    """Index of the latest table of each list of tables."""
    for number, line in enumerate(text.split("\n"), 1):
        is_first, statement = not statement, f"{statement}{line}\n"
        if not (is_first or _VALUE_END.search(line)):
            continue
        try:
            parsed = tomllib.loads(statement)
        except (ValueError, RecursionError):
            continue  # The value has more lines.
        if statement.lstrip().startswith("["):
            table = ""
            for name, inner in _header_steps(parsed):
                table = _join(table, name)
                if isinstance(inner, list):
                    elements[table] = elements.get(table, -1) + 1
                    places.setdefault(table, start)
                table += f"[{elements[table]}]" if table in elements else ""
                places.setdefault(table, start)
        else:
            for place in _places(parsed, table):
                places.setdefault(place, start)
        statement, start = "", number + 1
    return places


def _header_steps(parsed: Any) -> Iterator[tuple[str, Any]]:
    """Yield each name of a parsed table header, and the value of this name."""
    while parsed:
        ((name, inner),) = parsed.items()
        yield name, inner
        parsed = inner[0] if isinstance(inner, list) else inner


def _places(value: Any, place: str) -> Iterator[str]:
    """Yield the places of all keys and elements in a value."""
    inner = (
        ((_join(place, name), each) for name, each in value.items())
        if isinstance(value, dict)
        else ((f"{place}[{index}]", each) for index, each in enumerate(value))
    )
    for inner_place, each in inner:
        yield inner_place
        if isinstance(each, dict | list):
            yield from _places(each, inner_place)


def _join(place: str, name: str) -> str:
    name = name.replace("-", "_")
    return f"{place}.{name}" if place else name


def find_line(message: str, lines: Mapping[str, int]) -> int | None:
    """Return the line of the key that an error message begins with; None without one."""
    normalized = message.replace("-", "_")
    if (head := _HEAD.match(normalized)) is not None:
        table = head["where"]
        if line := lines.get(f"{table}.{head['name']}" if table else head["name"]):
            return line
    best_place = ""
    for place in lines:
        ends_there = normalized[len(place) : len(place) + 1] in (":", " ", ".", "[")
        if len(place) > len(best_place) and ends_there and normalized.startswith(place):
            best_place = place
    return lines.get(best_place)
