"""What goes wrong beside a program's calls, kept until it leaves the bus.

Rule 1: everything is in the log at once. What is raised at the end is bounded, and says how much
there was.
"""

from __future__ import annotations

import logging

from simplebus.client.request_reply import Handler

log = logging.getLogger("simplebus.client")

_ERRORS_MAX = 100


class HandlerErrors:
    """What handlers raised, and how often."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []
        self._count = 0

    def add(self, handler: Handler, what: object, error: Exception) -> None:
        """A handler has failed."""
        log.error("handler %r failed on %s", handler, what, exc_info=error)
        self._count += 1
        if len(self._errors) < _ERRORS_MAX:
            self._errors.append(error)

    def to_exception_group(self) -> ExceptionGroup[Exception] | None:
        """What is raised at the end, if anything."""
        if not self._errors:
            return None
        times = f"{self._count} time{'' if self._count == 1 else 's'}"
        return ExceptionGroup(f"handlers failed {times}", self._errors)


def raise_errors(*problems: Exception | None) -> None:
    """Raise what there is: itself if it is alone."""
    found = [problem for problem in problems if problem is not None]
    if len(found) == 1:
        raise found[0]
    if found:
        raise ExceptionGroup("several things went wrong on the bus", found)
