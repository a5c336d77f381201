"""Files that may be written at this moment: what is read of them is whole.

Rule 1: what was cut off in the middle may be good TOML, and mean more than was meant: a file is
taken when nobody has changed it for a while, before and while it was read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from simplebus.config.mistakes import ConfigError

T = TypeVar("T")

REST_SECONDS = 0.5
"""So long nobody has changed it."""
_TRIES_MAX = 20


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file as it was; all 0 for one that is not there, of which others tell."""

    changed: float = 0.0
    bytes: int = 0
    inode: int = 0


def read_at_rest(
    read: Callable[[], T],
    paths: Sequence[Path],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What this reads of these files, when nobody writes them. Raises what it raises, and
    ConfigError where they are changed all the time. May take some seconds: have a thread do it."""
    for _ in range(_TRIES_MAX):
        before = _all_of(paths)
        youngest = min((clock() - seen.changed for seen in before), default=REST_SECONDS)
        if youngest < REST_SECONDS:
            sleep(REST_SECONDS - max(0.0, youngest))
            if youngest >= 0:  # Of the future there is no telling how old it is.
                continue
        error: ConfigError | None = None
        try:
            found = read()
        except ConfigError as mistake:
            error = mistake
        if _all_of(paths) == before:
            if error is not None:
                raise error
            return found
    raise ConfigError(f"{', '.join(map(str, paths))}: changed all the time, expected to be at rest")


def _all_of(paths: Sequence[Path]) -> list[_Seen]:
    return [_seen(path) for path in paths]


def _seen(path: Path) -> _Seen:
    try:
        found = os.stat(path)
    except OSError:
        return _Seen()
    return _Seen(found.st_mtime, found.st_size, found.st_ino)
