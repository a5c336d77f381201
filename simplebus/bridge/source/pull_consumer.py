"""Pull requests to one consumer of a stream.

More messages are requested when few are under request and few wait to be read. The limit also
counts bytes, because a server closes a connection with more unread bytes than it buffers. A
consumer numbers its deliveries. After a gap (a lost message, or a new leader with older state)
nothing more is accepted from it.
"""

from __future__ import annotations

import numpy as np

from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamDeliveries
from simplebus.net.nats_connection import new_inbox

PULL_MESSAGES = 8192
PULL_BYTES = 8 * 1024 * 1024
"""Bytes per request. Half as much more can be under request, and more for a longer message; servers
buffer 64 MiB per connection by default.
"""
_PULL_SECONDS = 30.0
_HEARTBEAT, _NO_MESSAGES, _TIMED_OUT = 100, 404, 408
_MESSAGE_TOO_LONG = "message size exceeds maxbytes"
"""Status text if the next message is longer than the requested bytes."""


class PullConsumer:
    """Pull requests to a consumer that no other client uses."""

    def __init__(
        self,
        connection: BridgeNatsConnection,
        stream: str,
        consumer: str,
        *,
        delivered_count: int,
        pending: int,
        heartbeat_seconds: float,
        batch_max: int = 0,
    ) -> None:
        """Create the requests for a consumer.

        Args:
            delivered_count: Number of messages that the consumer delivered before.
            pending: Number of messages that it can deliver.
            heartbeat_seconds: Interval of the consumer's heartbeats.
            batch_max: Largest number of messages per request; 0 for no limit.
        """
        self._core = connection.core
        self._stream, self._consumer = stream, consumer
        self._delivered_count = delivered_count
        self.pending = pending
        """Messages after the last one received."""
        self._heartbeat_seconds = heartbeat_seconds
        self._batch_max = min(batch_max or PULL_MESSAGES, PULL_MESSAGES)
        self._batch_bytes_max = PULL_BYTES
        self._requested_count = self._requested_bytes = 0
        """Messages and bytes under request. The bytes are an estimate."""
        self._last_request_bytes = 0
        """Bytes of the last request."""
        self._end_reason = ""
        """Reason why nothing more is accepted; empty while messages are."""
        self._inbox = new_inbox()
        self._sid = connection.core.subscribe(self._inbox)

    def close(self) -> None:
        """Unsubscribe. Later messages are dropped."""
        self._core.unsubscribe(self._sid)

    def request_more(self) -> None:
        """Request more messages if few are under request. The caller flushes the connection."""
        if (
            self._requested_count * 2 > self._batch_max
            and self._requested_bytes * 2 > self._batch_bytes_max
        ):
            return
        count = max(self._batch_max - self._requested_count, self._batch_max // 2, 1)
        size = max(self._batch_bytes_max - self._requested_bytes, self._batch_bytes_max // 2)
        request = jetstream_codec.pull_request(
            batch=count,
            expires_seconds=_PULL_SECONDS,
            idle_seconds=min(self._heartbeat_seconds, _PULL_SECONDS / 2),
            max_bytes=size,
        )
        subject = f"{jetstream_codec.API}CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        self._core.publish(subject, request, reply=self._inbox)
        self._requested_count += count
        self._requested_bytes += size
        self._last_request_bytes = size

    def accept(self, messages: ReceivedMessages) -> JetStreamDeliveries:
        """Return the deliveries of this consumer among `messages`, in its order."""
        deliveries = jetstream_codec.parse_deliveries(messages.pick(messages.sids == self._sid))
        if not deliveries.good.all():
            for row in np.flatnonzero(~deliveries.good).tolist():
                self._on_status(deliveries.messages.headers(row))
            deliveries = deliveries.pick(deliveries.good)
        count = deliveries.messages.count
        if count:
            self._reduce_requested(count, _wire_sizes(deliveries.messages))
            last = np.arange(count) == count - 1
            self.pending = int(deliveries.pick(last).pending[0])
            expected = self._delivered_count + np.arange(1, count + 1)
            if (deliveries.counts != expected).any():
                self._end_reason = self._end_reason or "a delivery is missing"
            self._delivered_count += count
        return deliveries.pick(np.zeros(count, np.bool_)) if self._end_reason else deliveries

    def _on_status(self, headers: bytes) -> None:
        """Handle a status message, which ends a request unless it is a heartbeat."""
        code, words = jetstream_codec.parse_status(headers)
        is_too_long = words.lower() == _MESSAGE_TOO_LONG
        if code in (_HEARTBEAT, _NO_MESSAGES, _TIMED_OUT):
            self.pending = 0  # Messages that were pending before have been removed.
        elif code and not is_too_long and not jetstream_codec.is_normal_end(code, words):
            self._end_reason = f"{code} {words}".strip()
        if code != _HEARTBEAT:
            count, size = (
                jetstream_codec.parse_pending_messages(headers),
                jetstream_codec.parse_pending_bytes(headers),
            )
            self._reduce_requested(count, size)
            # Otherwise the message would never be delivered.
            if is_too_long and size >= self._last_request_bytes:
                self._batch_bytes_max *= 2

    def _reduce_requested(self, count: int, size: int) -> None:
        """Subtract delivered messages and bytes from those under request.

        A request that was served completely ends without a status message. Its unused bytes are
        known to be free only when nothing is under request.
        """
        self._requested_count = max(0, self._requested_count - count)
        self._requested_bytes = max(0, self._requested_bytes - size) if self._requested_count else 0

    def check(self) -> None:
        """Raise BusConnectionError if nothing more is accepted, so that the copier starts again."""
        if self._end_reason:
            raise BusConnectionError(
                f"the consumer {self._consumer!r} of stream {self._stream!r} has ended: "
                f"{self._end_reason}"
            )


def _wire_sizes(messages: ReceivedMessages) -> int:
    """Return the bytes of messages as a server counts them. Another measure would make the
    estimate drift.
    """
    subjects = messages.subject_ends - messages.subjects
    replies = np.maximum(messages.reply_ends - messages.replies, 0)
    return int((subjects + replies + messages.ends - messages.bodies).sum())
