"""From a connection's stream of bytes to batches of whole frames.

Rule 1: a connection keeps only the bytes of its one incomplete frame, between reads.
Rule 2: any chunking of the same bytes gives the same frames.
Rule 3: no byte is searched more often than the chunks it was cut into make necessary: a short tail
is copied in front of the next read, a long one grows in place and is searched from where it ended.

    buffer  │ headroom … ┆ tail │ what the socket gave … │
                         └ one contiguous scan ──────────┘
"""

from __future__ import annotations

from collections.abc import Iterator

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    DELIMITER_BYTES,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    HEADROOM_BYTES,
    RECEIVE_BYTES,
    SPARE_BYTES,
)
from simplebus.core.protocol.frame_splitter import Scratch, split
from simplebus.core.protocol.frames import DELIMITER, FrameBatch


class ReceiveBuffer:
    """The one buffer that every connection of an engine reads into, with headroom for a tail."""

    def __init__(self, size: int = RECEIVE_BYTES) -> None:
        self.raw = bytearray(HEADROOM_BYTES + size + SPARE_BYTES)
        self.scratch = Scratch(len(self.raw))
        self.view = memoryview(self.raw)
        self.space = self.view[HEADROOM_BYTES:-SPARE_BYTES]
        """Where to read into; what was read is raw[HEADROOM_BYTES : HEADROOM_BYTES + count]."""

    def fill(self, data: bytes) -> int:
        """Put data where a socket would have; returns its length, at most len(space)."""
        self.space[: len(data)] = data
        return len(data)


class FrameReceiver:
    """One connection's incomplete frame, and the frames that complete it."""

    def __init__(self, *, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.frames = 0
        """Whole frames received so far."""
        self.received_bytes = 0
        """Bytes received so far."""
        self._tail = bytearray()

    @property
    def tail_bytes(self) -> int:
        """Bytes of the incomplete frame; 0 between frames."""
        return len(self._tail)

    def is_lone_frame(self, buffer: ReceiveBuffer, count: int) -> bool:
        """Whether the fresh bytes are exactly one frame: then `took_lone_frame` may be called
        instead of `receive`."""
        first = HEADROOM_BYTES
        return (
            not self._tail
            and FRAME_BYTES_MIN <= count <= self.frame_bytes_max
            and buffer.raw.find(DELIMITER, first + HEADER_BYTES, first + count)
            == first + count - DELIMITER_BYTES
        )

    def took_lone_frame(self, count: int) -> None:
        """The fresh bytes were exactly one frame, and are done with."""
        self.frames += 1
        self.received_bytes += count

    def lone_frame(self, buffer: ReceiveBuffer, count: int) -> bool:
        """Take the fresh bytes if they are exactly one frame. Returns whether they are."""
        lone = self.is_lone_frame(buffer, count)
        if lone:
            self.took_lone_frame(count)
        return lone

    def receive(self, buffer: ReceiveBuffer, count: int) -> Iterator[FrameBatch]:
        """Yield the frames that `count` fresh bytes in the buffer complete.

        Each batch is a view of the buffer, valid until the buffer is filled again. Exhaust the
        iterator, or drop the connection. Raises RemoteProtocolError (frame_too_long) after the
        frames before the offending one.
        """
        self.received_bytes += count
        first, last = HEADROOM_BYTES, HEADROOM_BYTES + count
        if self._tail:
            if len(self._tail) <= HEADROOM_BYTES:
                begin = first - len(self._tail)
                buffer.raw[begin:first] = self._tail
                self._tail.clear()
                first = begin
            else:
                frame, first = self._assemble(buffer, first, last)
                if frame is not None:
                    yield from self._checked(frame)
        while (batch := split(buffer.raw, first, last, buffer.scratch)) is not None:
            first += batch.data.size
            yield from self._checked(batch)
        self._tail += buffer.view[first:last]
        if len(self._tail) > self.frame_bytes_max:
            raise self._too_long(len(self._tail), "and has not ended")

    def _assemble(
        self, buffer: ReceiveBuffer, first: int, last: int
    ) -> tuple[FrameBatch | None, int]:
        """Grow the long tail. Returns its frame once whole, and where the next one begins."""
        searched = len(self._tail)
        self._tail += buffer.view[first:last]
        earliest = max(HEADER_BYTES, searched - DELIMITER_BYTES + 1)
        end = self._tail.find(DELIMITER, earliest)
        if end < 0:
            return None, last
        length = end + DELIMITER_BYTES
        frame = FrameBatch.of_one(memoryview(bytes(self._tail[:length])))
        self._tail.clear()
        return frame, first + length - searched

    def _checked(self, batch: FrameBatch) -> Iterator[FrameBatch]:
        """The batch, up to a frame that is too long."""
        if batch.data.size > self.frame_bytes_max:
            lengths = batch.lengths
            if (batch.stride or lengths.max()) > self.frame_bytes_max:
                at = int((lengths > self.frame_bytes_max).argmax())
                if at:
                    self.frames += at
                    yield batch.slice(0, at)
                raise self._too_long(int(lengths[at]), "long")
        self.frames += batch.count
        yield batch

    def _too_long(self, length: int, what: str) -> RemoteProtocolError:
        return RemoteProtocolError(
            Reason.FRAME_TOO_LONG,
            f"a frame is {length} bytes {what}; at most {self.frame_bytes_max} are accepted",
        )
