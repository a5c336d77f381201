"""Everything that waits to be sent to one NATS client, in the order in which it is to go.

Rule 1: what is short is joined with what is short beside it; what is long is kept as it came.
Rule 2: what was put in is never changed again by whoever did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from simplebus.nats.limits import OUTPUT_PIECE_BYTES


class OutboxSource(Protocol):
    """Something that has more to be sent, and writes it when there is room for it."""

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing."""

    def encode_next(self, tick: int) -> bytes:
        """The next bytes; they count as sent. Empty when there are none, or none were found yet."""


class NatsOutbox:
    """`peek` and `sent` alternate: what peek showed is valid until the next change."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        """Bytes taken so far."""
        self.pending_bytes = 0
        """Bytes that wait."""
        self.source: OutboxSource | None = None
        """What goes when nothing else waits."""
        self._pieces: deque[memoryview] = deque()
        self._tail = bytearray()
        """Short pieces, behind all others."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self.pending_bytes and (self.source is None or self.source.is_idle)

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        """Queue bytes."""
        size = len(piece)
        self.pending_bytes += size
        if size < OUTPUT_PIECE_BYTES:
            self._tail += piece
            if len(self._tail) >= OUTPUT_PIECE_BYTES:
                self._finish_tail()
            return
        self._finish_tail()
        self._pieces.append(memoryview(piece))

    reply = append

    def _finish_tail(self) -> None:
        if self._tail:
            self._pieces.append(memoryview(self._tail))
            self._tail = bytearray()

    def iter_buffers(self) -> Iterator[tuple[int, int]]:
        """What is kept, as (identity, bytes): some of it may wait for others, too."""
        for piece in self._pieces:
            yield id(piece.obj), memoryview(piece.obj).nbytes
        yield id(self._tail), len(self._tail)

    def peek(self, tick: int) -> memoryview:
        """The next bytes to send; empty when there are none."""
        if not self._pieces:
            self._finish_tail()
            if not self._pieces and self.source is not None:
                self.append(self.source.encode_next(tick))
                self._finish_tail()
            if not self._pieces:
                return memoryview(b"")
        return self._pieces[0]

    def mark_sent(self, count: int, tick: int) -> None:
        """The first `count` of the bytes that peek showed were taken."""
        self.sent_bytes += count
        self.pending_bytes -= count
        piece = self._pieces[0]
        if count == len(piece):
            self._pieces.popleft()
        else:
            self._pieces[0] = piece[count:]

    def clear(self) -> None:
        """Nothing of what waits is to be sent."""
        self._pieces.clear()
        self._tail = bytearray()
        self.pending_bytes = 0
