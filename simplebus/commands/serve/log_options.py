"""The options that say what is logged, and how.

Rule 1: nothing heavy is imported here, so that help is instant.
"""

from __future__ import annotations

from typing import Annotated

from simplebus.config.parse import LogFormat, LogLevel, option

Level = Annotated[
    LogLevel,
    option(
        "--log-level",
        "Log on standard error from this level up: debug, info, warning or error.",
        metavar="LEVEL",
    ),
]
Format = Annotated[
    LogFormat,
    option(
        "--log-format",
        "How an event is logged: as a line of text, or as a JSON object on a line. What goes "
        "straight to systemd's journal has its priority in front, and no time.",
        metavar="FORMAT",
    ),
]
