"""TOML files: reading, and the locations of errors in them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simplebus.config.errors import ConfigError, limit_messages
from simplebus.config.toml_lines import find_line, locate_keys
from simplebus.core import toml

_BYTES_MAX = 4 << 20
_MISTAKE = re.compile(r"(?s)(.*) \(at line (\d+), column (\d+)\)")


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
