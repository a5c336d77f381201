"""Interface of distributed tracing. `simplebus.otel` implements it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from simplebus.client.core.messages import Message
from simplebus.client.message_builder import Headers


class Tracing(Protocol):
    """Spans around the operations of a client."""

    def publish(
        self,
        destination: str,
        headers: Headers | None,
        *,
        operation: str = "publish",
        message_count: int | None = None,
    ) -> AbstractContextManager[Headers]:
        """Return a span around a publishing call. It yields the headers of the messages.

        Args:
            destination: Name or id of the class; empty for several classes.
            headers: Headers that the program has given.
            operation: "publish" or "request".
            message_count: Number of messages of a batch; None for a single message.
        """

    def receive(self, destination: str, messages: Iterable[Message[Any]]) -> None:
        """Record that messages were delivered to the program."""

    def process(
        self, message: Message[Any], destination: str = ""
    ) -> AbstractContextManager[object]:
        """Return a span around the processing of a message."""

    def record_error(self, error: Exception) -> None:
        """Record an error that a handler raised, in the present span."""
