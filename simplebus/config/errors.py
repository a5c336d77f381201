"""How mistakes in a configuration file are told: where, what came, what was expected.

Rule 1: all of them at once. Who finds one says so and goes on with what does not depend on it.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

MESSAGES_MAX = 100
"""So many are told at once."""


class ConfigError(ValueError):
    """The file cannot be used; says where and why, a sentence for each mistake."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.messages = mistakes


class ErrorCollector:
    """Those that were found so far."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """What is wrong in this block ends it, and nothing else."""
        try:
            yield
        except ConfigError as error:
            self.messages.extend(error.messages)

    def raise_if_any(self) -> None:
        """Raise ConfigError if there are any."""
        if self.messages:
            raise ConfigError(*dict.fromkeys(self.messages))


def check_unique_names(given: Iterable[str], where: str) -> None:
    """Raise ConfigError for a name that is there with `-` and with `_`."""
    seen: dict[str, str] = {}
    for name in given:
        other = seen.setdefault(name.replace("-", "_"), name)
        if other != name:
            raise ConfigError(f"{where}: {other!r} and {name!r} are the same, expected either")


def describe_toml_error(path: Path, complaint: str) -> str:
    """What tomllib says, with the line in its place."""
    found = re.fullmatch(r"(?s)(.*) \(at line (\d+), column (\d+)\)", complaint)
    if found is None:
        return f"{path}: is no TOML: {complaint}"
    return f"{path}:{found[2]}: is no TOML: {found[1]}, in column {found[3]}"


def suggest_name(word: str, known: Iterable[str]) -> str:
    """Which of these was meant, as the end of a sentence; empty for none."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


_INVALID = re.compile(r"'.*' is not (?P<expected>a valid \w+)\..*", re.DOTALL)
"""Error of typer before 0.29; later versions say `Input should be a valid integer`."""
_CHOICE = re.compile(r"(?P<word>.*) is not one of (?P<known>'.*')\.?")


def describe_value_error(complaint: str, value: object) -> str:
    """Why a value of an option is none, from what typer says of it."""
    what = complaint.removeprefix("Value error, ")
    invalid = _INVALID.fullmatch(what)
    if invalid or what.startswith("Input should be "):
        meant = what.partition(",")[0].removeprefix("Input should be ")
        if invalid:
            meant = invalid["expected"]
        meant = {"a valid boolean": "true or false"}.get(meant, meant)
        return f"it should be {meant}, got {value!r}"
    if found := _CHOICE.fullmatch(what):
        return what.removesuffix(".") + suggest_name(str(value), re.findall("'(.*?)'", found["known"]))
    return what


def describe_unknown_name(name: str, known: Iterable[str], where: str) -> str:
    """That a name is none, and which one may have been meant, in the way that name is written."""
    sign = "_" if "_" in name else "-"
    names = {each: each.replace("_", sign) for each in known}
    near = difflib.get_close_matches(name.replace("-", "_"), list(names), n=1)
    meant = (
        f"did you mean {names[near[0]]!r}?"
        if near
        else f"there are {', '.join(sorted(names.values()))}"
    )
    return f"{where + ': ' if where else ''}{name!r} is unknown; {meant}"
