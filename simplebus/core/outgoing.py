r"""What a client has yet to write: acknowledgements first, then everything else in its order.

Rule 1: bytes are pulled by whoever can write them; `sent` says how many were taken.
Rule 2: acknowledgements overtake messages: they may be what makes the bus read on. They never
overtake one another, and nothing is put into the middle of a frame.
Rule 3: acknowledgements stay ranges until somebody can write them, so that many become one frame.

    chunks  │ half sent ┆ acks go here ┆ whole frames │ …
    pieces  <\r\n> header, payload, <\r\n> header, payload …   each delimiter ends the frame before
"""

from __future__ import annotations

from collections import deque

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
        self._pieces: list[bytes] = []
        self.put_piece = self._pieces.append
        """Two calls queue a message: an `opening`, then the payload. Add to queued_bytes."""
        self._ack_bytes = 0
        """Bytes of acknowledgements encoded so far."""
        self._joined = 0
        """Frames that were pieces."""
        self._not_messages = 0
        """Frames put, whole, among the pieces."""
        self._chunks: deque[bytes] = deque()
        self._at = 0
        """How much of the first chunk was taken."""
        self._ahead = 0
        """How many of the first chunks go before new acknowledgements: older ones are in them."""

    @property
    def messages(self) -> int:
        """Messages put in pieces so far."""
        return self._joined + len(self._pieces) // 2 - self._not_messages

    @staticmethod
    def opening(header: bytes) -> bytes:
        """The first of a message's two pieces. It ends the frame before, whichever that is."""
        return DELIMITER + header

    def put(self, frame: bytes) -> None:
        """Queue a frame that is no message behind everything else."""
        self.put_piece(DELIMITER)
        self.put_piece(frame[:-DELIMITER_BYTES])
        self._not_messages += 1
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
            self._ahead = max(0, self._ahead - 1)

    def mark(self) -> int:
        """Everything queued or acknowledged by now, as a number for `has_written`."""
        if self.acks.count:
            self._put_acks()
        return self.sent_bytes + self.queued_bytes - self._ack_bytes

    def has_written(self, mark: int) -> bool:
        """Whether all that was there at the mark was taken. Acknowledgements go first: none of
        them may be left, and they do not count as progress."""
        return self.sent_bytes - self._ack_bytes >= mark

    def _put_acks(self) -> None:
        """Turn the log into frames, in front of every frame that is not begun."""
        acks = self.acks.take()
        self.queued_bytes += len(acks)
        self._ack_bytes += len(acks)
        if not self._chunks:  # One write takes the acks and what was published meanwhile.
            self._join_pieces(acks)
            self._ahead = 1
            return
        if self._at and not self._ahead:
            self._cut_front()
        self._chunks.insert(self._ahead, acks)
        self._ahead += 1

    def _cut_front(self) -> None:
        """Let only the frame that is begun go before new acknowledgements."""
        front = self._chunks.popleft()
        begun = front.find(DELIMITER, max(0, self._at - DELIMITER_BYTES)) + DELIMITER_BYTES
        if begun < len(front):
            self._chunks.appendleft(front[begun:])
        if begun > self._at:
            self._chunks.appendleft(front[:begun])
            self._ahead = 1
        else:
            self._at = 0

    def _join_pieces(self, first: bytes = b"") -> None:
        """Make a chunk of whole frames: `first`, then all the pieces."""
        pieces = self._pieces
        if pieces:
            self._joined += len(pieces) // 2
            pieces[0] = first + pieces[0][DELIMITER_BYTES:]  # Nothing is before it to be ended.
            pieces.append(DELIMITER)
            first = b"".join(pieces)
            pieces.clear()
        if first:
            self._chunks.append(first)
