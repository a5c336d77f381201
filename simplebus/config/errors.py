"""Errors in configuration files, and their texts.

A check that finds an error adds it to an `ErrorCollector` and continues, so that all errors of a
file are reported at once.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence

MESSAGES_MAX = 100
"""Maximum number of errors to report at once."""
_MESSAGE_CHARACTERS_MAX = 500


class ConfigError(ValueError):
    """Invalid configuration; `messages` has one sentence per error."""

    def __init__(self, *messages: str) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages


class ErrorCollector:
    """Errors found so far."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextlib.contextmanager
    def collect(self, path: str = "") -> Iterator[None]:
        """Add an error of this block to the messages, and continue after the block.

        `path` is the key of a ValueError; a ConfigError names its keys itself.
        """
        try:
            yield
        except ConfigError as error:
            self.messages.extend(error.messages)
        except ValueError as error:
            self.messages.append(f"{path}: {shorten(str(error))}")

    def raise_if_any(self) -> None:
        """Raise ConfigError with all messages, if there are any."""
        if self.messages:
            raise ConfigError(*dict.fromkeys(self.messages))


def find_repeated_names(names: Iterable[str], table: str) -> Iterator[str]:
    """Yield an error for each name that is given both with `-` and with `_`."""
    seen: dict[str, str] = {}
    for name in names:
        earlier_name = seen.setdefault(name.replace("-", "_"), name)
        if earlier_name != name:
            yield f"{table}: {earlier_name!r} and {name!r} are the same, expected either"


def shorten(message: str) -> str:
    """Return an error message, cut to a limited length: it may contain a long value."""
    if len(message) <= _MESSAGE_CHARACTERS_MAX:
        return message
    half = _MESSAGE_CHARACTERS_MAX // 2
    return f"{message[:half]}…{message[-half:]}"


def limit_messages(messages: Sequence[str]) -> tuple[str, ...]:
    """Return the first messages, and how many there are more."""
    more = len(messages) - MESSAGES_MAX
    omitted = [f"there are {more} more errors"] if more > 0 else []
    return (*messages[:MESSAGES_MAX], *omitted)


def suggest_name(word: str, names: Iterable[str]) -> str:
    """Return a "did you mean" suffix with the most similar name; empty without one."""
    matches = difflib.get_close_matches(word.lower(), list(names), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def describe_unknown_name(name: str, known_names: Iterable[str], table: str) -> str:
    """Return that a name is unknown, with the most similar or all known names."""
    separator = "_" if "_" in name else "-"
    names = {known_name: known_name.replace("_", separator) for known_name in known_names}
    matches = difflib.get_close_matches(name.replace("-", "_"), list(names), n=1)
    hint = (
        f"did you mean {names[matches[0]]!r}?"
        if matches
        else f"there are {', '.join(sorted(names.values()))}"
    )
    return f"{table + ': ' if table else ''}{name!r} is unknown; {hint}"
