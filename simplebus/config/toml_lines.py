r"""Line numbers of the keys of a TOML file, which tomllib does not report.

The scanner checks nothing: the text has been parsed by tomllib before. Keys are written as in error
messages, such as nats.users[0].password, with `_` for `-`:

    locate_keys("[serve]\nport = 1") == {"serve": 1, "serve.port": 2}
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_WORD = re.compile(r"[^,\]}\n#]*")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")|\'\'\'.*?\'{3,5}(?!\')|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'',
    re.DOTALL,
)
_HEAD = re.compile(r"(?P<where>[^']*?)(?:: )?'(?P<name>[^']+)' (?:is unknown|is missing)")


def locate_keys(text: str) -> dict[str, int]:
    """Return the first line, from 1, of each key, table and list element."""
    return _KeyScanner(text).places


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


def add_location(message: str, path: Path, lines: Mapping[str, int]) -> str:
    """Return an error message with the file and, if its key is known, the line in front."""
    line = find_line(message, lines)
    return f"{path}{'' if line is None else f':{line}'}: {message}"


class _KeyScanner:
    """Single pass over the text of a TOML file."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._counted = 0, 1
        """Last counted position and its line."""
        self._elements: dict[str, int] = {}
        """Index of the latest table of each list of tables."""
        self.places: dict[str, int] = {}
        table = ""
        while self._rest():
            at = self._at
            if self._text.startswith("[", at):
                table = self._header()
            else:
                self._pair(table)
            if self._at == at:  # Not TOML.
                return

    def _rest(self) -> bool:
        """Skip blanks and comments. Return False at the end of the text."""
        blank = _BLANK.match(self._text, self._at)
        self._at = blank.end() if blank else self._at
        return self._at < len(self._text)

    def _line(self, offset: int) -> int:
        counted_offset, line = self._counted
        line += self._text.count("\n", counted_offset, offset)
        self._counted = offset, line
        return line

    def _note(self, place: str, offset: int) -> None:
        self.places.setdefault(place, self._line(offset))

    def _header(self) -> str:
        """Scan `[a.b]` or `[[a.b]]` and return the place of its keys."""
        start = self._at
        is_element = self._text.startswith("[[", start)
        self._at += 1 + is_element
        names = self._key()
        self._at += 1 + is_element
        place = ""
        for name in names[:-1]:
            place = self._below(place, name)
            self._note(place, start)
        place = _joined(place, names[-1]) if names else place
        self._note(place, start)
        if not is_element:
            return self._latest(place)
        number = self._elements[place] = self._elements.get(place, -1) + 1
        self._note(f"{place}[{number}]", start)
        return f"{place}[{number}]"

    def _below(self, place: str, name: str) -> str:
        return self._latest(_joined(place, name))

    def _latest(self, place: str) -> str:
        return f"{place}[{self._elements[place]}]" if place in self._elements else place

    def _pair(self, table: str) -> None:
        """key = value"""
        start, place = self._at, table
        for name in self._key():
            place = _joined(place, name)
            self._note(place, start)
        if self._rest() and self._text[self._at] == "=":
            self._at += 1
            self._value(place)

    def _key(self) -> list[str]:
        """Scan a dotted key and return its names."""
        names = []
        while self._rest():
            match = _STRING.match(self._text, self._at) or _BARE_KEY.match(self._text, self._at)
            if match is None:
                break
            names.append(_meant(match[0]))
            self._at = match.end()
            if not self._rest() or self._text[self._at] != ".":
                break
            self._at += 1
        return names

    def _value(self, place: str) -> None:
        if not self._rest():
            return
        opening = self._text[self._at]
        if opening in "[{":
            self._at += 1
            self._several(place, "]" if opening == "[" else "}")
            return
        match = _STRING.match(self._text, self._at) or _WORD.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _several(self, place: str, end: str) -> None:
        """Scan the elements of a list or inline table, and its end."""
        index = 0
        while self._rest() and self._text[self._at] != end:
            start = self._at
            if self._text[start] == ",":
                self._at += 1
            elif end == "}":
                self._pair(place)
            else:
                self._note(f"{place}[{index}]", start)
                self._value(f"{place}[{index}]")
                index += 1
            if self._at == start:
                return
        self._at += 1


def _joined(place: str, name: str) -> str:
    name = name.replace("-", "_")
    return f"{place}.{name}" if place else name


def _meant(name: str) -> str:
    """Return the name that a quoted or bare key stands for."""
    if name[0] not in "\"'":
        return name
    try:
        return str(tomllib.loads(f"name = {name}")["name"])
    except tomllib.TOMLDecodeError:
        return name
