"""Decoder of protocol version 1: batches of frames become events (protocol/binary.md, "Version 1").

Events have the same effect as if frames were handled one by one. Messages and acks of several
classes may be sorted by class, but not moved across frames of other types. The only error raised is
RemoteProtocolError, after the events of all frames before the offending one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import CLASS_ID_MAX, DELIMITER_BYTES, HEADER_BYTES, PLAIN_FRAMES_MAX
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import (
    AckedRange,
    AckedRanges,
    Event,
    PublishedBatch,
    PublishedFrame,
    Version1Connected,
    Version1Subscribed,
)
from simplebus.core.protocol.frames import Flags, FrameBatch, TypeAndClassKeys

# With more changes of type or class in one batch, sorting is faster than decoding run by run.
_RUN_COUNT_MAX = PLAIN_FRAMES_MAX

_CLASS_IDS_DECODER = msgspec.json.Decoder(list[int], strict=True)


class Version1Decoder:
    """Decoder of a version 1 peer's frames."""

    HANDLERS: ClassVar[dict[int, Callable[..., Iterable[Event]]]]
    """Handlers by frame type. Every type is legal at any time."""
    EXPECTED_TYPES: ClassVar[str] = "one of the digits 0 to 4"

    def __init__(self, known_classes: Container[int]) -> None:
        self.known_classes = known_classes

    def mark_parked(self, batch: FrameBatch) -> None:
        """Record that `batch` was appended to the messages that wait for space."""

    def mark_unparked(self, batch: FrameBatch, stored_count: int) -> None:
        """Record that the first `stored_count` messages of the first waiting batch were stored."""

    def decode_single(self, frame: memoryview) -> PublishedFrame | AckedRange | None:
        """Return the event of a single complete message or ack; None if the frame must be decoded
        by `decode_events`.

        Raises:
            RemoteProtocolError: The frame is not legal.
        """
        frame_type, key = frame[0], frame[1] << 8 | frame[2]
        if frame_type == frames.MESSAGE:
            return PublishedFrame(key, frame) if key in self.known_classes else None
        if frame_type == frames.ACK:
            first, last = frames.parse_ack_range(frame[HEADER_BYTES:-DELIMITER_BYTES])
            return AckedRange(key, first, last)
        return None

    def decode_events(self, batch: FrameBatch) -> Iterable[Event]:
        """Return the events of frames. Each event must be applied before the next is requested."""
        changes = batch.key_changes()
        if not changes.size:
            return self._decode_run(batch)
        if changes.size <= _RUN_COUNT_MAX:
            return self._decode_runs(batch, changes)
        return self._decode_many_runs(batch)

    def _decode_many_runs(self, batch: FrameBatch) -> Iterator[Event]:
        """Yield the events of frames. Long sequences of messages, acks and heartbeats are sorted by
        kind and class.
        """
        keys = batch.keys()
        types = keys & 0xFF
        sortable = self._message_flags(types) | (types == frames.ACK) | (types == frames.HEARTBEAT)
        unsortable_indexes = np.flatnonzero(~sortable)
        first = 0
        for index in (*unsortable_indexes.tolist(), batch.count):
            if index - first > _RUN_COUNT_MAX:
                yield from self._decode_sorted(batch.slice(first, index), keys[first:index])
            elif first < index:
                part_keys = keys[first:index]
                changes = np.flatnonzero(part_keys[1:] != part_keys[:-1]) + 1
                yield from self._decode_runs(batch.slice(first, index), changes)
            if index < batch.count:
                yield from self._decode_run(batch.slice(index, index + 1))
            first = index + 1

    def _message_flags(self, types: npt.NDArray[np.integer]) -> Flags:
        """Return which of these types are messages."""
        flags: Flags = types == frames.MESSAGE
        return flags

    def _decode_runs(self, batch: FrameBatch, changes: npt.NDArray[np.intp]) -> Iterator[Event]:
        """Yield the events of runs of equal type and class, in order."""
        first = 0
        for last in (*changes.tolist(), batch.count):
            yield from self._decode_run(batch.slice(first, last))
            first = last

    def _decode_sorted(self, batch: FrameBatch, keys: TypeAndClassKeys) -> Iterator[Event]:
        """Yield the events of messages, acks and heartbeats, grouped by kind and class, acks first.

        Nothing is yielded before all frames are known to be legal. Otherwise only the frames before
        the first illegal one are decoded.
        """
        types = keys & 0xFF
        classes = (keys >> 8).astype(np.uint16)  # 16 bits are sorted in linear time.
        events: list[Event] = []
        first_bad = batch.count
        for flags in (types == frames.ACK, self._message_flags(types)):
            count = np.count_nonzero(flags)
            if count == flags.size:
                order = np.argsort(classes, kind="stable")
            elif count:
                order = np.flatnonzero(flags)
                order = order[np.argsort(classes[order], kind="stable")]
            else:
                continue
            sorted_keys = keys[order]  # The frames of a class may have two types.
            gathered = batch.select(order)
            first = 0
            changes = np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1
            for last in (*changes.tolist(), order.size):
                group_events, good_count = self._decode_group(gathered.slice(first, last))
                if good_count < last - first:
                    first_bad = min(first_bad, int(order[first + good_count]))
                events += group_events
                first = last
        if first_bad == batch.count:
            yield from events
            return
        if first_bad:
            yield from self.decode_events(batch.slice(0, first_bad))
        yield from self._decode_run(batch.slice(first_bad, first_bad + 1))
        raise AssertionError("a frame was illegal in a batch and legal alone")

    def _decode_group(self, batch: FrameBatch) -> tuple[list[Event], int]:
        """Return the events of frames of one type and class, and the number of legal frames."""
        frame_type, key = first_type_and_key(batch)
        if frame_type == frames.ACK:
            firsts, lasts = frames.parse_ack_ranges(batch)
            return [AckedRanges(key, firsts, lasts)], firsts.size
        return [PublishedBatch(key, batch)], batch.count if key in self.known_classes else 0

    def _decode_run(self, batch: FrameBatch) -> Iterable[Event]:
        """Return the events of frames of one type and class."""
        frame_type, key = first_type_and_key(batch)
        handler = self.HANDLERS.get(frame_type)
        if handler is None:
            raise RemoteProtocolError(
                Reason.UNKNOWN_TYPE,
                f"a frame began with byte 0x{frame_type:02x}; expected {self.EXPECTED_TYPES}",
            )
        return handler(self, key, batch)

    def _decode_heartbeat(self, key: int, batch: FrameBatch) -> Iterable[Event]:
        return ()

    def _decode_messages(self, key: int, batch: FrameBatch) -> Iterable[Event]:
        if key not in self.known_classes:
            raise RemoteProtocolError(
                Reason.UNKNOWN_CLASS,
                f"received a message of class {key} before a Connect that names the class",
            )
        return (PublishedBatch(key, batch),)

    def _decode_subscribe(self, key: int, batch: FrameBatch) -> Iterable[Event]:
        return (Version1Subscribed(key),)

    def _decode_acks(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        firsts, lasts = frames.parse_ack_ranges(batch)
        if firsts.size:
            yield AckedRanges(key, firsts, lasts)
        if firsts.size < batch.count:
            bad = batch.slice(firsts.size, firsts.size + 1)
            frames.parse_ack_range(frame_content(bad))
            raise AssertionError("the array parser refused an ack that the plain parser accepts")

    def _decode_connect(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        for index in range(batch.count):
            yield Version1Connected(_parse_class_ids(frame_content(batch.slice(index, index + 1))))


Version1Decoder.HANDLERS = {
    frames.HEARTBEAT: Version1Decoder._decode_heartbeat,
    frames.MESSAGE: Version1Decoder._decode_messages,
    frames.SUBSCRIBE: Version1Decoder._decode_subscribe,
    frames.ACK: Version1Decoder._decode_acks,
    frames.CONNECT: Version1Decoder._decode_connect,
}


def first_type_and_key(batch: FrameBatch) -> tuple[int, int]:
    """Return the first frame's type and the field after it, usually a class id."""
    frame_type, high, low = batch.data[:3].tolist()
    return frame_type, high << 8 | low


def frame_content(frame: FrameBatch) -> bytes:
    """Return the content of a batch's only frame."""
    return frame.data[HEADER_BYTES:-DELIMITER_BYTES].tobytes()


def _parse_class_ids(content: bytes) -> tuple[int, ...]:
    """Return the class ids of a Connect. Raises RemoteProtocolError (bad_connect)."""
    id_count = content.count(b",") + 1
    try:
        # Many more numbers would take long to decode.
        class_ids = _CLASS_IDS_DECODER.decode(content) if id_count <= CLASS_ID_MAX + 1 else []
        largest = max(class_ids, default=0)
        problem = "" if largest <= CLASS_ID_MAX else f"it holds {largest}"
        if b"-" in content:
            problem = "it holds a sign"
        if id_count > CLASS_ID_MAX + 1:
            problem = f"it holds {id_count} numbers"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = str(error)
    if problem:
        shown = content[:40].decode("utf-8", "backslashreplace")
        raise RemoteProtocolError(
            Reason.BAD_CONNECT,
            f"a Connect held {shown!r}, expected a JSON array of class ids from 0 to "
            f"{CLASS_ID_MAX}: {problem}",
        )
    return tuple(dict.fromkeys(class_ids))
