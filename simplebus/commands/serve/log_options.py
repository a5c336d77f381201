"""Options for the log level and format."""

from __future__ import annotations

from typing import Annotated

from simplebus.config.parse import LogFormat, LogLevel, option

Level = Annotated[
    LogLevel,
    option(
        "--log-level",
        "Lowest level of events to log on standard error: debug, info, warning or error.",
        metavar="LEVEL",
    ),
]
Format = Annotated[
    LogFormat,
    option(
        "--log-format",
        "Format of a log event: a line of text (text) or a JSON object on one line (json). Lines "
        "for the systemd journal begin with their priority and have no time.",
        metavar="FORMAT",
    ),
]
