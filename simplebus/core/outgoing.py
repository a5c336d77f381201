r"""What a client has yet to write: acknowledgements first, then everything else in its order.

Rule 1: bytes are pulled by whoever can write them; `sent` says how many were taken.
Rule 2: acknowledgements overtake all other frames that are not begun: they may be what makes the
bus read on. Nothing is put into the middle of a frame.
Rule 3: acknowledgements stay ranges until somebody can write them, so that many become one frame.

    chunks  │ half sent ┆ acks go here ┆ whole frames │ …     pieces  header payload <\r\n> …
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from simplebus.core import frames
from simplebus.core.frames import DELIMITER
from simplebus.core.limits import DELIMITER_BYTES

# A long run of frames is cut into chunks of about this size, so that acks find gaps.
_CHUNK_BYTES = 256 * 1024


class AckLog:
    """Message ids processed and not yet told to the bus, as ranges per class and timer index.

    A range grows as long as ids follow one another in the order of processing. It never spans the
    wrap of the ids: id 0 does not follow 2147483647 + 1.
    """

    def __init__(self) -> None:
        self.count = 0
        """Messages in the log."""
        self.total = 0
        """Messages that were ever in it."""
        self._ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def add(self, *, class_id: int, timer_index: int, first: int, last: int) -> None:
        """Message ids first..last-1 are processed."""
        self.count += last - first
        ranges = self._ranges.setdefault((class_id, timer_index), [])
        if ranges and ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))

    def take(self) -> bytes:
        """Ack frames for everything in the log, which is empty then."""
        encoded = b"".join(
            frames.encode_ack(class_id=class_id, timer_index=timer_index, first=first, last=last)
            for (class_id, timer_index), ranges in self._ranges.items()
            for first, last in ranges
        )
        self.total += self.count
        self.count = 0
        self._ranges.clear()
        return encoded


class Outgoing:
    """Bytes on their way to the bus."""

    def __init__(self) -> None:
        self.acks = AckLog()
        self.queued_bytes = 0
        """Bytes that wait to be written. Acknowledgements count once they are encoded."""
        self.sent_bytes = 0
        """Bytes taken so far."""
        self.pieces: list[bytes] = []
        """Frames in three pieces each, or whole."""
        self._chunks: deque[bytes] = deque()
        self._at = 0
        """How much of the first chunk was taken."""

    def put(self, frame: bytes) -> None:
        """Queue a frame behind everything else."""
        self.pieces.append(frame)
        self.queued_bytes += len(frame)

    def put_many(self, run: bytes) -> None:
        """Queue whole frames, none of which holds a delimiter elsewhere than at its end."""
        self._join_pieces()
        self.queued_bytes += len(run)
        begin = 0
        while len(run) - begin > _CHUNK_BYTES:
            cut = run.rfind(DELIMITER, begin, begin + _CHUNK_BYTES)
            if cut < 0:
                cut = run.find(DELIMITER, begin + _CHUNK_BYTES - DELIMITER_BYTES)
            end = cut + DELIMITER_BYTES
            self._chunks.append(run[begin:end])
            begin = end
        if begin < len(run):
            self._chunks.append(run[begin:] if begin else run)

    def peek(self) -> memoryview:
        """The next bytes to write; empty when there are none."""
        if self.acks.count:
            self._put_acks()
        if not self._chunks:
            self._join_pieces()
            if not self._chunks:
                return memoryview(b"")
        return memoryview(self._chunks[0])[self._at :]

    def sent(self, count: int) -> None:
        """The first `count` of the bytes that peek showed were taken."""
        self.queued_bytes -= count
        self.sent_bytes += count
        self._at += count
        if self._at == len(self._chunks[0]):
            self._chunks.popleft()
            self._at = 0

    def _put_acks(self) -> None:
        """Turn the log into frames, in front of every frame that is not begun."""
        acks = self.acks.take()
        self.queued_bytes += len(acks)
        if not self._chunks:  # One write takes the acks and what was published meanwhile.
            self.pieces.insert(0, acks)
            return
        if not self._at:
            self._chunks.appendleft(acks)
            return
        front = self._chunks.popleft()
        begun = front.find(DELIMITER, max(0, self._at - DELIMITER_BYTES)) + DELIMITER_BYTES
        if begun < len(front):
            self._chunks.appendleft(front[begun:])
        self._chunks.appendleft(acks)
        if begun > self._at:
            self._chunks.appendleft(front[self._at : begun])
        self._at = 0

    def _join_pieces(self) -> None:
        if self.pieces:
            self._chunks.append(b"".join(self.pieces))
            self.pieces.clear()
