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
_HEAD = re.compile(
    r"(?P<where>[^']*?)(?:: )?'(?P<name>[^']+)' "
    r"(?:is unknown|is missing|and '[^']+' are the same)"
)


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
        self._position = 0
        self._counted = 0, 1
        """Last counted position and its line."""
        self._elements: dict[str, int] = {}
        """Index of the latest table of each list of tables."""
        self.places: dict[str, int] = {}
        table = ""
        while self._skip_blanks():
            at = self._position
            if self._text.startswith("[", at):
                table = self._header()
            else:
                self._scan_pair(table)
            if self._position == at:  # Not TOML.
                return

    def _skip_blanks(self) -> bool:
        """Skip blanks and comments. Return False at the end of the text."""
        blank = _BLANK.match(self._text, self._position)
        self._position = blank.end() if blank else self._position
        return self._position < len(self._text)

    def _line(self, offset: int) -> int:
        counted_offset, line = self._counted
        line += self._text.count("\n", counted_offset, offset)
        self._counted = offset, line
        return line

    def _record_line(self, place: str, offset: int) -> None:
        self.places.setdefault(place, self._line(offset))

    def _header(self) -> str:
        """Scan `[a.b]` or `[[a.b]]` and return the place of its keys."""
        start = self._position
        is_element = self._text.startswith("[[", start)
        self._position += 1 + is_element
        names = self._scan_key()
        self._position += 1 + is_element
        place = ""
        for name in names[:-1]:
            place = self._below(place, name)
            self._record_line(place, start)
        place = _joined(place, names[-1]) if names else place
        self._record_line(place, start)
        if not is_element:
            return self._latest(place)
        number = self._elements[place] = self._elements.get(place, -1) + 1
        self._record_line(f"{place}[{number}]", start)
        return f"{place}[{number}]"

    def _below(self, place: str, name: str) -> str:
        return self._latest(_joined(place, name))

    def _latest(self, place: str) -> str:
        return f"{place}[{self._elements[place]}]" if place in self._elements else place

    def _scan_pair(self, table: str) -> None:
        """Scan `key = value`."""
        start, place = self._position, table
        for name in self._scan_key():
            place = _joined(place, name)
            self._record_line(place, start)
        if self._skip_blanks() and self._text[self._position] == "=":
            self._position += 1
            self._scan_value(place)

    def _scan_key(self) -> list[str]:
        """Scan a dotted key and return its names."""
        names = []
        while self._skip_blanks():
            match = _STRING.match(self._text, self._position) or _BARE_KEY.match(
                self._text, self._position
            )
            if match is None:
                break
            names.append(_decode_key(match[0]))
            self._position = match.end()
            if not self._skip_blanks() or self._text[self._position] != ".":
                break
            self._position += 1
        return names

    def _scan_value(self, place: str) -> None:
        if not self._skip_blanks():
            return
        opening = self._text[self._position]
        if opening in "[{":
            self._position += 1
            self._scan_elements(place, "]" if opening == "[" else "}")
            return
        match = _STRING.match(self._text, self._position) or _WORD.match(self._text, self._position)
        self._position = match.end() if match else self._position

    def _scan_elements(self, place: str, end: str) -> None:
        """Scan the elements of a list or inline table, and its end."""
        index = 0
        while self._skip_blanks() and self._text[self._position] != end:
            start = self._position
            if self._text[start] == ",":
                self._position += 1
            elif end == "}":
                self._scan_pair(place)
            else:
                self._record_line(f"{place}[{index}]", start)
                self._scan_value(f"{place}[{index}]")
                index += 1
            if self._position == start:
                return
        self._position += 1


def _joined(place: str, name: str) -> str:
    name = name.replace("-", "_")
    return f"{place}.{name}" if place else name


def _decode_key(name: str) -> str:
    """Return the name that a quoted or bare key stands for."""
    if name[0] not in "\"'":
        return name
    try:
        return str(tomllib.loads(f"name = {name}")["name"])
    except tomllib.TOMLDecodeError:
        return name
