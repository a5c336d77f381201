"""Reading of files that another program may be writing.

A truncated TOML file can be valid and grant more than the complete file. A file is therefore read
only if it has not changed for a while, before and during reading.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from simplebus.config.errors import ConfigError

T = TypeVar("T")

STABLE_SECONDS = 0.5
"""Time without changes after which a file counts as complete."""
_TRIES_MAX = 20


def read_when_stable(
    read: Callable[[], T],
    paths: Sequence[Path],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `read` while no program writes to `paths`, and return its result.

    Blocks for up to some seconds, so call it in a thread.

    Raises:
        ConfigError: If the files keep changing, or `read` raises it.
    """
    for _ in range(_TRIES_MAX):
        states = [*map(_file_state, paths)]
        age = min((clock() - changed for changed, _, _ in states), default=STABLE_SECONDS)
        if age < STABLE_SECONDS:
            sleep(STABLE_SECONDS - max(0.0, age))
            if age >= 0:  # A time in the future cannot become older by waiting.
                continue
        try:
            result = read()
        except ConfigError:
            if [*map(_file_state, paths)] == states:
                raise
            continue
        if [*map(_file_state, paths)] == states:
            return result
    raise ConfigError(
        f"{', '.join(map(str, paths))}: the file keeps changing; expected no change for "
        f"{STABLE_SECONDS:g} seconds"
    )


def _file_state(path: Path) -> tuple[float, int, int]:
    """Return the modification time, size and inode of a file; zeros for a missing file."""
    try:
        status = os.stat(path)
    except OSError:
        return 0.0, 0, 0
    return status.st_mtime, status.st_size, status.st_ino
