"""Decoder of protocol version 2: batches of frames become events (protocol/binary.md).

A fault of one frame is a `FrameRefused` event, and decoding continues; only a fault that makes the
stream ambiguous is an error. A message whose number is not the next one is a duplicate or an error,
never an event. A publisher that assigns its own numbers may skip numbers.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import cast

import numpy as np
import numpy.typing as npt

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    DELIMITER_BYTES,
    FAILURE_REASON_BYTES_MAX,
    HEADER_BYTES,
    MESSAGE_ID_BITS,
    MESSAGE_ID_MASK,
    PLAIN_FRAMES_MAX,
)
from simplebus.core.producer_state import NumberBitmap, ProducerState
from simplebus.core.protocol import frames, inquiry, requests
from simplebus.core.protocol.envelope import unstuff
from simplebus.core.protocol.events import (
    AckedRange,
    AckedRanges,
    ConnectRequested,
    Event,
    FetchRequested,
    FrameRefused,
    InquireRequested,
    NackReceived,
    PublishedBatch,
    PublishedFrame,
    PurgeRequested,
    SubscribeRequested,
    TerminateReceived,
    UnsubscribeRequested,
    WorkingReceived,
)
from simplebus.core.protocol.frames import Flags, FrameBatch, Integers
from simplebus.core.session.version1 import Version1Decoder, frame_content

_MESSAGE_TYPES = (frames.MESSAGE, frames.ENVELOPE)
_NUMBER_OFFSET = 3
_NUMBER_DTYPE: np.dtype[np.uint32] = np.dtype(">u4")
_JSON_WHITESPACE = b" \t\r\n"
"""White space in JSON (RFC 8259, section 2)."""
_HALF_NUMBER_RANGE = 1 << (MESSAGE_ID_BITS - 1)
_NACK_PATTERN = re.compile(
    rb"([0-9]{1,10}-[0-9]{1,10})(?: ([0-9]{1,12}|terminate))?(?:\n(.*))?", re.DOTALL
)


class Version2Decoder(Version1Decoder):
    """Decoder of a version 2 peer's frames."""

    EXPECTED_TYPES = "one of 0 to 5, 8, 9, U, F, P or I"

    def __init__(self, known_classes: Container[int]) -> None:
        super().__init__(known_classes)
        self._handled_count = 0
        """Messages of batches that were stored, parked or refused."""
        self.is_greeted = False
        """True if the first Connect was handled."""
        self.producer = ProducerState()
        """State of the publisher whose messages are decoded."""
        self._is_producer_attached = True
        self.next_number = 0
        """Number that the next message must carry; if numbers may be skipped, its lower bound."""
        self.can_skip_numbers = False
        """True if the publisher may skip numbers."""
        self.may_confirm_wait = False
        """True if the Confirm of the latest message may wait for other bytes to the peer."""
        self.duplicate_count = 0
        """Duplicates since `pop_duplicate_count` was last called."""
        self._parked_numbers: deque[int] = deque()
        """First numbers of parked batches, ascending.

        A number is left out if a batch parked later has a lower one. The first entry is the lowest
        parked number.
        """

    def start_producer(self, producer: ProducerState, *, can_skip_numbers: bool = False) -> None:
        """Decode the messages of this publisher from now on."""
        self.producer = producer
        self.can_skip_numbers = can_skip_numbers
        self.next_number = producer.next_number
        self.is_greeted = True

    def detach_producer(self) -> bool:
        """Record that this session no longer changes the state of the publisher, which a newer
        session may use.

        Returns:
            False if that was recorded before.
        """
        was_attached, self._is_producer_attached = self._is_producer_attached, False
        return was_attached

    def record_handled(self, count: int) -> None:
        """Count messages of a batch that were stored, parked or refused."""
        self._handled_count += count

    def pop_duplicate_count(self) -> int:
        """Return the duplicates since the last call."""
        count, self.duplicate_count = self.duplicate_count, 0
        return count

    @property
    def stored_before(self) -> int:
        """Number below which all messages are stored, dropped or refused."""
        if self._parked_numbers and self._distance_from_next(self._parked_numbers[0]) < 0:
            return self._parked_numbers[0]
        return self.next_number

    def build_unconfirmed_range(
        self, first_number: int, parked: list[FrameBatch]
    ) -> NumberBitmap | None:
        """Return which numbers from `first_number` on are stored, without the parked messages.

        All numbers below `first_number` are stored. The result is None if the publisher skips
        numbers, because then it detects duplicates itself.
        """
        if self.can_skip_numbers:
            return None
        numbers = self._known_numbers_from(first_number)
        is_stored = np.ones(numbers.size, np.bool_)
        received_count = (self.next_number - first_number) & MESSAGE_ID_MASK
        if self.producer.stored_ahead is not None:
            is_stored[received_count:] = self.producer.stored_ahead.contains(
                numbers[received_count:]
            )
        for batch in parked:
            is_stored &= ~np.isin(numbers, message_numbers(batch, None))
        return NumberBitmap.from_flags(first_number, is_stored)

    def _known_numbers_from(self, first: int) -> Integers:
        """Return all numbers from `first` to the last number that is known to be stored or
        refused.
        """
        ahead = self.producer.stored_ahead
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
        """Return how many numbers were received from `number` on."""
        return -self._distance_from_next(number)

    def _distance_from_next(self, number: int) -> int:
        """Return the signed distance of a number from the next expected one."""
        return (
            (number - self.next_number + _HALF_NUMBER_RANGE) & MESSAGE_ID_MASK
        ) - _HALF_NUMBER_RANGE

    def decode_single(self, frame: memoryview) -> PublishedFrame | AckedRange | None:
        frame_type, key = frame[0], frame[1] << 8 | frame[2]
        if frame_type in _MESSAGE_TYPES:
            number = int.from_bytes(frame[_NUMBER_OFFSET:7], "big")
            if (
                key not in self.known_classes
                or number != self.next_number
                or self.producer.stored_ahead
            ):
                return None
            self.next_number = (number + 1) & MESSAGE_ID_MASK
            self.may_confirm_wait = frame[8] == frames.CONFIRM_MAY_WAIT and not frame[7]
            return PublishedFrame(key, frame)
        if frame_type == frames.ACK:
            try:
                first, last = frames.parse_ack_range(frame[HEADER_BYTES:-DELIMITER_BYTES])
            except RemoteProtocolError:
                return None
            return AckedRange(key, first, last)
        return None

    def expect_again(self, frame: memoryview) -> None:
        """Expect the number of the latest message again, because it was not applied."""
        self.next_number = int.from_bytes(frame[_NUMBER_OFFSET:7], "big")

    def decode_events(self, batch: FrameBatch) -> Iterator[Event]:
        self.may_confirm_wait = False
        published: Flags | None = None
        if batch.is_uniform:
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
        if not self.producer.stored_ahead and is_next(numbers, self.next_number):
            self.next_number = (int(numbers[-1]) + 1) & MESSAGE_ID_MASK
            yield from self._decode_numbered(batch, numbers)
            return
        if published is None:
            published = np.ones(batch.count, np.bool_)
        fresh, gap = self._select_fresh(numbers)
        self.duplicate_count += fresh.size - int(np.count_nonzero(fresh))
        if self.producer.refusals:
            yield from self._repeat_refusals(numbers[: fresh.size][~fresh])
        kept_flags = np.ones(batch.count, np.bool_)
        message_indexes = np.flatnonzero(published)
        kept_flags[message_indexes[: fresh.size]] = fresh
        if gap is not None:
            kept_flags[message_indexes[fresh.size] :] = False
        if kept_flags.any():
            kept_frames = batch.select(np.flatnonzero(kept_flags))
            yield from self._decode_numbered(kept_frames, numbers[: fresh.size][fresh])
        ahead = self.producer.stored_ahead
        if ahead is not None and self._distance_from_next(ahead.end) <= 0:
            self.producer.stored_ahead = None
        if gap is not None:
            raise gap

    def _decode_numbered(self, batch: FrameBatch, numbers: Integers) -> Iterator[Event]:
        """Yield the events of frames whose messages carry these numbers.

        If the caller stops early, the numbers of unhandled messages are expected again. Messages
        with higher numbers may be stored already, because each class is handled in one piece.
        """
        handled_before = self._handled_count
        yielded: list[PublishedBatch | FrameRefused] = []
        try:
            for event in super().decode_events(batch):
                if isinstance(event, PublishedBatch | FrameRefused):
                    yielded.append(event)
                yield event
        except BaseException:
            handled = self._handled_count - handled_before
            if handled < numbers.size:
                self._rewind_to_unhandled(
                    numbers,
                    list(islice(chain.from_iterable(map(_event_numbers, yielded)), handled)),
                )
            raise

    def _rewind_to_unhandled(self, numbers: Integers, handled_numbers: list[int]) -> None:
        """Expect the numbers of a batch again, except the handled ones."""
        is_handled = np.isin(numbers, handled_numbers)
        first = int(numbers[int(is_handled.argmin())])
        if self.can_skip_numbers:
            self.next_number = first
            return
        assigned_numbers = self._known_numbers_from(first)
        stored = np.isin(assigned_numbers, handled_numbers)
        if self.producer.stored_ahead is not None:
            stored |= self.producer.stored_ahead.contains(assigned_numbers)
        self.next_number, self.producer.stored_ahead = first, NumberBitmap.from_flags(first, stored)

    def _select_fresh(self, numbers: Integers) -> tuple[Flags, RemoteProtocolError | None]:
        """Return which messages are not duplicates, and an error if a number is too high."""
        fresh = np.zeros(numbers.size, np.bool_)
        gap = None
        for index, number in enumerate(numbers.tolist()):
            distance = self._distance_from_next(number)
            if (distance > 0 and not self.can_skip_numbers) or number > MESSAGE_ID_MASK:
                gap = RemoteProtocolError(
                    Reason.NUMBER_GAP,
                    f"a message carries number {number}, expected {self.next_number}",
                )
                fresh = fresh[:index]
                break
            if distance >= 0:
                fresh[index] = True
                self.next_number = (number + 1) & MESSAGE_ID_MASK
        ahead = self.producer.stored_ahead
        if ahead is not None:
            fresh &= ~ahead.contains(numbers[: fresh.size])
        return fresh, gap

    def _repeat_refusals(self, numbers: Integers) -> Iterator[FrameRefused]:
        """Yield the earlier refusals of messages that were sent again."""
        for refusal in self.producer.refusals:
            offsets = (numbers - refusal.refers_to) & MESSAGE_ID_MASK
            offsets = np.unique(offsets[offsets < refusal.count])
            bounds = np.flatnonzero(np.diff(offsets) != 1) + 1
            for row in np.split(offsets, bounds) if offsets.size else ():
                number = (refusal.refers_to + int(row[0])) & MESSAGE_ID_MASK
                yield replace(
                    refusal, refers_to=number, count=row.size, published_count=0, is_repeated=True
                )

    def _message_flags(self, types: npt.NDArray[np.integer]) -> Flags:
        flags: Flags = (types == frames.MESSAGE) | (types == frames.ENVELOPE)
        return flags

    def _decode_messages(self, key: int, batch: FrameBatch) -> Iterable[Event]:
        if key in self.known_classes:
            return (PublishedBatch(key, batch),)
        return build_refusals(
            batch,
            Reason.UNKNOWN_CLASS,
            f"no Connect has named class {key}",
            is_counted_by_refusal=True,
        )

    def _decode_acks(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        index, max_count = 0, batch.count
        while index < batch.count:
            part = batch
            if index or max_count < batch.count:
                part = batch.slice(index, min(index + max_count, batch.count))
            firsts, lasts = part.ack_ranges()
            if firsts.size:
                yield AckedRanges(key, firsts, lasts)
            index += firsts.size
            max_count *= 2
            if firsts.size < part.count:
                bad = part.slice(firsts.size, firsts.size + 1)
                try:
                    frames.parse_ack_range(frame_content(bad))
                except RemoteProtocolError as error:
                    yield _build_refusal(error, bad)
                index += 1
                max_count = (
                    PLAIN_FRAMES_MAX  # More illegal acks may follow: continue with small parts.
                )

    def _decode_group(self, batch: FrameBatch) -> tuple[list[Event], int]:
        return list(self._decode_run(batch)), batch.count

    def _decode_each(
        self, batch: FrameBatch, decode_frame: Callable[[int, FrameBatch], Event], key: int
    ) -> Iterator[Event]:
        for index in range(batch.count):
            frame = batch.slice(index, index + 1)
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
    """Return True if this frame requests version 2."""
    return (
        bool(frame.data[0] == frames.CONNECT)
        and frame_content(frame).lstrip(_JSON_WHITESPACE)[:1] == b"{"
    )


def parse_connect(frame: FrameBatch) -> ConnectRequested:
    """Return the event of a Connect. Raises RemoteProtocolError (bad_connect)."""
    request = requests.decode_request(
        requests.ConnectRequest, frame_content(frame), reason=Reason.BAD_CONNECT
    )
    return ConnectRequested(_unpack_header(frame)[2], request)


def _parse_subscribe(key: int, frame: FrameBatch) -> SubscribeRequested:
    _, _, request_number, number = _unpack_header(frame)
    if number == 0:
        raise RemoteProtocolError(
            Reason.BAD_REQUEST, "a Subscribe has subscription number 0, expected 1 to 65535"
        )
    request_body = requests.decode_request(requests.SubscribeRequest, frame_content(frame))
    return SubscribeRequested(request_number, key, number, request_body)


def _parse_unsubscribe(key: int, frame: FrameBatch) -> UnsubscribeRequested:
    request = requests.decode_request(requests.UnsubscribeRequest, frame_content(frame))
    return UnsubscribeRequested(_unpack_header(frame)[2], key, request)


def _parse_fetch(key: int, frame: FrameBatch) -> FetchRequested:
    return FetchRequested(
        _unpack_header(frame)[2],
        key,
        requests.decode_request(requests.FetchRequest, frame_content(frame)),
    )


def _parse_inquire(key: int, frame: FrameBatch) -> InquireRequested:
    return InquireRequested(_unpack_header(frame)[2], inquiry.decode_inquiry(frame_content(frame)))


def _parse_purge(key: int, frame: FrameBatch) -> PurgeRequested:
    return PurgeRequested(
        _unpack_header(frame)[2],
        key,
        requests.decode_request(requests.PurgeRequest, frame_content(frame)),
    )


def _parse_nack(key: int, frame: FrameBatch) -> NackReceived | TerminateReceived:
    content = frame_content(frame)
    match = _NACK_PATTERN.fullmatch(content)
    if match is None:
        shown = content[:40].decode("ascii", "backslashreplace")
        raise RemoteProtocolError(
            Reason.BAD_ACK,
            f"a Nack held {shown!r}; expected first-last, optionally a space and milliseconds or "
            "terminate, optionally a line feed and an error text",
        )
    first, last = frames.parse_ack_range(match[1], "a Nack")
    error, attempt = _parse_error_text(match[3] or b""), _unpack_header(frame)[2]
    if match[2] == b"terminate":
        return TerminateReceived(key, first, last, error, attempt)
    delay_seconds = None if match[2] is None else int(match[2]) / 1000
    return NackReceived(key, first, last, delay_seconds, error, attempt)


def _parse_error_text(stuffed: bytes) -> str:
    """Return the error text of a Nack."""
    text = unstuff(stuffed)
    if len(text) > FAILURE_REASON_BYTES_MAX:
        raise RemoteProtocolError(
            Reason.BAD_ACK,
            f"the error text of a Nack has {len(text)} bytes, {FAILURE_REASON_BYTES_MAX} are "
            "allowed",
        )
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(
            Reason.BAD_ACK, f"the error text of a Nack is not UTF-8: {error.reason}"
        ) from None


def _parse_working(key: int, frame: FrameBatch) -> WorkingReceived:
    return WorkingReceived(
        key, *frames.parse_ack_range(frame_content(frame), "a Working"), _unpack_header(frame)[2]
    )


def _build_refusal(error: RemoteProtocolError, frame: FrameBatch) -> FrameRefused:
    frame_type, key, request, _ = _unpack_header(frame)
    about_class = frame_type in (frames.SUBSCRIBE, frames.FETCH, frames.PURGE)
    return FrameRefused(
        error.reason,
        error.sentence,
        frame_type=frame_type,
        class_id=key if about_class else 0,
        refers_to=request,
    )


def _unpack_header(frame: FrameBatch) -> tuple[int, int, int, int]:
    """Return type, key, message id and last field of a batch's first frame."""
    fields: tuple[int, int, int, int] = frames.HEADER.unpack_from(frame.data.data)
    return fields


def message_numbers(
    batch: FrameBatch, frame_indexes: npt.NDArray[np.intp] | None = None
) -> Integers:
    """Return the numbers of a batch's messages: of all frames, or of those at `frame_indexes`."""
    if frame_indexes is None and batch.stride:
        words = frames.strided(batch.data, _NUMBER_DTYPE, _NUMBER_OFFSET, batch.stride, batch.count)
    else:
        starts = batch.starts if frame_indexes is None else batch.starts[frame_indexes]
        words = frames.unaligned(batch.data, _NUMBER_DTYPE)[starts + _NUMBER_OFFSET]
    return words.astype(np.int64)


def _event_numbers(event: PublishedBatch | FrameRefused) -> Iterable[int]:
    """Return the numbers of the messages of an event."""
    if isinstance(event, PublishedBatch):
        return cast(list[int], message_numbers(event.frames, None).tolist())
    return ((event.refers_to + k) & MESSAGE_ID_MASK for k in range(event.published_count))


def _are_consecutive(numbers: Integers, first: int) -> bool:
    """Return True if `numbers` count up by one from `first`."""
    last = first + numbers.size
    if last > MESSAGE_ID_MASK + 1:
        expected = np.arange(first, last) & MESSAGE_ID_MASK
    else:
        expected = np.arange(first, last)
    return bool((numbers == expected).all())


def _are_ascending(numbers: Integers, first: int) -> bool:
    """Return True if `numbers` are ascending and start at or after `first`."""
    offsets = (numbers - first) & MESSAGE_ID_MASK
    is_within = numbers.max() <= MESSAGE_ID_MASK and offsets[-1] < _HALF_NUMBER_RANGE
    return bool(is_within and (np.diff(offsets) > 0).all())


def first_message_number(batch: FrameBatch) -> int:
    """Return the number of a batch's first message."""
    return _unpack_header(batch)[2]


def build_refusals(
    batch: FrameBatch, reason: Reason, detail: str, *, is_counted_by_refusal: bool = False
) -> Iterator[FrameRefused]:
    """Yield the refusal of messages that are not stored: one for each run of consecutive numbers.

    With `is_counted_by_refusal` the messages were not counted elsewhere.
    """
    frame_type, class_id, number, _ = _unpack_header(batch)
    if batch.count == 1:
        yield FrameRefused(
            reason, detail, frame_type, class_id, number, published_count=int(is_counted_by_refusal)
        )
        return
    numbers, types = message_numbers(batch, None), batch.data[batch.starts]
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (types[1:] != types[:-1])) + 1
    for first, last in pairwise([0, *breaks.tolist(), numbers.size]):
        yield FrameRefused(
            reason,
            detail,
            frame_type=int(types[first]),
            class_id=class_id,
            refers_to=int(numbers[first]),
            count=last - first,
            published_count=last - first if is_counted_by_refusal else 0,
        )
