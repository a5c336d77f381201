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

from simplebus.client.core.acks import Desk
from simplebus.client.core.publish_batch import Chunk

# Acks and messages leave in one write when they are few.
_JOIN_BYTES = 16 * 1024

_NOTHING = memoryview(b"")


class Source(Protocol):
    """Where messages come from."""

    @property
    def held_bytes(self) -> int:
        """Bytes that were not released."""

    @property
    def released(self) -> int:
        """All positions below are released."""

    def release(self) -> Chunk | None:
        """The next frames, if any may be written."""


class Outgoing:
    """Bytes on their way to the bus."""

    def __init__(self, source: Source) -> None:
        self.desk = Desk()
        self.is_open = False
        """Whether more than what `put` was given may be written."""
        self.sent_bytes = 0
        """Bytes taken so far."""
        self._source = source
        self._ready_bytes = 0
        """Bytes in front and chunks."""
        self._said_bytes = self._heard_bytes = 0
        """Bytes of verdicts: encoded so far, and taken so far or lost with a connection."""
        self._front: deque[tuple[memoryview, int]] = deque()
        """Bytes, and what `heard_bytes` is once they are taken."""
        self._behind: deque[tuple[int, bytes]] = deque()
        """Frames that wait until the messages below a position are in chunks."""
        self._chunks: deque[Chunk | bytes] = deque()
        self._at = 0
        """How much of the first chunk was taken."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written, what the credit holds back included. The word on messages
        counts once it is encoded."""
        return self._ready_bytes + self._source.held_bytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing is there that could be written now."""
        return not self._ready_bytes

    def put(self, frame: bytes) -> None:
        """Queue a frame behind all messages that may be written."""
        self._release_all()
        self._add(frame)

    def put_behind(self, position: int, frame: bytes) -> None:
        """Queue a frame behind all messages below the position, held back or not."""
        self._release_all()
        if self._source.released >= position:
            self._add(frame)
        else:
            self._behind.append((position, frame))

    def peek(self) -> memoryview:
        """The next bytes to write; empty when there are none."""
        if self.is_open and self.desk.count:
            self._put_verdicts()
        if self._front:
            return self._front[0][0]
        if not self._chunks:
            self._release()
            if not self._chunks:
                return _NOTHING
        chunk = self._chunks[0]
        data = memoryview(chunk) if isinstance(chunk, bytes) else chunk.data
        return data[self._at :] if self._at else data

    def sent(self, count: int) -> None:
        """The first `count` of the bytes that peek showed were taken."""
        self.sent_bytes += count
        self._ready_bytes -= count
        if self._front:
            data, heard = self._front[0]
            if count == len(data):
                self._front.popleft()
                self._heard_bytes = heard
            else:
                self._front[0] = (data[count:], heard)
            return
        self._at += count
        if self._at == _size(self._chunks[0]):
            self._chunks.popleft()
            self._at = 0

    def close(self) -> None:
        """The connection is gone, and with it everything that was not taken. Messages are their
        source's to give again, and verdicts that were not encoded stay where they are."""
        self.is_open = False
        self.desk.withdraw()
        self._front.clear()
        self._behind.clear()
        self._chunks.clear()
        self._at = self._ready_bytes = 0
        self._heard_bytes = self._said_bytes

    def mark(self) -> int:
        """All that was said about messages by now, as a number for `has_written`."""
        if self.is_open and self.desk.count:
            self._put_verdicts()
        return self._said_bytes

    def has_written(self, mark: int) -> bool:
        """Whether all that was there at the mark was taken, or lost with its connection."""
        return self._heard_bytes >= mark

    def _add(self, chunk: Chunk | bytes) -> None:
        self._chunks.append(chunk)
        self._ready_bytes += _size(chunk)

    def _release(self) -> bool:
        """Queue the source's next frames. False when there are none."""
        chunk = self._source.release() if self.is_open else None
        if chunk is None:
            return False
        self._add(chunk)
        while self._behind and self._behind[0][0] <= chunk.end:
            self._add(self._behind.popleft()[1])
        return True

    def _release_all(self) -> None:
        while self._release():
            pass

    def _put_verdicts(self) -> None:
        """Encode what waits on the desk, in front of every frame that is not begun."""
        verdicts = self.desk.take()
        if self._at and not self._front:
            self._cut_begun()
        self._said_bytes += len(verdicts)
        self._ready_bytes += len(verdicts)
        if not self._front and not self._at:
            if not self._chunks:
                self._release()
            if self._chunks and _size(self._chunks[0]) <= _JOIN_BYTES:
                chunk = self._chunks.popleft()
                verdicts += chunk if isinstance(chunk, bytes) else bytes(chunk.data)
        self._front.append((memoryview(verdicts), self._said_bytes))

    def _cut_begun(self) -> None:
        """Let the frame that is begun go before what comes in front."""
        chunk = self._chunks[0]
        if isinstance(chunk, bytes):
            data, end = memoryview(chunk), len(chunk)
        else:
            data, end = chunk.data, chunk.frame_end(self._at)
        if end > self._at:
            self._front.append((data[self._at : end], self._said_bytes))
        self._at = end
        if end == len(data):
            self._chunks.popleft()
            self._at = 0


def _size(chunk: Chunk | bytes) -> int:
    return len(chunk) if isinstance(chunk, bytes) else chunk.size
