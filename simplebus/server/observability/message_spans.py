"""Selection of messages of which a server makes spans.

Only messages whose ack latency is measured are considered, and at most ten a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from simplebus.core.errors import BusError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol import envelope_batch, frames

_INTERVAL_SECONDS = 0.1
"""Minimum time between two messages that are considered."""
_CONTEXT_HEADER = "traceparent"


class SpanRecorder(Protocol):
    """Recorder of spans. `simplebus.otel.server_spans` implements it with OpenTelemetry."""

    def record_delivery(
        self, class_name: str, sequence: int, headers: Mapping[str, str], seconds: float
    ) -> None:
        """Make a span of a message that all positions have acknowledged now.

        Args:
            class_name: Name or id of the class.
            sequence: Sequence of the message.
            headers: Headers of the message, with the context of its publisher.
            seconds: Time since the message was accepted.
        """


class MessageSpans:
    """Selector of messages with a trace context, whose spans a recorder makes."""

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        self._last_at = float("-inf")

    def record(self, cls: MessageClass, now: float) -> None:
        """Make a span of the probe of a class, if the message has a trace context."""
        sequence, ring = cls.probe_sequence, cls.ring
        is_stored = ring.floor <= sequence < ring.head
        if now - self._last_at < _INTERVAL_SECONDS or not is_stored:
            return
        self._last_at = now
        frame = ring.copy_frame(sequence)
        if frame[0] != frames.ENVELOPE:
            return
        try:
            envelope, _ = envelope_batch.decode(frame[HEADER_BYTES:-DELIMITER_BYTES])
        except BusError:
            return
        headers = dict(envelope.headers)
        if _CONTEXT_HEADER in headers:
            seconds = now - cls.probe_accepted_at
            self._recorder.record_delivery(
                cls.name or str(cls.class_id), sequence, headers, seconds
            )
