"""Send queue of a client: acks first, then requests and published messages in order.

Acks overtake everything else, because a server that waits for acks may not read on. They are never
reordered among themselves or placed inside a frame. Requests overtake only messages that wait for
credit, so a publisher without credit can still subscribe.

    priority frames   │ rest of a begun frame │ acks │ acks …
    frame queue       │ published frames │ a request │ published frames …

A batch in the frame queue is split where acks are inserted.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from simplebus.client.core.acks import AckSink
from simplebus.client.core.publish_batch import PublishBatch
from simplebus.core.protocol import frames

# A batch up to this length is sent in one write with the acks before it.
_JOIN_BYTES_MAX = 16 * 1024

_EMPTY = memoryview(b"")
_HEARTBEAT = frames.encode(frames.HEARTBEAT)


class OutgoingFrames(Protocol):
    """Source of published messages."""

    @property
    def unreleased_bytes(self) -> int:
        """Bytes that were not released."""

    @property
    def has_unreleased(self) -> bool:
        """True if any messages were not released."""

    @property
    def released_position(self) -> int:
        """All messages below this position were released."""

    def release_batch(self) -> PublishBatch | None:
        """Return the next frames; None if none may be sent now."""

    def require_credit(self) -> bool:
        """Return True, once, if frames wait for credit, so that a Heartbeat must request it."""


class SendQueue:
    """Bytes that wait to be sent to the server.

    The driver sends the bytes that `peek` returns and reports them with `mark_sent`.
    """

    def __init__(self, source: OutgoingFrames) -> None:
        self.ack_sink = AckSink()
        self.is_open = False
        """True when the server has accepted the Connect. Until then only appended frames are sent.
        """
        self.sent_bytes = 0
        """Bytes sent so far."""
        self._source = source
        self._ready_bytes = 0
        """Bytes in `_priority_frames` and `_frame_queue`."""
        self._encoded_ack_bytes = self._written_ack_bytes = 0
        """Bytes of acks that were encoded, and that were sent or lost with a connection."""
        self._priority_frames: deque[tuple[memoryview, int]] = deque()
        """Bytes to send first, each with the value of `_written_ack_bytes` after they are sent."""
        self._deferred_frames: deque[tuple[int, bytes]] = deque()
        """Frames that wait until all messages below a position are in the frame queue."""
        self._frame_queue: deque[PublishBatch | bytes] = deque()
        self._head_offset = 0
        """Bytes of the first entry of the frame queue that were sent."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent or for credit. Acks count when they are encoded."""
        return self._ready_bytes + self._source.unreleased_bytes

    @property
    def has_queued(self) -> bool:
        """True if `queued_bytes` is not 0."""
        return self._ready_bytes > 0 or self._source.has_unreleased

    @property
    def is_idle(self) -> bool:
        """True if no bytes can be sent now."""
        return not self._ready_bytes

    def append_frame(self, frame: bytes) -> None:
        """Queue a frame behind all messages that may be sent now."""
        self._append_all_batches()
        self._append_frames(frame)

    def append_frame_after(self, position: int, frame: bytes) -> None:
        """Queue a frame behind all messages below `position`, even if they wait for credit."""
        self._append_all_batches()
        if self._source.released_position >= position:
            self._append_frames(frame)
        else:
            self._deferred_frames.append((position, frame))

    def peek(self) -> memoryview:
        """Return the next bytes to send; empty if nothing can be sent now."""
        if (
            not self._ready_bytes
            and not self.ack_sink.pending_count
            and not self._source.has_unreleased
        ):
            return _EMPTY
        if self.is_open and self.ack_sink.pending_count:
            self._prepend_acks()
        if self._priority_frames:
            return self._priority_frames[0][0]
        if not self._frame_queue:
            self._append_next_batch()
            if not self._frame_queue:
                return _EMPTY
        head = self._frame_queue[0]
        data = memoryview(head) if isinstance(head, bytes) else head.data
        return data[self._head_offset :] if self._head_offset else data

    def mark_sent(self, count: int) -> None:
        """Remove the first `count` bytes that `peek` returned."""
        self.sent_bytes += count
        self._ready_bytes -= count
        if self._priority_frames:
            data, ack_bytes = self._priority_frames[0]
            if count == len(data):
                self._priority_frames.popleft()
                self._written_ack_bytes = ack_bytes
            else:
                self._priority_frames[0] = (data[count:], ack_bytes)
            return
        self._head_offset += count
        if self._head_offset == _frames_bytes(self._frame_queue[0]):
            self._frame_queue.popleft()
            self._head_offset = 0

    def close(self) -> None:
        """Drop all bytes that were not sent, because the connection is lost.

        The source releases its messages again, and acks that were not encoded are kept.
        """
        self.is_open = False
        self.ack_sink.clear()
        self._priority_frames.clear()
        self._deferred_frames.clear()
        self._frame_queue.clear()
        self._head_offset = self._ready_bytes = 0
        self._written_ack_bytes = self._encoded_ack_bytes

    def encode_acks(self) -> int:
        """Encode all pending acks. Returns the total bytes of encoded acks, for
        `has_written_acks`.
        """
        if self.is_open and self.ack_sink.pending_count:
            self._prepend_acks()
        return self._encoded_ack_bytes

    def has_written_acks(self, ack_bytes: int) -> bool:
        """Return True if the first `ack_bytes` bytes of acks were sent, or lost with their
        connection.
        """
        return self._written_ack_bytes >= ack_bytes

    def _append_frames(self, batch: PublishBatch | bytes) -> None:
        self._frame_queue.append(batch)
        self._ready_bytes += _frames_bytes(batch)

    def _append_next_batch(self) -> bool:
        """Queue the next frames of the source. Return False if the source has no frames to send."""
        if not self.is_open:
            return False
        batch = self._source.release_batch()
        if batch is None:
            if self._source.require_credit():
                self._append_frames(_HEARTBEAT)
            return False
        self._append_frames(batch)
        while self._deferred_frames and self._deferred_frames[0][0] <= batch.end_position:
            self._append_frames(self._deferred_frames.popleft()[1])
        return True

    def _append_all_batches(self) -> None:
        while self._append_next_batch():
            pass

    def _prepend_acks(self) -> None:
        """Encode the pending acks in front of all frames that are not begun."""
        acks = self.ack_sink.encode_pending()
        if self._head_offset and not self._priority_frames:
            self._split_begun_frame()
        self._encoded_ack_bytes += len(acks)
        self._ready_bytes += len(acks)
        if not self._priority_frames and not self._head_offset:
            if not self._frame_queue:
                self._append_next_batch()
            if self._frame_queue and _frames_bytes(self._frame_queue[0]) <= _JOIN_BYTES_MAX:
                head = self._frame_queue.popleft()
                acks += head if isinstance(head, bytes) else bytes(head.data)
        self._priority_frames.append((memoryview(acks), self._encoded_ack_bytes))

    def _split_begun_frame(self) -> None:
        """Move the rest of the begun frame into the priority frames."""
        head = self._frame_queue[0]
        if isinstance(head, bytes):
            data, end = memoryview(head), len(head)
        else:
            data, end = head.data, head.frame_end_offset(self._head_offset)
        if end > self._head_offset:
            self._priority_frames.append((data[self._head_offset : end], self._encoded_ack_bytes))
        self._head_offset = end
        if end == len(data):
            self._frame_queue.popleft()
            self._head_offset = 0


def _frames_bytes(batch: PublishBatch | bytes) -> int:
    return len(batch) if isinstance(batch, bytes) else batch.size_bytes
