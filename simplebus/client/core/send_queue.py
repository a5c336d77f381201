"""What a client has yet to write: the word on messages first, then everything else in its order.

Rule 1: bytes are pulled by whoever can write them; `sent` says how many were taken.
Rule 2: acknowledgements overtake everything: they may be what makes the bus read on. They never
overtake one another, and nothing is put into the middle of a frame.
Rule 3: requests overtake only messages that the credit holds back: a program that may publish no
more can always subscribe.
Rule 4: while the bus has not answered a fresh connection's Connect, nothing follows that.

    front   │ rest of a begun frame │ acks │ acks …        goes first, and nothing goes between
    chunks  │ frames of a publisher │ a request │ frames …  a publisher's are cut where acks go
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from simplebus.client.core.acks import AckSink
from simplebus.client.core.publish_batch import PublishBatch

# Acks and messages leave in one write when they are few.
_JOIN_BYTES_MAX = 16 * 1024

_EMPTY = memoryview(b"")


class SendSource(Protocol):
    """Where messages come from."""

    @property
    def unreleased_bytes(self) -> int:
        """Bytes that were not released."""

    @property
    def released_position(self) -> int:
        """All positions below are released."""

    def release_batch(self) -> PublishBatch | None:
        """The next frames, if any may be written."""


class SendQueue:
    """Bytes on their way to the bus."""

    def __init__(self, source: SendSource) -> None:
        self.ack_sink = AckSink()
        self.is_open = False
        """Whether more than what `put` was given may be written."""
        self.sent_bytes = 0
        """Bytes taken so far."""
        self._source = source
        self._ready_bytes = 0
        """Bytes in front and chunks."""
        self._encoded_ack_bytes = self._written_ack_bytes = 0
        """Bytes of verdicts: encoded so far, and taken so far or lost with a connection."""
        self._priority_frames: deque[tuple[memoryview, int]] = deque()
        """Bytes, and what `heard_bytes` is once they are taken."""
        self._deferred_frames: deque[tuple[int, bytes]] = deque()
        """Frames that wait until the messages below a position are in chunks."""
        self._frame_queue: deque[PublishBatch | bytes] = deque()
        self._head_offset = 0
        """How much of the first chunk was taken."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written, what the credit holds back included. The word on messages
        counts once it is encoded."""
        return self._ready_bytes + self._source.unreleased_bytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing is there that could be written now."""
        return not self._ready_bytes

    def append_frame(self, frame: bytes) -> None:
        """Queue a frame behind all messages that may be written."""
        self._append_all_batches()
        self._append_frames(frame)

    def append_frame_after(self, position: int, frame: bytes) -> None:
        """Queue a frame behind all messages below the position, held back or not."""
        self._append_all_batches()
        if self._source.released_position >= position:
            self._append_frames(frame)
        else:
            self._deferred_frames.append((position, frame))

    def peek(self) -> memoryview:
        """The next bytes to write; empty when there are none."""
        if self.is_open and self.ack_sink.pending_count:
            self._prepend_acks()
        if self._priority_frames:
            return self._priority_frames[0][0]
        if not self._frame_queue:
            self._append_next_batch()
            if not self._frame_queue:
                return _EMPTY
        chunk = self._frame_queue[0]
        data = memoryview(chunk) if isinstance(chunk, bytes) else chunk.data
        return data[self._head_offset :] if self._head_offset else data

    def mark_sent(self, count: int) -> None:
        """The first `count` of the bytes that peek showed were taken."""
        self.sent_bytes += count
        self._ready_bytes -= count
        if self._priority_frames:
            data, heard = self._priority_frames[0]
            if count == len(data):
                self._priority_frames.popleft()
                self._written_ack_bytes = heard
            else:
                self._priority_frames[0] = (data[count:], heard)
            return
        self._head_offset += count
        if self._head_offset == _frames_bytes(self._frame_queue[0]):
            self._frame_queue.popleft()
            self._head_offset = 0

    def close(self) -> None:
        """The connection is gone, and with it everything that was not taken. Messages are their
        source's to give again, and verdicts that were not encoded stay where they are."""
        self.is_open = False
        self.ack_sink.clear()
        self._priority_frames.clear()
        self._deferred_frames.clear()
        self._frame_queue.clear()
        self._head_offset = self._ready_bytes = 0
        self._written_ack_bytes = self._encoded_ack_bytes

    def encode_acks(self) -> int:
        """All that was said about messages by now, as a number for `has_written`."""
        if self.is_open and self.ack_sink.pending_count:
            self._prepend_acks()
        return self._encoded_ack_bytes

    def has_written_acks(self, ack_bytes: int) -> bool:
        """Whether all that was there at the mark was taken, or lost with its connection."""
        return self._written_ack_bytes >= ack_bytes

    def _append_frames(self, frames: PublishBatch | bytes) -> None:
        self._frame_queue.append(frames)
        self._ready_bytes += _frames_bytes(frames)

    def _append_next_batch(self) -> bool:
        """Queue the source's next frames. False when there are none."""
        chunk = self._source.release_batch() if self.is_open else None
        if chunk is None:
            return False
        self._append_frames(chunk)
        while self._deferred_frames and self._deferred_frames[0][0] <= chunk.end_position:
            self._append_frames(self._deferred_frames.popleft()[1])
        return True

    def _append_all_batches(self) -> None:
        while self._append_next_batch():
            pass

    def _prepend_acks(self) -> None:
        """Encode what waits on the desk, in front of every frame that is not begun."""
        verdicts = self.ack_sink.encode_pending()
        if self._head_offset and not self._priority_frames:
            self._split_begun_frame()
        self._encoded_ack_bytes += len(verdicts)
        self._ready_bytes += len(verdicts)
        if not self._priority_frames and not self._head_offset:
            if not self._frame_queue:
                self._append_next_batch()
            if self._frame_queue and _frames_bytes(self._frame_queue[0]) <= _JOIN_BYTES_MAX:
                chunk = self._frame_queue.popleft()
                verdicts += chunk if isinstance(chunk, bytes) else bytes(chunk.data)
        self._priority_frames.append((memoryview(verdicts), self._encoded_ack_bytes))

    def _split_begun_frame(self) -> None:
        """Let the frame that is begun go before what comes in front."""
        chunk = self._frame_queue[0]
        if isinstance(chunk, bytes):
            data, end = memoryview(chunk), len(chunk)
        else:
            data, end = chunk.data, chunk.frame_end_offset(self._head_offset)
        if end > self._head_offset:
            self._priority_frames.append((data[self._head_offset : end], self._encoded_ack_bytes))
        self._head_offset = end
        if end == len(data):
            self._frame_queue.popleft()
            self._head_offset = 0


def _frames_bytes(frames: PublishBatch | bytes) -> int:
    return len(frames) if isinstance(frames, bytes) else frames.size_bytes
