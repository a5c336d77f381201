"""Received bytes of a connection, split into batches of whole frames.

A connection keeps only the bytes of its incomplete frame between reads. Any chunking of the same
bytes gives the same frames. A short incomplete frame is copied in front of the next read; a long
one grows in place and is searched from where the last search ended, so no byte is searched twice.

    buffer  │ headroom … ┆ tail │ bytes from the socket … │
                         └ one contiguous scan ───────────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    DELIMITER_BYTES,
    FEW_FRAMES_BYTES_MAX,
    FEW_FRAMES_MAX,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    HEADROOM_BYTES,
    RECEIVE_BYTES,
    RECEIVE_PADDING_BYTES,
)
from simplebus.core.protocol.frame_splitter import SplitterScratch, split_frames
from simplebus.core.protocol.frames import DELIMITER, FrameBatch


class ReceiveBuffer:
    """Buffer that all connections of a server read into, with headroom for an incomplete frame."""

    def __init__(self, size: int = RECEIVE_BYTES) -> None:
        self.raw = bytearray(HEADROOM_BYTES + size + RECEIVE_PADDING_BYTES)
        self.scratch = SplitterScratch(len(self.raw))
        self.view = memoryview(self.raw)
        self.writable = self.view[HEADROOM_BYTES:-RECEIVE_PADDING_BYTES]
        """Memory to read into. The bytes read are raw[HEADROOM_BYTES : HEADROOM_BYTES + count]."""

    def fill(self, data: bytes | memoryview) -> int:
        """Copy `data` to `writable`, as a read from a socket would. Returns its length."""
        self.writable[: len(data)] = data
        return len(data)

    def prepend(self, tail: bytearray) -> int:
        """Move `tail`, at most HEADROOM_BYTES, in front of the bytes read. Returns its offset."""
        first = HEADROOM_BYTES - len(tail)
        self.raw[first:HEADROOM_BYTES] = tail
        tail.clear()
        return first


class UnprocessedInput:
    """Received bytes of a connection that are processed in later turns.

    They are copied once, however many turns they need.
    """

    def __init__(self) -> None:
        self._bytes = b""
        self._position = 0
        """Offset of the first unprocessed byte; the bytes before it were popped."""

    def __len__(self) -> int:
        return len(self._bytes) - self._position

    def pop(self, size_max: int) -> memoryview:
        """Remove and return up to `size_max` bytes from the front."""
        first = self._position
        data = memoryview(self._bytes)[first : first + size_max]
        self._position += len(data)
        if not self:
            self.clear()
        return data

    def put_back(self, parts: Sequence[memoryview]) -> None:
        """Insert bytes at the front. They were received directly before the remaining bytes."""
        count = sum(map(len, parts))
        if self and count <= self._position:  # The same bytes were popped before.
            self._position -= count
            return
        self._bytes = b"".join((*parts, self.pop(len(self))))
        self._position = 0

    def clear(self) -> None:
        """Discard all bytes."""
        self._bytes, self._position = b"", 0


class FrameReceiver:
    """Incomplete frame of one connection, and counters of its received frames and bytes."""

    def __init__(self, *, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.frame_count = 0
        """Whole frames received."""
        self.received_bytes = 0
        """Bytes received."""
        self.tail = bytearray()
        """Incomplete frame; empty between frames."""
        self._unsplit = (0, 0)
        """Range of the buffer behind the batch that `receive` yielded last."""

    def set_frame_bytes_max(self, frame_bytes_max: int) -> None:
        """Change the length of the longest frame that is accepted."""
        self.frame_bytes_max = frame_bytes_max

    def receive_single_frame(self, buffer: ReceiveBuffer, count: int) -> bool:
        """Count the `count` new bytes as a frame and return True if they are exactly one."""
        first = HEADROOM_BYTES
        is_single = (
            not self.tail
            and FRAME_BYTES_MIN <= count <= self.frame_bytes_max
            and buffer.raw.find(DELIMITER, first + HEADER_BYTES, first + count)
            == first + count - DELIMITER_BYTES
        )
        if is_single:
            self.record_frames(1, count)
        return is_single

    def find_few_frames(self, buffer: ReceiveBuffer, count: int) -> list[int]:
        """Return the bounds of the frames in `count` new bytes if these are few whole frames.

        The caller may then process the frames itself, call `record_frames`, and pass the rest to
        `receive`.

        Returns:
            Offsets of the frames in `buffer.writable`, and the end of the last one. Empty if there
            are more than FEW_FRAMES_MAX frames, or an incomplete or a too long one.
        """
        if self.tail or count > FEW_FRAMES_BYTES_MAX:
            return []
        raw, first, last = buffer.raw, HEADROOM_BYTES, HEADROOM_BYTES + count
        bounds = [0]
        while first < last:
            end = raw.find(DELIMITER, first + HEADER_BYTES, last) + DELIMITER_BYTES
            if end < DELIMITER_BYTES or end - first > self.frame_bytes_max:
                return []
            if len(bounds) > FEW_FRAMES_MAX:
                return []
            first = end
            bounds.append(end - HEADROOM_BYTES)
        return bounds

    def record_frames(self, frame_count: int, size_bytes: int) -> None:
        """Count frames that the caller processed."""
        self.frame_count += frame_count
        self.received_bytes += size_bytes

    def receive(
        self, buffer: ReceiveBuffer, count: int, *, skipped_bytes: int = 0
    ) -> Iterator[FrameBatch]:
        """Yield the frames that `count` new bytes in the buffer complete.

        Each batch is a view of the buffer, valid until the buffer is filled again. The caller
        exhausts the iterator or drops the connection.

        Args:
            buffer: The buffer.
            count: Number of new bytes.
            skipped_bytes: Length of the leading frames that the caller has processed, see
                `find_few_frames`.

        Raises:
            RemoteProtocolError: frame_too_long, after the frames before the offending one.
        """
        self.received_bytes += count - skipped_bytes
        first, last = HEADROOM_BYTES + skipped_bytes, HEADROOM_BYTES + count
        if self.tail:
            if len(self.tail) <= HEADROOM_BYTES:
                first = buffer.prepend(self.tail)
            else:
                frame, first = self._assemble(buffer, first, last)
                if frame is not None:
                    self._cut_before_too_long(frame)
                    self.frame_count += 1
                    self._unsplit = first, last
                    yield frame
        while (
            first < last
            and (batch := split_frames(buffer.raw, first, last, buffer.scratch)) is not None
        ):
            if batch.data.size > self.frame_bytes_max:
                batch = self._cut_before_too_long(batch)
            first += batch.data.size
            self.frame_count += batch.count
            self._unsplit = first, last
            yield batch
        self.tail += buffer.view[first:last]
        if len(self.tail) > self.frame_bytes_max:
            raise self._build_too_long_error(len(self.tail), "and has not ended")

    def unread(
        self, buffer: ReceiveBuffer, batch: FrameBatch, index: int
    ) -> tuple[memoryview, memoryview]:
        """Return the received bytes from frame `index` of the latest batch on, and do not count
        them as received. The caller then drops the iterator of `receive`.

        Returns:
            Views of the bytes of the batch, and of those behind it.
        """
        first, last = self._unsplit
        frames, rest = batch.data[batch.bounds[index] :].data, buffer.view[first:last]
        self.frame_count -= batch.count - index
        self.received_bytes -= len(frames) + len(rest)
        return frames, rest

    def _assemble(
        self, buffer: ReceiveBuffer, first: int, last: int
    ) -> tuple[FrameBatch | None, int]:
        """Append to a long incomplete frame. Returns the frame once it is whole, and the next
        frame's offset.
        """
        searched = len(self.tail)
        self.tail += buffer.view[first:last]
        earliest = max(HEADER_BYTES, searched - DELIMITER_BYTES + 1)
        end = self.tail.find(DELIMITER, earliest)
        if end < 0:
            return None, last
        length = end + DELIMITER_BYTES
        frame, self.tail = self.tail, bytearray()
        del frame[length:]
        return FrameBatch.from_frame(memoryview(frame)), first + length - searched

    def _cut_before_too_long(self, batch: FrameBatch) -> FrameBatch:
        """Return the frames in front of the first frame that is too long.

        Raises:
            RemoteProtocolError: frame_too_long if it is the first of the batch.
        """
        lengths = batch.lengths
        if (batch.stride or lengths.max()) <= self.frame_bytes_max:
            return batch
        index = int((lengths > self.frame_bytes_max).argmax())
        if index == 0:
            raise self._build_too_long_error(int(lengths[0]), "long")
        return batch.slice(0, index)

    def _build_too_long_error(self, length: int, description: str) -> RemoteProtocolError:
        return RemoteProtocolError(
            Reason.FRAME_TOO_LONG,
            f"a frame is {length} bytes {description}; at most {self.frame_bytes_max} are accepted",
        )
