"""Delivery of stored messages to NATS subscriptions.

A message of a binary client is delivered once, when it is stored. Its subject is its channel; for
messages without a channel and dead letters it is `class.<name>`, or `class.<id>` if the name is not
a valid channel. A delayed message is delivered when it is due, if it is still stored. An expired
message is never delivered. A message of a user is delivered only on channels on which the user may
publish over NATS. Messages without NATS subscribers are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from simplebus.core.limits import (
    DELIMITER_BYTES,
    HEADER_BYTES,
    MESSAGE_ID_MASK,
    SCAN_COST_OF_COPY,
    SEND_BYTES,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import CHANNEL, STUFFED
from simplebus.core.protocol.frames import DELIMITER, flags_to_ranges, strided
from simplebus.core.ring.columns import MessageRows
from simplebus.core.session.session import Session
from simplebus.core.store.store import Store
from simplebus.core.subscription import selection
from simplebus.core.subscription.delayed_wakeups import DelayedWakeups
from simplebus.core.subscription.selection import Ranges
from simplebus.nats.bus.convert import message_from_frame
from simplebus.nats.bus.delayed_ranges import DelayedRanges
from simplebus.nats.limits import CONVERTED_AT_ONCE_BYTES, CONVERTED_BATCH_MAX
from simplebus.nats.protocol.events import LazyMessages, MixedBatch, Pub, UniformBatch
from simplebus.nats.server.class_permissions import SubjectClasses
from simplebus.nats.server.routes import SubjectRoutes
from simplebus.nats.subjects import class_subject

_MESSAGE_ID: np.dtype[np.uint32] = np.dtype(">u4")
_MESSAGE_ID_OFFSET = 3

_NO, _YES, _UNKNOWN = range(3)
ChannelFlags = npt.NDArray[np.uint8]
_NO_FLAGS: ChannelFlags = np.zeros(0, np.uint8)

# Delayed messages delivered in one wakeup.
_MESSAGES_PER_WAKEUP = 4096
# An entry costs as much as this number of further messages of an entry.
_ENTRY_COST_MESSAGES = 24
# Fewer messages than these are sent one by one.
_BATCH_MIN = 8

Deliver = Callable[[Pub | UniformBatch | MixedBatch | LazyMessages], None]
"""Delivers messages to the subscriptions of their subjects. A mixed batch has its `subject_names`.
The messages are copies that stay valid, because they may be delivered in later turns.
"""


class BusToNats:
    """Observer of one store that delivers its messages to NATS subscriptions."""

    def __init__(
        self,
        store: Store,
        wakeups: DelayedWakeups,
        routes: SubjectRoutes,
        *,
        has_subscriber: Callable[[bytes], bool],
        deliver: Deliver,
        subject_classes: SubjectClasses | None = None,
    ) -> None:
        """`subject_classes` receives the class of the messages being delivered."""
        self._subject_classes = subject_classes or SubjectClasses()
        self.scanned_count = 0
        """See `WakeupTarget`."""
        self._store = store
        self._clock = store.clock
        self._wakeups = wakeups
        self._routes = routes
        self._channel_flags: dict[MessageClass, tuple[tuple[int, int, str], ChannelFlags]] = {}
        """For each class: the key for which its flags are valid, and a flag for each channel number
        that shows whether the channel has subscribers.
        """
        self._has_subscriber = has_subscriber
        """Returns True if a NATS subscription matches a subject."""
        self._deliver = deliver
        """Delivers messages."""
        self._delayed = DelayedRanges()

    def on_stored(self, session: Session | None, cls: MessageClass, first: int, last: int) -> None:
        """Deliver messages first..last-1 of a class, which were just stored.

        Args:
            session: Publisher; None for the bus itself, which publishes dead letters.
            cls: Class of the messages.
            first: First sequence.
            last: Sequence after the last one.
        """
        if session is not None and session.is_local:
            return  # Published by a NATS client: delivered to NATS subscriptions already.
        ring = cls.ring
        if session is None or first >= ring.special_until:
            if self._get_channel_flags(cls, 0)[0] == _YES:
                self._send_ranges(cls, [(first, last)], is_dead=session is None)
            return
        rows = ring.read_rows(first, last)
        selected = self._select_subscribed(cls, rows)
        if session.grants is not None:
            selected &= self._select_allowed(session, cls, rows)
        if rows.is_timed:
            self.on_delayed_stored(session, cls, first, last)
            selected &= self._select_deliverable(rows)
        self._send_flagged(cls, first, selected)

    def _select_allowed(
        self, session: Session, cls: MessageClass, rows: MessageRows
    ) -> frames.Flags:
        """Return a flag for each message that the publisher may publish over NATS."""
        numbers, inverse = np.unique(np.atleast_1d(np.asarray(rows.channels)), return_inverse=True)
        names = [cls.channels.name_of(number).encode() for number in numbers.tolist()]
        allowed: frames.Flags = np.array(
            [not name or self._subject_classes.can_publish(session.user, name) for name in names]
        )[inverse]
        return allowed if allowed.size == rows.count else np.repeat(allowed, rows.count)

    def _select_deliverable(self, rows: MessageRows) -> frames.Flags:
        """Return a flag for each message that is due and not expired."""
        deliverable: frames.Flags = np.ones(rows.count, np.bool_)
        if rows.expires is not None:
            deliverable &= rows.expires > self._clock.now
        if rows.not_before is not None:
            deliverable &= rows.not_before <= self._clock.now
        return deliverable

    def _select_subscribed(self, cls: MessageClass, rows: MessageRows) -> frames.Flags:
        """Return a flag for each message whose channel has subscribers."""
        numbers = np.atleast_1d(np.asarray(rows.channels))
        flags = self._get_channel_flags(cls, int(numbers.max()))
        row_flags = flags[numbers]
        is_unknown = row_flags == _UNKNOWN
        if is_unknown.any():
            for number in np.unique(numbers[is_unknown]).tolist():
                has_subscriber = self._has_subscriber(cls.channels.name_of(number).encode())
                flags[number] = _YES if has_subscriber else _NO
            row_flags = flags[numbers]
        subscribed: frames.Flags = row_flags == _YES
        return subscribed if numbers.size == rows.count else np.repeat(subscribed, rows.count)

    def _get_channel_flags(self, cls: MessageClass, number: int) -> ChannelFlags:
        """Return the channel flags of a class, at least up to this channel number."""
        key = (self._routes.generation, cls.channels.generation, cls.name)
        valid_for, flags = self._channel_flags.get(cls, (None, _NO_FLAGS))
        if valid_for != key or number >= flags.size:
            size = number + 1 if valid_for != key else max(number + 1, 2 * flags.size)
            flags = np.full(size, _UNKNOWN, np.uint8)
            has_subscriber = self._has_subscriber(class_subject(cls.class_id, cls.name))
            flags[0] = _YES if has_subscriber else _NO
            self._channel_flags[cls] = (key, flags)
        return flags

    # Messages that are due -----------------------------------------------------------------------

    def _send_flagged(self, cls: MessageClass, first: int, flags: frames.Flags) -> None:
        """Deliver the flagged messages; the first flag belongs to sequence `first`."""
        if flags.any():
            self._send_ranges(
                cls, [(first + begin, first + end) for begin, end in flags_to_ranges(flags)]
            )

    def _send_ranges(self, cls: MessageClass, ranges: Ranges, *, is_dead: bool = False) -> None:
        """Deliver these ranges of sequences."""
        classes = self._subject_classes
        # A delivery may cause another one, for example if it ends a subscription.
        outer_class, classes.source_class = classes.source_class, cls
        try:
            self._encode_ranges(cls, ranges, is_dead=is_dead)
        finally:
            classes.source_class = outer_class

    def _encode_ranges(self, cls: MessageClass, ranges: Ranges, *, is_dead: bool) -> None:
        subject = class_subject(cls.class_id, cls.name)
        pieces: list[bytes] = []
        for first, last in ranges:
            while first < last:
                piece, next_first = cls.ring.view_frames(first, last, SEND_BYTES)
                batch = None
                if next_first - first >= _BATCH_MIN and not is_dead:
                    batch = _build_uniform_batch(piece, first, next_first, subject)
                if batch is None:
                    pieces.append(bytes(piece))
                else:
                    self._convert_and_deliver(pieces, subject, is_dead=is_dead)
                    pieces = []
                    self._deliver(batch)
                first = next_first
        self._convert_and_deliver(pieces, subject, is_dead=is_dead)

    def _convert_and_deliver(self, pieces: list[bytes], subject: bytes, *, is_dead: bool) -> None:
        """Deliver stored frames: few at once, others while they are converted."""
        messages = _convert_frames(pieces, subject, is_dead=is_dead)
        size_bytes = sum(map(len, pieces))
        if size_bytes > CONVERTED_AT_ONCE_BYTES:
            self._deliver(LazyMessages(messages, size_bytes))
            return
        for message in messages:
            self._deliver(message)

    # Delayed messages ----------------------------------------------------------------------------

    @property
    def next_wakeup(self) -> float:
        """Time of the next due message."""
        return self._delayed.next_due_time

    def on_delayed_stored(
        self, session: Session | None, cls: MessageClass, first: int, last: int
    ) -> None:
        """Schedule delayed messages, also while there are no NATS subscriptions."""
        rows = cls.ring.read_rows(first, last)
        if rows.not_before is None:
            return
        delayed: frames.Flags = rows.not_before > self._clock.now
        if session is not None and session.grants is not None:
            delayed &= self._select_allowed(session, cls, rows)
        for begin, end in flags_to_ranges(delayed):
            for due_at, a, b in selection.due_times(cls.ring, first + begin, first + end):
                self._delayed.push(due_at, cls, a, b)
                self._wakeups.schedule_wakeup(due_at, self)

    def handle_wakeup(self) -> bool:
        """Deliver the messages that are due."""
        remaining = _MESSAGES_PER_WAKEUP
        due: list[tuple[MessageClass, frames.Integers]] = []
        while remaining > 0 and self.next_wakeup <= self._clock.now:
            entry = self._delayed.pop()
            first = max(entry.first, entry.cls.ring.floor)
            end = min(entry.last, first + remaining)
            if end < entry.last:
                self._delayed.put_back(entry, end)
            due.append((entry.cls, np.arange(first, end)))
            remaining -= max(_ENTRY_COST_MESSAGES, end - first)
        for cls, parts in itertools.groupby(due, key=itemgetter(0)):
            self._send_due(cls, np.concatenate([sequences for _, sequences in parts]))
        self.scanned_count = (_MESSAGES_PER_WAKEUP - remaining) * SCAN_COST_OF_COPY
        return False

    def _send_due(self, cls: MessageClass, sequences: frames.Integers) -> None:
        """Deliver those of these messages that are stored, have subscribers and are not expired."""
        stored = sequences[sequences >= cls.ring.floor]
        if not stored.size:
            return
        rows = cls.ring.read_rows_at(stored)
        flags = self._select_subscribed(cls, rows) & self._select_deliverable(rows)
        if flags.any():
            selected = stored[flags]
            breaks = np.flatnonzero(np.diff(selected) != 1) + 1
            firsts, lasts = selected[np.r_[0, breaks]], selected[np.r_[breaks - 1, -1]] + 1
            self._send_ranges(cls, list(zip(firsts.tolist(), lasts.tolist(), strict=True)))


def _convert_frames(
    pieces: list[bytes], subject: bytes, *, is_dead: bool
) -> Iterator[Pub | MixedBatch]:
    """Convert stored frames one by one; messages without headers and reply subject in batches.

    Args:
        pieces: Whole frames.
        subject: Subject of messages without a channel, and of dead letters.
        is_dead: True for dead letters.
    """
    buffer = _PlainMessages()
    for data in pieces:
        offset = 0
        while offset < len(data):
            begin = offset + HEADER_BYTES
            end = data.index(DELIMITER, begin)
            if data[offset] == frames.MESSAGE:
                buffer.add(subject, data[begin:end])
            elif data[begin] == CHANNEL and not is_dead and data.find(STUFFED, begin, end) < 0:
                payload = begin + 3 + (data[begin + 1] << 8) + data[begin + 2]
                buffer.add(data[begin + 3 : payload], data[payload:end])
            else:
                yield from buffer.drain()
                message = message_from_frame(data[offset : end + DELIMITER_BYTES], subject)
                if is_dead:
                    message.subject = subject
                yield message
            if buffer.is_full:
                yield from buffer.drain()
            offset = end + DELIMITER_BYTES
    yield from buffer.drain()


class _PlainMessages:
    """Buffer of messages without headers or reply subject."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """Alternating subjects and payloads."""
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """True if the messages should be delivered."""
        return self._bytes >= SEND_BYTES or len(self._parts) >= 2 * CONVERTED_BATCH_MAX

    def add(self, subject: bytes, payload: bytes) -> None:
        self._parts += (subject, payload)
        self._bytes += len(payload)

    def drain(self) -> Iterator[Pub | MixedBatch]:
        """Yield the messages, as one batch if there are several, and remove them."""
        parts, self._parts, self._bytes = self._parts, [], 0
        subjects, payloads = parts[::2], parts[1::2]
        if len(subjects) >= _BATCH_MIN:
            yield _build_mixed_batch(subjects, payloads)
            return
        for subject, payload in zip(subjects, payloads, strict=True):
            size = b"%d" % len(payload)
            yield Pub(subject, b"", size, b"", 0, memoryview(payload))


def _build_mixed_batch(subjects: list[bytes], payloads: list[bytes]) -> MixedBatch:
    """Return the messages as one batch."""
    numbers: dict[bytes, int] = {}
    parts: list[bytes] = []
    subject_numbers: list[int] = []
    for subject, payload in zip(subjects, payloads, strict=True):
        subject_numbers.append(numbers.setdefault(subject, len(numbers)))
        parts += (b"PUB %b %d\r\n" % (subject, len(payload)), payload, b"\r\n")
    lengths = np.array([len(part) for part in parts], np.int64).reshape(-1, 3)
    bounds = np.zeros(len(subject_numbers) + 1, np.int64)
    np.cumsum(lengths.sum(axis=1), out=bounds[1:])
    ends = bounds[:-1] + 4 + np.array([len(subject) for subject in subjects], np.int64)
    return MixedBatch(
        np.frombuffer(b"".join(parts), np.uint8),
        bounds,
        ends,
        bounds[:-1] + lengths[:, 0],
        np.array(subject_numbers, np.int32),
        tuple(numbers),
    )


def _build_uniform_batch(
    piece: memoryview, first: int, last: int, subject: bytes
) -> UniformBatch | None:
    """Return stored messages first..last-1 as one batch; None if they differ in length or have
    envelopes.
    """
    count = last - first
    if len(piece) % count:
        return None
    stride = len(piece) // count
    data = np.frombuffer(piece, np.uint8)
    ids = strided(data, _MESSAGE_ID, _MESSAGE_ID_OFFSET, stride, count)
    if (ids != np.arange(first, last) & MESSAGE_ID_MASK).any():  # Frames of different lengths.
        return None
    rows = data.reshape(count, stride)
    if (rows[:, 0] != frames.MESSAGE).any():
        return None
    payload = rows[:, HEADER_BYTES:-DELIMITER_BYTES]
    size = payload.shape[1]
    line = b"PUB %b %d\r\n" % (subject, size)
    out = np.empty((count, len(line) + size + 2), np.uint8)
    out[:, : len(line)] = np.frombuffer(line, np.uint8)
    out[:, len(line) : -2] = payload
    out[:, -2:] = np.frombuffer(b"\r\n", np.uint8)
    head = Pub(subject, b"", b"%d" % size, b"", 0, payload[0].copy().data)
    return UniformBatch(head, out, len(line))
