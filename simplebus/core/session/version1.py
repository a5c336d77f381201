"""What a version 1 peer's frames mean (protocol/binary.md).

Rule 1: events come in an order in which every effect is as if frames were handled one by one: a run
of messages and acks of several classes may be sorted by class, nothing moves across other frames.
Rule 2: the only error that escapes is RemoteProtocolError, after the events of the frames before
the offending one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import CLASS_ID_MAX, DELIMITER_BYTES, HEADER_BYTES, PLAIN_FRAMES_MAX
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import (
    Acked,
    AckedOne,
    Connected,
    Event,
    Published,
    PublishedOne,
    Subscribed,
)
from simplebus.core.protocol.frames import Flags, FrameBatch, Keys

# With this many changes of type or class in one batch, sorting it beats going run by run.
_RUN_COUNT_MAX = PLAIN_FRAMES_MAX

_CLASS_IDS_DECODER = msgspec.json.Decoder(list[int], strict=True)


class Version1Decoder:
    """From batches of frames to events."""

    HANDLERS: ClassVar[dict[int, Callable[..., Iterator[Event]]]]
    """What it accepts. There is one state, open: every frame is legal at any time."""
    EXPECTED_TYPES: ClassVar[str] = "one of the digits 0 to 4"

    def __init__(self, known_classes: Container[int]) -> None:
        self.known_classes = known_classes

    def mark_parked(self, batch: FrameBatch) -> None:
        """Messages are to wait for room in a piece of their own, behind all that wait already."""

    def mark_unparked(self, batch: FrameBatch, stored_count: int) -> None:
        """Of the piece that waits in front, this one, the first `count` wait no longer."""

    def decode_single(self, frame: memoryview) -> PublishedOne | AckedOne | None:
        """The event of a single message or ack, without arrays. None leaves it to `events`.

        The frame is whole. Raises as `events` does.
        """
        frame_type, key = frame[0], frame[1] << 8 | frame[2]
        if frame_type == frames.MESSAGE:
            return PublishedOne(key, frame) if key in self.known_classes else None
        if frame_type == frames.ACK:
            first, last = frames.ack_range(frame[HEADER_BYTES:-DELIMITER_BYTES])
            return AckedOne(key, first, last)
        return None

    def decode_events(self, batch: FrameBatch) -> Iterator[Event]:
        """Yield what the frames mean. Each event is to be applied before the next is asked for."""
        if batch.count == 1:
            yield from self._decode_run(batch)
            return
        changes = batch.changes()
        if np.count_nonzero(changes) <= _RUN_COUNT_MAX:
            yield from self._decode_runs(batch, np.flatnonzero(changes) + 1)
            return
        keys = batch.keys()
        types = keys & 0xFF
        sortable = self._message_flags(types) | (types == frames.ACK) | (types == frames.HEARTBEAT)
        others = np.flatnonzero(~sortable)
        first = 0
        for at in (*others.tolist(), batch.count):
            if at - first > _RUN_COUNT_MAX:
                yield from self._decode_sorted(batch.slice(first, at), keys[first:at])
            elif first < at:
                here = keys[first:at]
                breaks = np.flatnonzero(here[1:] != here[:-1]) + 1
                yield from self._decode_runs(batch.slice(first, at), breaks)
            if at < batch.count:
                yield from self._decode_run(batch.slice(at, at + 1))
            first = at + 1

    def _message_flags(self, types: npt.NDArray[np.integer]) -> Flags:
        """Which of these types are messages."""
        flags: Flags = types == frames.MESSAGE
        return flags

    def _decode_runs(self, batch: FrameBatch, changes: npt.NDArray[np.intp]) -> Iterator[Event]:
        """Frames of one type and class at a time, in the order in which they came."""
        first = 0
        for last in (*changes.tolist(), batch.count):
            yield from self._decode_run(
                batch if last - first == batch.count else batch.slice(first, last)
            )
            first = last

    def _decode_sorted(self, batch: FrameBatch, keys: Keys) -> Iterator[Event]:
        """Messages, acks and heartbeats, each kind and class in one piece; acks first.

        Nothing is yielded before all is known to be good; else what stands before the first bad
        frame is done alone.
        """
        types = keys & 0xFF
        classes = (keys >> 8).astype(np.uint16)  # Sorting so few bits takes linear time.
        events: list[Event] = []
        bad = batch.count
        for here in (types == frames.ACK, self._message_flags(types)):
            count = np.count_nonzero(here)
            if count == here.size:
                order = np.argsort(classes, kind="stable")
            elif count:
                order = np.flatnonzero(here)
                order = order[np.argsort(classes[order], kind="stable")]
            else:
                continue
            sorted_classes = classes[order]
            gathered = batch.take(order)
            first = 0
            changes = np.flatnonzero(sorted_classes[1:] != sorted_classes[:-1]) + 1
            for last in (*changes.tolist(), order.size):
                found, good = self._decode_group(gathered.slice(first, last))
                if good < last - first:
                    bad = min(bad, int(order[first + good]))
                events += found
                first = last
        if bad == batch.count:
            yield from events
            return
        if bad:
            yield from self.decode_events(batch.slice(0, bad))
        yield from self._decode_run(batch.slice(bad, bad + 1))
        raise AssertionError("a frame that is bad among others was good alone")

    def _decode_group(self, batch: FrameBatch) -> tuple[list[Event], int]:
        """The events of some acks or messages of one class, and how many of them are good."""
        frame_type, key = first_type_and_key(batch)
        if frame_type == frames.ACK:
            firsts, lasts = frames.ack_ranges(batch)
            return [Acked(key, firsts, lasts)], firsts.size
        return [Published(key, batch)], batch.count if key in self.known_classes else 0

    def _decode_run(self, batch: FrameBatch) -> Iterator[Event]:
        """Frames of one type and class."""
        frame_type, key = first_type_and_key(batch)
        handle = self.HANDLERS.get(frame_type)
        if handle is None:
            raise RemoteProtocolError(
                Reason.UNKNOWN_TYPE,
                f"a frame began with byte 0x{frame_type:02x}; expected {self.EXPECTED_TYPES}",
            )
        yield from handle(self, key, batch)

    def _decode_heartbeat(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return iter(())

    def _decode_messages(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        if key not in self.known_classes:
            raise RemoteProtocolError(
                Reason.UNKNOWN_CLASS,
                f"a message for class {key} came before any Connect that names this class",
            )
        yield Published(key, batch)

    def _decode_subscribe(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        yield Subscribed(key)

    def _decode_acks(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        firsts, lasts = frames.ack_ranges(batch)
        if firsts.size:
            yield Acked(key, firsts, lasts)
        if firsts.size < batch.count:
            bad = batch.slice(firsts.size, firsts.size + 1)
            frames.ack_range(frame_content(bad))
            raise AssertionError("an ack that one parser refused was taken by the other")

    def _decode_connect(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        for at in range(batch.count):
            yield Connected(_parse_class_ids(frame_content(batch.slice(at, at + 1))))


Version1Decoder.HANDLERS = {
    frames.HEARTBEAT: Version1Decoder._decode_heartbeat,
    frames.MESSAGE: Version1Decoder._decode_messages,
    frames.SUBSCRIBE: Version1Decoder._decode_subscribe,
    frames.ACK: Version1Decoder._decode_acks,
    frames.CONNECT: Version1Decoder._decode_connect,
}


def first_type_and_key(batch: FrameBatch) -> tuple[int, int]:
    """The first frame's type, and the field behind it: a class id, mostly."""
    frame_type, high, low = batch.data[:3].tolist()
    return frame_type, high << 8 | low


def frame_content(frame: FrameBatch) -> bytes:
    """What stands between header and delimiter of a batch's only frame."""
    return frame.data[HEADER_BYTES:-DELIMITER_BYTES].tobytes()


def _parse_class_ids(content: bytes) -> tuple[int, ...]:
    """The classes that a Connect names. Raises RemoteProtocolError (bad_connect)."""
    try:
        class_ids = _CLASS_IDS_DECODER.decode(content)
        wrong = next((c for c in class_ids if not 0 <= c <= CLASS_ID_MAX), None)
        problem = "" if wrong is None else f"it holds {wrong}"
        if b"-" in content:
            problem = "it holds a sign"
        if len(class_ids) > CLASS_ID_MAX + 1:
            problem = f"it holds {len(class_ids)} numbers"
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
