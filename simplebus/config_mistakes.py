"""How mistakes in a configuration file are told: what came, where, what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """The file cannot be used; says where and why."""


def once(given: Iterable[str], where: str) -> None:
    """Raise ConfigError for a name that is there with `-` and with `_`."""
    seen: dict[str, str] = {}
    for name in given:
        other = seen.setdefault(name.replace("-", "_"), name)
        if other != name:
            raise ConfigError(f"{where}: {other!r} and {name!r} are the same, expected either")


def unknown(name: str, known: Iterable[str], where: str) -> str:
    """That a name is none, and which one may have been meant."""
    near = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1)
    meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
    return f"{where + ': ' if where else ''}{name!r} is unknown; {meant}"
