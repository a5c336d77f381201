"""Errors in configuration files, and their texts.

A check that finds an error adds it to an `ErrorCollector` and continues, so that all errors of a
file are reported at once.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

MESSAGES_MAX = 100
"""Maximum number of errors to report at once."""


class ConfigError(ValueError):
    """Invalid configuration; `messages` has one sentence per error."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.messages = mistakes


class ErrorCollector:
    """Errors found so far."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Add a ConfigError of this block to the messages, and continue after the block."""
        try:
            yield
        except ConfigError as error:
            self.messages.extend(error.messages)

    def raise_if_any(self) -> None:
        """Raise ConfigError with all messages, if there are any."""
        if self.messages:
            raise ConfigError(*dict.fromkeys(self.messages))


def check_unique_names(given: Iterable[str], where: str) -> None:
    """Raise ConfigError if a name is given both with `-` and with `_`."""
    seen: dict[str, str] = {}
    for name in given:
        other = seen.setdefault(name.replace("-", "_"), name)
        if other != name:
            raise ConfigError(f"{where}: {other!r} and {name!r} are the same, expected either")


def describe_toml_error(path: Path, complaint: str) -> str:
    """Return tomllib's error message with the file and line in front."""
    found = re.fullmatch(r"(?s)(.*) \(at line (\d+), column (\d+)\)", complaint)
    if found is None:
        return f"{path}: is not TOML: {complaint}"
    return f"{path}:{found[2]}: is not TOML: {found[1]}, in column {found[3]}"


def suggest_name(word: str, known: Iterable[str]) -> str:
    """Return a "did you mean" suffix with the most similar name; empty without one."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


_INVALID = re.compile(r"'.*' is not (?P<expected>a valid \w+)(?: range)?\..*", re.DOTALL)
"""Error of typer before 0.29; later versions write `Input should be a valid integer`."""
_CHOICE = re.compile(r"(?P<word>.*) is not one of (?P<known>'.*')\.?")


def describe_value_error(complaint: str, value: object) -> str:
    """Return why an option value is invalid, from typer's error message."""
    what = complaint.removeprefix("Value error, ")
    invalid = _INVALID.fullmatch(what)
    if invalid or what.startswith("Input should be "):
        meant = what.partition(",")[0].removeprefix("Input should be ")
        if invalid:
            meant = invalid["expected"]
        meant = {"a valid boolean": "true or false"}.get(meant, meant)
        return f"it should be {meant}, got {value!r}"
    if found := _CHOICE.fullmatch(what):
        return what.removesuffix(".") + suggest_name(
            str(value), re.findall("'(.*?)'", found["known"])
        )
    return what


def describe_unknown_name(name: str, known: Iterable[str], where: str) -> str:
    """Return that a name is unknown, with the most similar or all known names."""
    sign = "_" if "_" in name else "-"
    names = {each: each.replace("_", sign) for each in known}
    near = difflib.get_close_matches(name.replace("-", "_"), list(names), n=1)
    meant = (
        f"did you mean {names[near[0]]!r}?"
        if near
        else f"there are {', '.join(sorted(names.values()))}"
    )
    return f"{where + ': ' if where else ''}{name!r} is unknown; {meant}"
