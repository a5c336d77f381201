"""Output of one NATS client, in order.

Short pieces are joined, long ones are kept as they are. Shared pieces are joined with others when
they are sent, so that clients that read nothing need no memory for them. A caller must not modify
appended bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from simplebus.nats.limits import OUTPUT_PIECE_BYTES

_SHORT_PIECE_BYTES = 4 * 1024


class OutboxSource(Protocol):
    """Source of further output, which is encoded when the outbox is empty."""

    @property
    def is_idle(self) -> bool:
        """True if the source has nothing to send."""

    @property
    def scanned_count(self) -> int:
        """Messages that the last call of `encode_next` scanned."""

    def encode_next(self, tick: int) -> bytes:
        """Return the next bytes, which count as sent. Empty if no messages wait, or if the scan has
        found none yet.
        """


class NatsOutbox:
    """Queue of output. `peek` and `mark_sent` alternate: the peeked bytes are valid until the next
    change.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        """Bytes sent so far."""
        self.pending_bytes = 0
        """Bytes that are not sent yet."""
        self.source: OutboxSource | None = None
        """Source of output when the queue is empty."""
        self.scanned_count = 0
        """Messages that the last call of `peek` scanned."""
        self._pieces: deque[memoryview] = deque()
        self._tail = bytearray()
        """Joined short pieces behind all others."""

    @property
    def is_idle(self) -> bool:
        """True if nothing is pending."""
        return not self.pending_bytes and (self.source is None or self.source.is_idle)

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        size = len(piece)
        self.pending_bytes += size
        if size < OUTPUT_PIECE_BYTES:
            self._tail += piece
            if len(self._tail) >= OUTPUT_PIECE_BYTES:
                self._finish_tail()
            return
        self._finish_tail()
        self._pieces.append(memoryview(piece))

    def append_shared(self, piece: memoryview) -> None:
        """Append bytes that other outboxes have too; even short ones are not copied."""
        self.pending_bytes += len(piece)
        self._finish_tail()
        self._pieces.append(piece)

    reply = append

    def _finish_tail(self) -> None:
        if self._tail:
            self._pieces.append(memoryview(self._tail))
            self._tail = bytearray()

    def iter_buffers(self) -> Iterator[tuple[int, int]]:
        """Yield (identity, bytes) of each buffer. Several sessions may share a buffer."""
        for piece in self._pieces:
            yield id(piece.obj), memoryview(piece.obj).nbytes
        yield id(self._tail), len(self._tail)

    def peek(self, tick: int) -> memoryview:
        """Return the next bytes to send; empty if nothing waits to be sent."""
        self.scanned_count = 0
        if not self._pieces:
            self._finish_tail()
            if not self._pieces and (source := self.source) is not None:
                self.append(source.encode_next(tick))
                self.scanned_count = source.scanned_count
                self._finish_tail()
            if not self._pieces:
                return memoryview(b"")
        if len(self._pieces[0]) < _SHORT_PIECE_BYTES and len(self._pieces) > 1:
            self._join_first_pieces()
        return self._pieces[0]

    def _join_first_pieces(self) -> None:
        """Join the first pieces, such as the line in front of a shared body and the body."""
        pieces, joined, space_bytes = self._pieces, [], OUTPUT_PIECE_BYTES
        while pieces and len(pieces[0]) <= space_bytes:
            joined.append(pieces.popleft())
            space_bytes -= len(joined[-1])
        if pieces and 2 * space_bytes > OUTPUT_PIECE_BYTES:
            joined.append(pieces[0][:space_bytes])
            pieces[0] = pieces[0][space_bytes:]
        pieces.appendleft(memoryview(b"".join(joined)))

    def mark_sent(self, count: int, tick: int) -> None:
        """Remove the first `count` bytes that `peek` returned."""
        self.sent_bytes += count
        self.pending_bytes -= count
        piece = self._pieces[0]
        if count == len(piece):
            self._pieces.popleft()
        else:
            self._pieces[0] = piece[count:]

    def clear(self) -> deque[memoryview]:
        """Discard all pending bytes. Returns their pieces, because freeing many takes long."""
        self._finish_tail()
        discarded, self._pieces = self._pieces, deque()
        self.pending_bytes = 0
        return discarded
