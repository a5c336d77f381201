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
from simplebus.core.session.version1 import Version1, content

if TYPE_CHECKING:
    from simplebus.core.session.session import Session

_PUBLISHING = (frames.MESSAGE, frames.ENVELOPE)
_NUMBER_AT = 3
_NUMBER: np.dtype[np.uint32] = np.dtype(">u4")
_WHITE_SPACE = b" \t\r\n"
"""What JSON takes for it."""
_HALF = 1 << (MESSAGE_ID_BITS - 1)
_NACK = re.compile(rb"([0-9]{1,10}-[0-9]{1,10})(?: ([0-9]{1,12}|terminate))?(?:\n(.*))?", re.DOTALL)


class Version2(Version1):
    """From batches of frames to events."""

    TYPES = "one of 0 to 5, 8, 9, U, F, P or I"

    def __init__(
        self, known_classes: Container[int], handled: Callable[[], int] = lambda: 0
    ) -> None:
        """`handled` tells how many messages of this session's events are done with."""
        super().__init__(known_classes)
        self._handled = handled
        self.is_greeted = False
        self.publisher = Publisher()
        """Whose messages they are."""
        self.next = 0
        """The number that the next message is to carry; or one ahead of it, where some may be left
        out."""
        self.leaves_out = False
        """Whether numbers may be left out."""
        self.repeated = 0
        """Duplicates since this was set to 0 last."""
        self._parked: deque[int] = deque()
        """First numbers of pieces that wait for room, but for those with a lower one behind them:
        ascending, and the first one is the lowest of all that wait."""

    def begin(self, publisher: Publisher, *, leaves_out: bool = False) -> None:
        """The peer publishes for this one; whether it may leave numbers out."""
        self.publisher = publisher
        self.leaves_out = leaves_out
        self.next = publisher.next
        self.is_greeted = True

    @property
    def stored(self) -> int:
        """The number before which all is stored."""
        if self._parked and self._distance(self._parked[0]) < 0:
            return self._parked[0]
        return self.next

    def stored_ahead(self, first: int, parked: list[FrameBatch]) -> Ahead | None:
        """Which numbers from `first` on are stored, while these messages are not; every number
        before it is."""
        if self.leaves_out:  # All that comes again is known elsewhere.
            return None
        numbers = self._numbers_behind(first)
        is_stored = np.ones(numbers.size, np.bool_)
        beyond = (self.next - first) & MESSAGE_ID_MASK
        if self.publisher.ahead is not None:
            is_stored[beyond:] = self.publisher.ahead.holds(numbers[beyond:])
        for batch in parked:
            is_stored &= ~np.isin(numbers, numbers_of(batch, None))
        return Ahead.of(first, is_stored)

    def _numbers_behind(self, first: int) -> Integers:
        """All numbers from this one on before the last one of which something is known."""
        ahead = self.publisher.ahead
        count = (self.next - first) & MESSAGE_ID_MASK
        if ahead is not None:
            count += max(0, self._distance(ahead.end))
        return np.arange(first, first + count) & MESSAGE_ID_MASK

    def parks(self, batch: FrameBatch) -> None:
        number = first_number(batch)
        distance = self._distance(number)
        while self._parked and self._distance(self._parked[-1]) > distance:
            self._parked.pop()
        self._parked.append(number)

    def unparks(self, batch: FrameBatch, count: int) -> None:
        if not count or self._parked[0] != first_number(batch):
            return
        self._parked.popleft()
        if count < batch.count:
            number = first_number(batch.slice(count, batch.count))
            if not self._parked or self._distance(number) < self._distance(self._parked[0]):
                self._parked.appendleft(number)

    def ahead_of(self, number: int) -> int:
        """How many numbers have come from this one on."""
        return -self._distance(number)

    def _distance(self, number: int) -> int:
        """How far a number is ahead of the next one."""
        return ((number - self.next + _HALF) & MESSAGE_ID_MASK) - _HALF

    def lone_event(self, frame: memoryview) -> PublishedOne | AckedOne | None:
        frame_type, key = frame[0], frame[1] << 8 | frame[2]
        if frame_type in _PUBLISHING:
            number = int.from_bytes(frame[_NUMBER_AT:7], "big")
            if key not in self.known_classes or number != self.next or self.publisher.ahead:
                return None
            self.next = (number + 1) & MESSAGE_ID_MASK
            return PublishedOne(key, frame)
        if frame_type == frames.ACK:
            try:
                first, last = frames.ack_range(frame[HEADER_BYTES:-DELIMITER_BYTES])
            except RemoteProtocolError:
                return None
            return AckedOne(key, first, last)
        return None

    def events(self, batch: FrameBatch) -> Iterator[Event]:
        published: Flags | None = None
        if batch.count == 1 or not batch.changes().any():  # All is of one type and class.
            if batch.data[0] not in _PUBLISHING:
                yield from self._run(batch)
                return
            numbers = numbers_of(batch, None)
        else:
            published = self._publishes(batch.keys() & 0xFF)
            numbers = numbers_of(batch, np.flatnonzero(published))
            if not numbers.size:
                yield from super().events(batch)
                return
        is_next = _ascend if self.leaves_out else _follow
        if not self.publisher.ahead and is_next(numbers, self.next):
            self.next = (int(numbers[-1]) + 1) & MESSAGE_ID_MASK
            yield from self._handle(batch, numbers)
            return
        if published is None:
            published = np.ones(batch.count, np.bool_)
        fresh, gap = self._sort_out(numbers)
        self.repeated += fresh.size - int(np.count_nonzero(fresh))
        if self.publisher.refusals:
            yield from self._refused_before(numbers[: fresh.size][~fresh])
        wanted = np.ones(batch.count, np.bool_)
        at = np.flatnonzero(published)
        wanted[at[: fresh.size]] = fresh
        if gap is not None:
            wanted[at[fresh.size] :] = False
        if wanted.any():
            kept = batch.take(np.flatnonzero(wanted))
            yield from self._handle(kept, numbers[: fresh.size][fresh])
        ahead = self.publisher.ahead
        if ahead is not None and self._distance(ahead.end) <= 0:
            self.publisher.ahead = None
        if gap is not None:
            raise gap

    def _handle(self, batch: FrameBatch, numbers: Integers) -> Iterator[Event]:
        """The events of frames, of which messages carry these numbers, in order. Should it end
        early, the numbers of what was not handled are still to come. Others behind them may be
        stored: where classes take turns, each one's messages are handled in one piece."""
        before = self._handled()
        given: list[Published | Refused] = []
        try:
            for event in super().events(batch):
                if isinstance(event, Published | Refused):
                    given.append(event)
                yield event
        except BaseException:
            done = self._handled() - before
            if done < numbers.size:
                self._end_early(
                    numbers, list(islice(chain.from_iterable(map(_numbers_of, given)), done))
                )
            raise

    def _end_early(self, numbers: Integers, handled: list[int]) -> None:
        """Of a batch's messages only these were handled."""
        is_handled = np.isin(numbers, handled)
        first = int(numbers[int(is_handled.argmin())])
        if self.leaves_out:
            self.next = first
            return
        known = self._numbers_behind(first)
        stored = np.isin(known, handled)
        if self.publisher.ahead is not None:
            stored |= self.publisher.ahead.holds(known)
        self.next, self.publisher.ahead = first, Ahead.of(first, stored)

    def _sort_out(self, numbers: Integers) -> tuple[Flags, RemoteProtocolError | None]:
        """Which messages are to be stored, up to the first that is ahead of its time."""
        fresh = np.zeros(numbers.size, np.bool_)
        gap = None
        for index, number in enumerate(numbers.tolist()):
            distance = self._distance(number)
            if (distance > 0 and not self.leaves_out) or number > MESSAGE_ID_MASK:
                gap = RemoteProtocolError(
                    Reason.NUMBER_GAP,
                    f"a message carries number {number}; the next one is to carry {self.next}",
                )
                fresh = fresh[:index]
                break
            if distance >= 0:
                fresh[index] = True
                self.next = (number + 1) & MESSAGE_ID_MASK
        ahead = self.publisher.ahead
        if ahead is not None:
            fresh &= ~ahead.holds(numbers[: fresh.size])
        return fresh, gap

    def _refused_before(self, numbers: Integers) -> Iterator[Refused]:
        """Of messages that have come again: what was said of those that were refused."""
        for refused in self.publisher.refusals:
            offsets = (numbers - refused.refers_to) & MESSAGE_ID_MASK
            offsets = np.unique(offsets[offsets < refused.count])
            bounds = np.flatnonzero(np.diff(offsets) != 1) + 1
            for row in np.split(offsets, bounds) if offsets.size else ():
                number = (refused.refers_to + int(row[0])) & MESSAGE_ID_MASK
                yield replace(refused, refers_to=number, count=row.size, published=0, again=True)

    def _publishes(self, types: npt.NDArray[np.integer]) -> Flags:
        flags: Flags = (types == frames.MESSAGE) | (types == frames.ENVELOPE)
        return flags

    def _message(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        if key in self.known_classes:
            yield Published(key, batch)
            return
        yield from refused_messages(
            batch, Reason.UNKNOWN_CLASS, f"no Connect has named class {key}", published=True
        )

    def _ack(self, key: int, batch: FrameBatch) -> Iterator[Event]:
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
                    frames.ack_range(content(bad))
                except RemoteProtocolError as error:
                    yield _refused(error, bad)
                at += 1
                most = PLAIN_FRAMES_MAX  # Where one is bad, others may be: look not far ahead.

    def _group(self, batch: FrameBatch) -> tuple[list[Event], int]:
        types = batch.data[batch.starts]  # There are two for messages.
        changes = np.flatnonzero(types[1:] != types[:-1]) + 1
        return list(self._runs(batch, changes)), batch.count

    def _each(
        self, batch: FrameBatch, understand: Callable[[int, FrameBatch], Event], key: int
    ) -> Iterator[Event]:
        for at in range(batch.count):
            frame = batch.slice(at, at + 1)
            try:
                event = understand(key, frame)
            except RemoteProtocolError as error:
                event = _refused(error, frame)
            yield event

    def _connect(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._each(batch, lambda key, frame: greeting(frame), key)

    def _subscribe(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._each(batch, _subscription, key)

    def _unsubscribe(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._each(batch, _unsubscription, key)

    def _fetch(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._each(batch, _fetch, key)

    def _inquire(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._each(batch, _inquiry, key)

    def _purge(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._each(batch, _purge, key)

    def _nack(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._each(batch, _nacked, key)

    def _working(self, key: int, batch: FrameBatch) -> Iterator[Event]:
        return self._each(batch, _working, key)


Version2.HANDLERS = {
    frames.HEARTBEAT: Version2._heartbeat,
    frames.MESSAGE: Version2._message,
    frames.ENVELOPE: Version2._message,
    frames.SUBSCRIBE: Version2._subscribe,
    frames.ACK: Version2._ack,
    frames.CONNECT: Version2._connect,
    frames.NACK: Version2._nack,
    frames.WORKING: Version2._working,
    frames.UNSUBSCRIBE: Version2._unsubscribe,
    frames.FETCH: Version2._fetch,
    frames.PURGE: Version2._purge,
    frames.INQUIRE: Version2._inquire,
}


def is_greeting(frame: FrameBatch) -> bool:
    """Whether this frame asks for version 2."""
    return bool(frame.data[0] == frames.CONNECT) and content(frame).lstrip(_WHITE_SPACE)[:1] == b"{"


def greeting(frame: FrameBatch) -> Greeted:
    """A Connect. Raises RemoteProtocolError (bad_connect)."""
    asked = requests.decode(requests.ConnectRequest, content(frame), reason=Reason.BAD_CONNECT)
    return Greeted(_header(frame)[2], asked)


def _subscription(key: int, frame: FrameBatch) -> SubscriptionAsked:
    _, _, request, number = _header(frame)
    if number == 0:
        raise RemoteProtocolError(
            Reason.BAD_REQUEST, "a subscription's number is 1 to 65535, got 0"
        )
    asked = requests.decode(requests.SubscribeRequest, content(frame))
    return SubscriptionAsked(request, key, number, asked)


def _unsubscription(key: int, frame: FrameBatch) -> UnsubscriptionAsked:
    asked = requests.decode(requests.UnsubscribeRequest, content(frame))
    return UnsubscriptionAsked(_header(frame)[2], key, asked)


def _fetch(key: int, frame: FrameBatch) -> FetchAsked:
    return FetchAsked(
        _header(frame)[2], key, requests.decode(requests.FetchRequest, content(frame))
    )


def _inquiry(key: int, frame: FrameBatch) -> InquiryAsked:
    return InquiryAsked(_header(frame)[2], inquiry.question(content(frame)))


def _purge(key: int, frame: FrameBatch) -> PurgeAsked:
    return PurgeAsked(
        _header(frame)[2], key, requests.decode(requests.PurgeRequest, content(frame))
    )


def _nacked(key: int, frame: FrameBatch) -> Nacked | Terminated:
    held = content(frame)
    match = _NACK.fullmatch(held)
    if match is None:
        shown = held[:40].decode("ascii", "backslashreplace")
        raise RemoteProtocolError(
            Reason.BAD_ACK,
            f"a Nack held {shown!r}; expected first-last, perhaps a blank and milliseconds or "
            "terminate, perhaps a line end and a sentence",
        )
    first, last = frames.ack_range(match[1], "a Nack")
    error, attempt = _sentence(match[3] or b""), _header(frame)[2]
    if match[2] == b"terminate":
        return Terminated(key, first, last, error, attempt)
    delay = None if match[2] is None else int(match[2]) / 1000
    return Nacked(key, first, last, delay, error, attempt)


def _sentence(stuffed: bytes) -> str:
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


def _working(key: int, frame: FrameBatch) -> StillWorking:
    return StillWorking(key, *frames.ack_range(content(frame), "a Working"), _header(frame)[2])


def _refused(error: RemoteProtocolError, frame: FrameBatch) -> Refused:
    frame_type, key, request, _ = _header(frame)
    about_class = frame_type in (frames.SUBSCRIBE, frames.FETCH, frames.PURGE)
    return Refused(
        error.reason,
        error.sentence,
        frame_type=frame_type,
        class_id=key if about_class else 0,
        refers_to=request,
    )


def _header(frame: FrameBatch) -> tuple[int, int, int, int]:
    """Type, key, message id and the last field of a batch's first frame."""
    fields: tuple[int, int, int, int] = frames.HEADER.unpack_from(frame.data.data)
    return fields


def numbers_of(batch: FrameBatch, at: npt.NDArray[np.intp] | None = None) -> Integers:
    """The numbers of a batch's messages; of all its frames, or of those at these indexes."""
    if at is None and batch.stride:
        words = frames.strided(batch.data, _NUMBER, _NUMBER_AT, batch.stride, batch.count)
    else:
        starts = batch.starts if at is None else batch.starts[at]
        words = frames.unaligned(batch.data, _NUMBER)[starts + _NUMBER_AT]
    return words.astype(np.int64)


def _numbers_of(event: Published | Refused) -> Iterable[int]:
    """The numbers of the messages that an event is about."""
    if isinstance(event, Published):
        return cast(list[int], numbers_of(event.frames, None).tolist())
    return ((event.refers_to + k) & MESSAGE_ID_MASK for k in range(event.published))


def _follow(numbers: Integers, first: int) -> bool:
    """Whether these are `first` and those behind it, in order."""
    last = first + numbers.size
    if last > MESSAGE_ID_MASK + 1:
        expected = np.arange(first, last) & MESSAGE_ID_MASK
    else:
        expected = np.arange(first, last)
    return bool((numbers == expected).all())


def _ascend(numbers: Integers, first: int) -> bool:
    """Whether these are `first` or ahead of it, each ahead of the one before."""
    ahead = (numbers - first) & MESSAGE_ID_MASK
    is_within = numbers.max() <= MESSAGE_ID_MASK and ahead[-1] < _HALF
    return bool(is_within and (np.diff(ahead) > 0).all())


def publisher_of(session: Session) -> str:
    """Whose numbers its messages carry, see `publishers.key_of`; empty for nobody's that is
    remembered."""
    dialect = session.dialect
    return dialect.publisher.key if isinstance(dialect, Version2) else ""


def first_number(batch: FrameBatch) -> int:
    """The number of a batch's first message."""
    return _header(batch)[2]


def refused_messages(
    batch: FrameBatch, reason: Reason, sentence: str, *, published: bool = False
) -> Iterator[Refused]:
    """What is said of messages of one class that are not stored: once for all whose numbers follow
    one another. `published` says that nobody has counted them yet."""
    frame_type, class_id, number, _ = _header(batch)
    if batch.count == 1:
        yield Refused(reason, sentence, frame_type, class_id, number, published=int(published))
        return
    numbers, types = numbers_of(batch, None), batch.data[batch.starts]
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (types[1:] != types[:-1])) + 1
    for first, last in pairwise([0, *breaks.tolist(), numbers.size]):
        yield Refused(
            reason,
            sentence,
            frame_type=int(types[first]),
            class_id=class_id,
            refers_to=int(numbers[first]),
            count=last - first,
            published=last - first if published else 0,
        )
