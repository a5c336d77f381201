"""Errors of message handlers, logged at once and raised when the bus is left."""

from __future__ import annotations

from simplebus.client.request_reply import Handler
from simplebus.logs.event_logger import EventLogger
from simplebus.logs.sampling import is_logged

log = EventLogger("simplebus.client")

_ERRORS_MAX = 100


class HandlerErrors:
    """Errors of the handlers of one bus. The first 100 are kept, all are counted.

    A handler's first three errors are logged, then each time that their number has doubled.
    """

    def __init__(self) -> None:
        self._counts_by_handler: dict[Handler, int] = {}
        self._errors: list[Exception] = []
        self._count = 0

    def add(self, handler: Handler, message: object, error: Exception) -> None:
        """Log and record an exception that a handler raised."""
        count = self._counts_by_handler[handler] = self._counts_by_handler.get(handler, 0) + 1
        if is_logged(count):
            log.error(
                "handler.failed",
                "handler {handler!r} failed on {received}; failure {failure_count}",
                handler=handler,
                received=message,
                failure_count=count,
                exc_info=error,
            )
        self._count += 1
        if len(self._errors) < _ERRORS_MAX:
            self._errors.append(error)

    def to_exception_group(self) -> ExceptionGroup[Exception] | None:
        """Return the recorded errors as one exception; None if no error was recorded."""
        if not self._errors:
            return None
        count_text = f"{self._count} time{'' if self._count == 1 else 's'}"
        return ExceptionGroup(f"handlers failed {count_text}", self._errors)


def raise_errors(*possible_errors: Exception | None) -> None:
    """Raise the errors that are not None: a single error directly, several as an ExceptionGroup."""
    errors = [error for error in possible_errors if error is not None]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("several errors on the bus", errors)
