r"""Line numbers of the keys of a TOML file, which tomllib does not report.

Keys are written as in error messages, such as nats.users[0].password, with `_` for `-`:

    locate_keys("[serve]\nport = 1") == {"serve": 1, "serve.port": 2}
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

_HEAD = re.compile(
    r"(?P<where>[^']*?)(?:: )?'(?P<name>[^']+)' "
    r"(?:is unknown|is missing|and '[^']+' are the same)"
)
_VALUE_END = re.compile(r"[\]}]|\"\"\"|'''")
"""Text in every last line of a value that has several lines."""


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
    """Yield each name of a parsed table header, and what it contains."""
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
