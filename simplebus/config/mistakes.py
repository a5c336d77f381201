"""How mistakes in a configuration file are told: where, what came, what was expected.

Rule 1: all of them at once. Who finds one says so and goes on with what does not depend on it.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

MISTAKES_MAX = 100
"""So many are told at once."""


class ConfigError(ValueError):
    """The file cannot be used; says where and why, a sentence for each mistake."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class Mistakes:
    """Those that were found so far."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """What is wrong in this block ends it, and nothing else."""
        try:
            yield
        except ConfigError as error:
            self.found.extend(error.mistakes)

    def check(self) -> None:
        """Raise ConfigError if there are any."""
        if self.found:
            raise ConfigError(*dict.fromkeys(self.found))


def once(given: Iterable[str], where: str) -> None:
    """Raise ConfigError for a name that is there with `-` and with `_`."""
    seen: dict[str, str] = {}
    for name in given:
        other = seen.setdefault(name.replace("-", "_"), name)
        if other != name:
            raise ConfigError(f"{where}: {other!r} and {name!r} are the same, expected either")


def no_toml(path: Path, complaint: str) -> str:
    """What tomllib says, with the line in its place."""
    found = re.fullmatch(r"(?s)(.*) \(at line (\d+), column (\d+)\)", complaint)
    if found is None:
        return f"{path}: is no TOML: {complaint}"
    return f"{path}:{found[2]}: is no TOML: {found[1]}, in column {found[3]}"


def unknown(name: str, known: Iterable[str], where: str) -> str:
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
