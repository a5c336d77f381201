"""Subscription of one session: sends the messages of a position through the session's outbox."""

from __future__ import annotations

from simplebus.core.outbox import Outbox
from simplebus.core.subscription.position import Position


class BrokerSubscription:
    """Attachment of a session to a position, as a `SendSource` of the session's outbox.

    It exists while the session is attached; a durable's position stays without it.
    """

    def __init__(
        self, position: Position, outbox: Outbox, subscription_number: int, request_number: int = 0
    ) -> None:
        """Create a subscription.

        Args:
            position: Position that it sends from.
            outbox: Outbox of the session.
            subscription_number: Number chosen by the peer.
            request_number: Number of the Subscribe request.
        """
        self.position = position
        self.outbox = outbox
        self.class_id = position.class_id
        self.window = position.window
        self.subscription_number = subscription_number
        self.request_number = request_number
        self.is_queued = False
        self.attempt = 1
        self.scanned_count = 0
        self._peeked_end = position.window.cursor

    @property
    def has_frames_to_copy(self) -> bool:
        return self.position.has_frames_to_copy

    @property
    def has_work(self) -> bool:
        return self.position.has_work

    def copy_frames(self, tick: int) -> bytes:
        copied = self.position.copy_frames(tick, self.outbox.piece_messages_max)
        self.scanned_count, self.attempt = self.position.scanned_count, copied.attempt
        return b"".join(copied.parts)

    def peek_frames(self, tick: int) -> memoryview:
        piece, self._peeked_end = self.position.view_run(tick, self.outbox.piece_messages_max)
        self.attempt = 1
        return piece

    def mark_sent(self, piece: memoryview, sent_bytes: int, tick: int) -> bytes:
        position, last, frame_remainder = self.position, self._peeked_end, b""
        if sent_bytes < len(piece):
            last, missing = position.ring.locate_cut(self.window.cursor, last, sent_bytes)
            if missing:
                frame_remainder = bytes(piece[sent_bytes : sent_bytes + missing])
                last += 1
        if self.window.cursor < last:
            position.mark_sent(last, tick)
        return frame_remainder

    def has_in_flight(
        self, first: int, last: int, attempt: int, *, include_waiting: bool = False
    ) -> bool:
        """Return True if any of first..last-1 is in flight."""
        return self.position.unacked.has_in_flight(
            first, last, attempt, include_waiting=include_waiting
        )

    @property
    def has_other_members(self) -> bool:
        """True if other subscriptions share its position: never, as it has no group."""
        return False

    def find_part_end(self, first: int, last: int, attempt: int) -> int:
        """Return the end of the front of first..last-1 that one turn can process."""
        return self.position.unacked.find_part_end(first, last, attempt)

    def nack(
        self,
        first: int,
        last: int,
        delay_seconds: float | None,
        tick: int,
        *,
        attempt: int = 0,
        error: str = "",
    ) -> None:
        """Reject messages of first..last-1 that are in flight. See `Position.nack`."""
        self.position.nack(first, last, delay_seconds, tick, attempt=attempt, error=error)

    def terminate(self, first: int, last: int, *, attempt: int = 0, error: str = "") -> None:
        """Give up messages of first..last-1. See `Position.terminate`."""
        self.position.terminate(first, last, attempt=attempt, error=error)

    def extend_ack_timeout(self, first: int, last: int, tick: int, attempt: int = 0) -> None:
        """Restart the ack timeout of first..last-1."""
        self.position.unacked.extend_ack_timeout(first, last, tick, attempt)

    def limit_messages(self, count: int) -> None:
        """Send at most `count` more messages."""
        self.position.limit_messages(count)
        self.resume_delivery()

    def resume_delivery(self) -> None:
        """Continue to send, after messages were acknowledged or rejected."""
        if not self.is_queued and self.position.has_work:
            self.outbox.enqueue(self)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the subscription is queued while there is work."""
        assert self.is_queued or not self.has_work, "a subscription with messages is not queued"
