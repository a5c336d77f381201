"""Loggers whose records have an event name and named values.

The standard library is used, not structlog: applications that use the client see ordinary records,
with the values as attributes, and a call reads the same in both.
"""

from __future__ import annotations

import logging
from typing import Any

Logger = logging.Logger | logging.LoggerAdapter[Any]


class EventLogger:
    """Logger of events.

        log = EventLogger("simplebus.server")
        log.warning("connection.closed", "{peer}: disconnected: {reason}", peer=peer, reason=reason)

    The record has the attributes `event`, `peer` and `reason`, and the formatted sentence as its
    message. A disabled level costs one dictionary lookup.
    """

    def __init__(self, logger: str | Logger) -> None:
        """Log to the logger with this name, or to this logger."""
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger

    def debug(self, event: str, sentence: str, /, **values: object) -> None:
        """Log an event that helps to analyse a problem; see `log`."""
        if self._logger.isEnabledFor(logging.DEBUG):
            self._emit(logging.DEBUG, event, sentence, None, values)

    def info(self, event: str, sentence: str, /, **values: object) -> None:
        """Log an event of normal operation; see `log`."""
        if self._logger.isEnabledFor(logging.INFO):
            self._emit(logging.INFO, event, sentence, None, values)

    def warning(
        self,
        event: str,
        sentence: str,
        /,
        *,
        exc_info: BaseException | bool | None = None,
        **values: object,
    ) -> None:
        """Log an event that concerns an operator; see `log`."""
        if self._logger.isEnabledFor(logging.WARNING):
            self._emit(logging.WARNING, event, sentence, exc_info, values)

    def error(
        self,
        event: str,
        sentence: str,
        /,
        *,
        exc_info: BaseException | bool | None = None,
        **values: object,
    ) -> None:
        """Log a failure; see `log`."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._emit(logging.ERROR, event, sentence, exc_info, values)

    def exception(self, event: str, sentence: str, /, **values: object) -> None:
        """Log a failure with the traceback of the exception that is being handled; see `log`."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._emit(logging.ERROR, event, sentence, True, values)

    def log(self, level: int, event: str, sentence: str, /, **values: object) -> None:
        """Log an event.

        Args:
            level: Level of the standard library, such as `logging.INFO`.
            event: Name of the kind of event: a subject and a participle, as "connection.closed".
            sentence: Format string for people, with the names of values in braces.
            values: Values, as attributes of the record and fields of JSON lines. `is_unlimited` is
                not a field: if True, the event is exempt from `LogRateLimit`.
        """
        if self._logger.isEnabledFor(level):
            self._emit(level, event, sentence, None, values)

    def _emit(
        self,
        level: int,
        event: str,
        sentence: str,
        exc_info: BaseException | bool | None,
        values: dict[str, object],
    ) -> None:
        self._logger.log(
            level,
            sentence.format_map(values),
            exc_info=exc_info,
            extra={"event": event, **values},
            stacklevel=3,  # The caller of `info`, `warning`, ...
        )
