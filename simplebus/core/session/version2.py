"""What a version 2 peer's frames mean (protocol/binary.md, "Version 2").

Rule 1: what is wrong with one frame is a Refused event, and the next frame goes on; only what puts
the stream itself in doubt is an error.
Rule 2: a message whose number is not the next one never becomes an event: it is a duplicate, or the
stream is in doubt. Who has numbers of its own may leave some out; nothing is remembered of them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    DELIMITER_BYTES,
    ERROR_BYTES_MAX,
    HEADER_BYTES,
    MESSAGE_ID_BITS,
    MESSAGE_ID_MASK,
    PLAIN_FRAMES_MAX,
)
from simplebus.core.producer_state import Ahead, Publisher
from simplebus.core.protocol import frames, inquiry, requests
from simplebus.core.protocol.envelope import unstuff
from simplebus.core.protocol.events import (
    Acked,
    AckedOne,
    Event,
    FetchAsked,
    Greeted,
    InquiryAsked,
    Nacked,
    Published,
    PublishedOne,
    PurgeAsked,
    Refused,
    StillWorking,
    SubscriptionAsked,
    Terminated,
    UnsubscriptionAsked,
)
from simplebus.core.protocol.frames import Flags, FrameBatch, Integers
from simplebus.core.session.version1 import Version1Decoder, frame_content

if TYPE_CHECKING:
    from simplebus.core.session.session import Session

_MESSAGE_TYPES = (frames.MESSAGE, frames.ENVELOPE)
_NUMBER_OFFSET = 3
_NUMBER_DTYPE: np.dtype[np.uint32] = np.dtype(">u4")
_JSON_WHITESPACE = b" \t\r\n"
"""What JSON takes for it."""
_HALF_NUMBER_RANGE = 1 << (MESSAGE_ID_BITS - 1)
_NACK_PATTERN = re.compile(
    rb"([0-9]{1,10}-[0-9]{1,10})(?: ([0-9]{1,12}|terminate))?(?:\n(.*))?", re.DOTALL
)


class Version2Decoder(Version1Decoder):
    """From batches of frames to events."""

    EXPECTED_TYPES = "one of 0 to 5, 8, 9, U, F, P or I"

    def __init__(
        self, known_classes: Container[int], handled_count: Callable[[], int] = lambda: 0
    ) -> None:
        """`handled` tells how many messages of this session's events are done with."""
        super().__init__(known_classes)
        self._handled_count = handled_count
        self.is_greeted = False
        self.producer = Publisher()
        """Whose messages they are."""
        self.next_number = 0
        """The number that the next message is to carry; or one ahead of it, where some may be left
        out."""
        self.can_skip_numbers = False
        """Whether numbers may be left out."""
        self.duplicate_count = 0
        """Duplicates since this was set to 0 last."""
        self._parked_numbers: deque[int] = deque()
        """First numbers of pieces that wait for room, but for those with a lower one behind them:
        ascending, and the first one is the lowest of all that wait."""

    def start_producer(self, producer: Publisher, *, can_skip_numbers: bool = False) -> None:
        """The peer publishes for this one; whether it may leave numbers out."""
        self.producer = producer
        self.can_skip_numbers = can_skip_numbers
        self.next_number = producer.next
        self.is_greeted = True

    @property
    def stored_before(self) -> int:
        """The number before which all is stored."""
        if self._parked_numbers and self._distance_from_next(self._parked_numbers[0]) < 0:
            return self._parked_numbers[0]
        return self.next_number

    def build_unconfirmed_range(self, first_number: int, parked: list[FrameBatch]) -> Ahead | None:
        """Which numbers from `first` on are stored, while these messages are not; every number
        before it is."""
        if self.can_skip_numbers:  # All that comes again is known elsewhere.
            return None
        numbers = self._known_numbers_from(first_number)
        is_stored = np.ones(numbers.size, np.bool_)
        beyond = (self.next_number - first_number) & MESSAGE_ID_MASK
        if self.producer.ahead is not None:
            is_stored[beyond:] = self.producer.ahead.holds(numbers[beyond:])
        for batch in parked:
            is_stored &= ~np.isin(numbers, message_numbers(batch, None))
        return Ahead.of(first_number, is_stored)

    def _known_numbers_from(self, first: int) -> Integers:
        """All numbers from this one on before the last one of which something is known."""
        ahead = self.producer.ahead
        count = (self.next_number - first) & MESSAGE_ID_MASK
        if ahead is not None:
            count += max(0, self._distance_from_next(ahead.end))
        return np.arange(first, first + count) & MESSAGE_ID_MASK

    def mark_parked(self, batch: FrameBatch) -> None:
        number = first_message_number(batch)
        distance = self._distance_from_next(number)
        while (
            self._parked_numbers and self._distance_from_next(self._parked_numbers[-1]) > distance
        ):
            self._parked_numbers.pop()
        self._parked_numbers.append(number)

    def mark_unparked(self, batch: FrameBatch, stored_count: int) -> None:
        if not stored_count or self._parked_numbers[0] != first_message_number(batch):
            return
        self._parked_numbers.popleft()
        if stored_count < batch.count:
            number = first_message_number(batch.slice(stored_count, batch.count))
            if not self._parked_numbers or self._distance_from_next(
                number
            ) < self._distance_from_next(self._parked_numbers[0]):
                self._parked_numbers.appendleft(number)

    def count_received_since(self, number: int) -> int:
        """How many numbers have come from this one on."""
        return -self._distance_from_next(number)

    def _distance_from_next(self, number: int) -> int:
        """How far a number is ahead of the next one."""
        return (
            (number - self.next_number + _HALF_NUMBER_RANGE) & MESSAGE_ID_MASK
        ) - _HALF_NUMBER_RANGE

    def decode_single(self, frame: memoryview) -> PublishedOne | AckedOne | None:
        frame_type, key = frame[0], frame[1] << 8 | frame[2]
        if frame_type in _MESSAGE_TYPES:
            number = int.from_bytes(frame[_NUMBER_OFFSET:7], "big")
            if key not in self.known_classes or number != self.next_number or self.producer.ahead:
                return None
            self.next_number = (number + 1) & MESSAGE_ID_MASK
            return PublishedOne(key, frame)
        if frame_type == frames.ACK:
            try:
                first, last = frames.ack_range(frame[HEADER_BYTES:-DELIMITER_BYTES])
            except RemoteProtocolError:
                return None
            return AckedOne(key, first, last)
        return None

    def decode_events(self, batch: FrameBatch) -> Iterator[Event]:
        published: Flags | None = None
        if batch.count == 1 or not batch.changes().any():  # All is of one type and class.
            if batch.data[0] not in _MESSAGE_TYPES:
                yield from self._decode_run(batch)
                return
            numbers = message_numbers(batch, None)
        else:
            published = self._message_flags(batch.keys() & 0xFF)
            numbers = message_numbers(batch, np.flatnonzero(published))
            if not numbers.size:
                yield from super().decode_events(batch)
                return
        is_next = _are_ascending if self.can_skip_numbers else _are_consecutive
        if not self.producer.ahead and is_next(numbers, self.next_number):
            self.next_number = (int(numbers[-1]) + 1) & MESSAGE_ID_MASK
            yield from self._decode_numbered(batch, numbers)
            return
        if published is None:
            published = np.ones(batch.count, np.bool_)
        fresh, gap = self._select_fresh(numbers)
        self.duplicate_count += fresh.size - int(np.count_nonzero(fresh))
        if self.producer.refusals:
            yield from self._repeat_refusals(numbers[: fresh.size][~fresh])
        wanted = np.ones(batch.count, np.bool_)
        at = np.flatnonzero(published)
        wanted[at[: fresh.size]] = fresh
        if gap is not None:
            wanted[at[fresh.size] :] = False
        if wanted.any():
            kept = batch.take(np.flatnonzero(wanted))
            yield from self._decode_numbered(kept, numbers[: fresh.size][fresh])
        ahead = self.producer.ahead
        if ahead is not None and self._distance_from_next(ahead.end) <= 0:
            self.producer.ahead = None
        if gap is not None:
            raise gap

    def _decode_numbered(self, batch: FrameBatch, numbers: Integers) -> Iterator[Event]:
        """The events of frames, of which messages carry these numbers, in order. Should it end
        early, the numbers of what was not handled are still to come. Others behind them may be
        stored: where classes take turns, each one's messages are handled in one piece."""
        before = self._handled_count()
        given: list[Published | Refused] = []
        try:
            for event in super().decode_events(batch):
                if isinstance(event, Published | Refused):
                    given.append(event)
                yield event
        except BaseException:
            done = self._handled_count() - before
            if done < numbers.size:
                self._rewind_to_unhandled(
                    numbers, list(islice(chain.from_iterable(map(_event_numbers, given)), done))
                )
            raise

    def _rewind_to_unhandled(self, numbers: Integers, handled_numbers: list[int]) -> None:
        """Of a batch's messages only these were handled."""
        is_handled = np.isin(numbers, handled_numbers)
        first = int(numbers[int(is_handled.argmin())])
        if self.can_skip_numbers:
            self.next_number = first
            return
        known = self._known_numbers_from(first)
        stored = np.isin(known, handled_numbers)
        if self.producer.ahead is not None:
            stored |= self.producer.ahead.holds(known)
        self.next_number, self.producer.ahead = first, Ahead.of(first, stored)

    def _select_fresh(self, numbers: Integers) -> tuple[Flags, RemoteProtocolError | None]:
        """Which messages are to be stored, up to the first that is ahead of its time."""
        fresh = np.zeros(numbers.size, np.bool_)
        gap = None
        for index, number in enumerate(numbers.tolist()):
            distance = self._distance_from_next(number)
            if (distance > 0 and not self.can_skip_numbers) or number > MESSAGE_ID_MASK:
                gap = RemoteProtocolError(
                    Reason.NUMBER_GAP,
                    f"a message carries number {number}; the next one is to carry "
                    f"{self.next_number}",
                )
                fresh = fresh[:index]
                break
            if distance >= 0:
                fresh[index] = True
                self.next_number = (number + 1) & MESSAGE_ID_MASK
        ahead = self.producer.ahead
        if ahead is not None:
            fresh &= ~ahead.holds(numbers[: fresh.size])
        return fresh, gap

    def _repeat_refusals(self, numbers: Integers) -> Iterator[Refused]:
        """Of messages that have come again: what was said of those that were refused."""
        for refused in self.producer.refusals:
            offsets = (numbers - refused.refers_to) & MESSAGE_ID_MASK
            offsets = np.unique(offsets[offsets < refused.count])
            bounds = np.flatnonzero(np.diff(offsets) != 1) + 1
            for row in np.split(offsets, bounds) if offsets.size else ():
                number = (refused.refers_to + int(row[0])) & MESSAGE_ID_MASK
                yield replace(refused, refers_to=number, count=row.size, published=0, again=True)

    def _message_flags(self, types: npt.NDArray[np.integer]) -> Flags:
        flags: Flags = (types == frames.MESSAGE) | (types == frames.ENVELOPE)
        return flags

    def _decode_messages(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        if key in self.known_classes:
            yield Published(key, batch)
            return
        yield from build_refusals(
            batch,
            Reason.UNKNOWN_CLASS,
            f"no Connect has named class {key}",
            is_counted_by_refusal=True,
        )

    def _decode_acks(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        at, most = 0, batch.count
        while at < batch.count:
            some = batch.slice(at, min(at + most, batch.count))
            firsts, lasts = frames.ack_ranges(some)
            if firsts.size:
                yield Acked(key, firsts, lasts)
            at += firsts.size
            most *= 2
            if firsts.size < some.count:
                bad = some.slice(firsts.size, firsts.size + 1)
                try:
                    frames.ack_range(frame_content(bad))
                except RemoteProtocolError as error:
                    yield _build_refusal(error, bad)
                at += 1
                most = PLAIN_FRAMES_MAX  # Where one is bad, others may be: look not far ahead.

    def _decode_group(self, batch: FrameBatch) -> tuple[list[Event], int]:
        types = batch.data[batch.starts]  # There are two for messages.
        changes = np.flatnonzero(types[1:] != types[:-1]) + 1
        return list(self._decode_runs(batch, changes)), batch.count

    def _decode_each(
        self, batch: FrameBatch, decode_frame: Callable[[int, FrameBatch], Event], key: int
    ) -> Iterator[Event]:
        for at in range(batch.count):
            frame = batch.slice(at, at + 1)
            try:
                event = decode_frame(key, frame)
            except RemoteProtocolError as error:
                event = _build_refusal(error, frame)
            yield event

    def _decode_connect(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._decode_each(batch, lambda key, frame: parse_connect(frame), key)

    def _decode_subscribe(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._decode_each(batch, _parse_subscribe, key)

    def _decode_unsubscribe(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._decode_each(batch, _parse_unsubscribe, key)

    def _decode_fetch(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._decode_each(batch, _parse_fetch, key)

    def _decode_inquire(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._decode_each(batch, _parse_inquire, key)

    def _decode_purge(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._decode_each(batch, _parse_purge, key)

    def _decode_nack(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._decode_each(batch, _parse_nack, key)

    def _decode_working(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._decode_each(batch, _parse_working, key)


Version2Decoder.HANDLERS = {
    frames.HEARTBEAT: Version2Decoder._decode_heartbeat,
    frames.MESSAGE: Version2Decoder._decode_messages,
    frames.ENVELOPE: Version2Decoder._decode_messages,
    frames.SUBSCRIBE: Version2Decoder._decode_subscribe,
    frames.ACK: Version2Decoder._decode_acks,
    frames.CONNECT: Version2Decoder._decode_connect,
    frames.NACK: Version2Decoder._decode_nack,
    frames.WORKING: Version2Decoder._decode_working,
    frames.UNSUBSCRIBE: Version2Decoder._decode_unsubscribe,
    frames.FETCH: Version2Decoder._decode_fetch,
    frames.PURGE: Version2Decoder._decode_purge,
    frames.INQUIRE: Version2Decoder._decode_inquire,
}


def is_version2_connect(frame: FrameBatch) -> bool:
    """Whether this frame asks for version 2."""
    return (
        bool(frame.data[0] == frames.CONNECT)
        and frame_content(frame).lstrip(_JSON_WHITESPACE)[:1] == b"{"
    )


def parse_connect(frame: FrameBatch) -> Greeted:
    """A Connect. Raises RemoteProtocolError (bad_connect)."""
    asked = requests.decode(
        requests.ConnectRequest, frame_content(frame), reason=Reason.BAD_CONNECT
    )
    return Greeted(_unpack_header(frame)[2], asked)


def _parse_subscribe(key: int, frame: FrameBatch) -> SubscriptionAsked:
    _, _, request, number = _unpack_header(frame)
    if number == 0:
        raise RemoteProtocolError(
            Reason.BAD_REQUEST, "a subscription's number is 1 to 65535, got 0"
        )
    asked = requests.decode(requests.SubscribeRequest, frame_content(frame))
    return SubscriptionAsked(request, key, number, asked)


def _parse_unsubscribe(key: int, frame: FrameBatch) -> UnsubscriptionAsked:
    asked = requests.decode(requests.UnsubscribeRequest, frame_content(frame))
    return UnsubscriptionAsked(_unpack_header(frame)[2], key, asked)


def _parse_fetch(key: int, frame: FrameBatch) -> FetchAsked:
    return FetchAsked(
        _unpack_header(frame)[2], key, requests.decode(requests.FetchRequest, frame_content(frame))
    )


def _parse_inquire(key: int, frame: FrameBatch) -> InquiryAsked:
    return InquiryAsked(_unpack_header(frame)[2], inquiry.question(frame_content(frame)))


def _parse_purge(key: int, frame: FrameBatch) -> PurgeAsked:
    return PurgeAsked(
        _unpack_header(frame)[2], key, requests.decode(requests.PurgeRequest, frame_content(frame))
    )


def _parse_nack(key: int, frame: FrameBatch) -> Nacked | Terminated:
    held = frame_content(frame)
    match = _NACK_PATTERN.fullmatch(held)
    if match is None:
        shown = held[:40].decode("ascii", "backslashreplace")
        raise RemoteProtocolError(
            Reason.BAD_ACK,
            f"a Nack held {shown!r}; expected first-last, perhaps a blank and milliseconds or "
            "terminate, perhaps a line end and a sentence",
        )
    first, last = frames.ack_range(match[1], "a Nack")
    error, attempt = _parse_error_text(match[3] or b""), _unpack_header(frame)[2]
    if match[2] == b"terminate":
        return Terminated(key, first, last, error, attempt)
    delay = None if match[2] is None else int(match[2]) / 1000
    return Nacked(key, first, last, delay, error, attempt)


def _parse_error_text(stuffed: bytes) -> str:
    """What a Nack says went wrong."""
    text = unstuff(stuffed)
    if len(text) > ERROR_BYTES_MAX:
        raise RemoteProtocolError(
            Reason.BAD_ACK,
            f"a Nack's sentence has {len(text)} bytes, {ERROR_BYTES_MAX} are allowed",
        )
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(
            Reason.BAD_ACK, f"a Nack's sentence is not UTF-8: {error.reason}"
        ) from None


def _parse_working(key: int, frame: FrameBatch) -> StillWorking:
    return StillWorking(
        key, *frames.ack_range(frame_content(frame), "a Working"), _unpack_header(frame)[2]
    )


def _build_refusal(error: RemoteProtocolError, frame: FrameBatch) -> Refused:
    frame_type, key, request, _ = _unpack_header(frame)
    about_class = frame_type in (frames.SUBSCRIBE, frames.FETCH, frames.PURGE)
    return Refused(
        error.reason,
        error.sentence,
        frame_type=frame_type,
        class_id=key if about_class else 0,
        refers_to=request,
    )


def _unpack_header(frame: FrameBatch) -> tuple[int, int, int, int]:
    """Type, key, message id and the last field of a batch's first frame."""
    fields: tuple[int, int, int, int] = frames.HEADER.unpack_from(frame.data.data)
    return fields


def message_numbers(
    batch: FrameBatch, frame_indexes: npt.NDArray[np.intp] | None = None
) -> Integers:
    """The numbers of a batch's messages; of all its frames, or of those at these indexes."""
    if frame_indexes is None and batch.stride:
        words = frames.strided(batch.data, _NUMBER_DTYPE, _NUMBER_OFFSET, batch.stride, batch.count)
    else:
        starts = batch.starts if frame_indexes is None else batch.starts[frame_indexes]
        words = frames.unaligned(batch.data, _NUMBER_DTYPE)[starts + _NUMBER_OFFSET]
    return words.astype(np.int64)


def _event_numbers(event: Published | Refused) -> Iterable[int]:
    """The numbers of the messages that an event is about."""
    if isinstance(event, Published):
        return cast(list[int], message_numbers(event.frames, None).tolist())
    return ((event.refers_to + k) & MESSAGE_ID_MASK for k in range(event.published))


def _are_consecutive(numbers: Integers, first: int) -> bool:
    """Whether these are `first` and those behind it, in order."""
    last = first + numbers.size
    if last > MESSAGE_ID_MASK + 1:
        expected = np.arange(first, last) & MESSAGE_ID_MASK
    else:
        expected = np.arange(first, last)
    return bool((numbers == expected).all())


def _are_ascending(numbers: Integers, first: int) -> bool:
    """Whether these are `first` or ahead of it, each ahead of the one before."""
    ahead = (numbers - first) & MESSAGE_ID_MASK
    is_within = numbers.max() <= MESSAGE_ID_MASK and ahead[-1] < _HALF_NUMBER_RANGE
    return bool(is_within and (np.diff(ahead) > 0).all())


def producer_key(session: Session) -> str:
    """Whose numbers its messages carry, see `publishers.key_of`; empty for nobody's that is
    remembered."""
    dialect = session.decoder
    return dialect.producer.key if isinstance(dialect, Version2Decoder) else ""


def first_message_number(batch: FrameBatch) -> int:
    """The number of a batch's first message."""
    return _unpack_header(batch)[2]


def build_refusals(
    batch: FrameBatch, reason: Reason, detail: str, *, is_counted_by_refusal: bool = False
) -> Iterator[Refused]:
    """What is said of messages of one class that are not stored: once for all whose numbers follow
    one another. `published` says that nobody has counted them yet."""
    frame_type, class_id, number, _ = _unpack_header(batch)
    if batch.count == 1:
        yield Refused(
            reason, detail, frame_type, class_id, number, published=int(is_counted_by_refusal)
        )
        return
    numbers, types = message_numbers(batch, None), batch.data[batch.starts]
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (types[1:] != types[:-1])) + 1
    for first, last in pairwise([0, *breaks.tolist(), numbers.size]):
        yield Refused(
            reason,
            detail,
            frame_type=int(types[first]),
            class_id=class_id,
            refers_to=int(numbers[first]),
            count=last - first,
            published=last - first if is_counted_by_refusal else 0,
        )
