"""Errors of handlers that are traced."""

from __future__ import annotations

from simplebus.client.handler_errors import HandlerErrors
from simplebus.client.request_reply import Handler
from simplebus.client.tracing.interface import Tracing


class TracedHandlerErrors(HandlerErrors):
    """Errors of handlers, also recorded in their spans."""

    def __init__(self, tracing: Tracing) -> None:
        super().__init__()
        self._tracing = tracing

    def add(self, handler: Handler, message: object, error: Exception) -> None:
        """Log and record an exception that a handler raised."""
        self._tracing.record_error(error)
        super().add(handler, message, error)
