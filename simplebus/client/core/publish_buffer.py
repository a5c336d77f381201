"""What a program publishes, until the bus has confirmed it.

Rule 1: a position counts messages from 0 and never wraps; the wire's number follows from it, and
what follows is settled when the bus says at which number it goes on.
Rule 2: a message is kept until it is confirmed or refused. After a loss the bus says which ones it
has; the others are written again, in order, before everything else.
Rule 3: bytes under way, written on this connection and not confirmed, stay within the credit; but
one frame may always go. What the credit holds back waits here.
Rule 4: when a call raises, nothing of it was published.
Rule 5: who has numbers of its own may leave some out: these are positions without a message.

    confirmed ≤ released ≤ numbered ≤ published

    │ confirmed │ under way │ again │ segments │ contents │
    0           confirmed   released numbered            published
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from simplebus.client.core.publish_batch import (
    FrameBounds,
    PublishBatch,
    UnnumberedFrames,
    count_fitting,
    encode_frame_prefix,
    longest_frame_bytes,
)
from simplebus.core.errors import LocalProtocolError, Reason, RefusedError, RemoteProtocolError
from simplebus.core.limits import (
    CREDIT_BYTES,
    FRAME_BYTES_MIN,
    MESSAGE_ID_BITS,
    MESSAGE_ID_MASK,
    PLAIN_FRAMES_MAX,
)
from simplebus.core.protocol import envelope_batch as envelopes
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frames import DELIMITER

# Frames are joined to chunks of at most this size, so that others find gaps between them.
_BATCH_BYTES_MAX = 256 * 1024
# Refusals that nobody asks for are forgotten, the oldest first.
_REFUSALS_MAX = 65_536
_HALF_NUMBER_RANGE = 1 << (MESSAGE_ID_BITS - 1)
_EMPTY_ENVELOPE = Envelope()
_DELIMITER_PREFIX = DELIMITER[:-1]
"""What an envelope's content never holds without more behind it."""
_NO_CLASS = cast(int, object())
"""Equal to nothing that could be given as a class id, wrong ones included."""


def _always_fitting_bytes(payload_bytes_max: int, envelope: Envelope = _EMPTY_ENVELOPE) -> int:
    """A payload of so many bytes fits even if it needs an envelope that is stuffed throughout."""
    return payload_bytes_max // 4 * 3 - len(envelopes.encode(envelope, b""))


class PublishBuffer:
    """One program's messages, over as many connections as it takes."""

    def __init__(self, *, frame_bytes_max: int, name_class: Callable[[int], None]) -> None:
        self.published_position = 0
        """Messages handed over so far: the position of the next one."""
        self.confirmed_position = 0
        """All positions below are stored by the bus, or refused."""
        self.published_bytes = 0
        """Bytes of all frames that were ever handed over."""
        self.credit_bytes = CREDIT_BYTES
        """Bytes that may be under way. A guess until the bus has said it."""
        self.refused_count = 0
        self.resent_count = 0
        self.forgotten_count = 0
        """Confirmed messages that the bus says it has not."""
        self._frame_bytes_max = frame_bytes_max
        self._payload_bytes_max = frame_bytes_max - FRAME_BYTES_MIN
        self._unchecked_bytes_max = _always_fitting_bytes(self._payload_bytes_max)
        self._name_class = name_class
        self._message_prefixes: dict[int, bytes] = {}
        self._envelope_prefixes: dict[int, bytes] = {}
        self._unchecked_class_id = _NO_CLASS
        """All contents are payloads of this class, and not looked at yet; or `_various` tells."""
        self._pending_contents: list[bytes] = []
        self._append_content = self._pending_contents.append
        self._pending_prefixes: list[bytes] = []
        """The openings of the contents, which are then ready to be sent."""
        self._unnumbered_frames: deque[UnnumberedFrames] = deque()
        self._resend_batches: deque[PublishBatch] = deque()
        """Numbered, and not released on this connection."""
        self._in_flight_batches: deque[PublishBatch] = deque()
        """Released on this connection."""
        self.in_flight_bytes = 0
        """Bytes that are released on this connection and not confirmed."""
        self._partly_confirmed_bytes = 0
        """Of the oldest chunk, so many bytes are confirmed."""
        self._confirmed_bytes = 0
        self._released_position = self._numbered_position = 0
        self._base_number = 0
        """The wire's number of position 0."""
        self._refusal_by_position: dict[int, RefusedError] = {}

    @property
    def stored_before_count(self) -> int:
        """How many messages the bus had of this name, or had refused, before the first one here;
        0 when it knew nothing of the name. Changes when the bus forgets."""
        return self._base_number

    @property
    def accepted_frame_bytes_max(self) -> int:
        """The longest frame that may be handed over."""
        return self._payload_bytes_max + FRAME_BYTES_MIN

    @property
    def first_unconfirmed_number(self) -> int:
        """The lowest number that is not confirmed."""
        return self._number_of(self.confirmed_position)

    @property
    def unconfirmed_bytes(self) -> int:
        """Bytes of the frames that are handed over, and neither stored nor refused."""
        return self.published_bytes - self._confirmed_bytes

    @property
    def has_credit(self) -> bool:
        """Whether one message more may be handed over without piling up here."""
        return self.unconfirmed_bytes < self.credit_bytes

    @property
    def unreleased_bytes(self) -> int:
        """Bytes that are not released."""
        return self.unconfirmed_bytes - self.in_flight_bytes

    @property
    def released_position(self) -> int:
        """All positions below were given out for writing, on this connection or before it."""
        return self._released_position

    # Handing over --------------------------------------------------------------------------------

    def publish(self, payload: bytes, class_id: int, envelope: Envelope | None = None) -> int:
        """Hand a message over. Returns its position.

        Raises LocalProtocolError for a message longer than a frame may be, ValueError for what is
        no class id, TypeError for what is not bytes.
        """
        if (
            class_id != self._unchecked_class_id
            or envelope is not None
            or type(payload) is not bytes
            or len(payload) > self._unchecked_bytes_max
        ):
            self._append_message(payload, class_id, envelope)
        else:
            self._append_content(payload)
            self.published_bytes += len(payload) + FRAME_BYTES_MIN
        position = self.published_position
        self.published_position = position + 1
        return position

    def _append_message(self, payload: bytes, class_id: int, envelope: Envelope | None) -> None:
        if class_id not in self._message_prefixes:
            self._name_new_class(class_id)
        is_first = not self._pending_contents and envelope is None and type(payload) is bytes
        if is_first and len(payload) <= self._unchecked_bytes_max:
            self._unchecked_class_id = class_id
            self._append_content(payload)
            self.published_bytes += len(payload) + FRAME_BYTES_MIN
        else:
            self._append_framed(*self._frame_message(payload, class_id, envelope))

    def _append_framed(self, prefix: bytes, content: bytes) -> None:
        if self._unchecked_class_id is not _NO_CLASS:
            self._frame_pending_contents()
        self._pending_prefixes.append(prefix)
        self._append_content(content)
        self.published_bytes += len(content) + FRAME_BYTES_MIN

    def _frame_pending_contents(self) -> None:
        """Make the payloads that were not looked at ready to be sent."""
        class_id, self._unchecked_class_id = self._unchecked_class_id, _NO_CLASS
        for index, payload in enumerate(self._pending_contents):
            opening, content = self._frame_message(payload, class_id, None)
            self.published_bytes += len(content) - len(payload)
            self._pending_contents[index] = content
            self._pending_prefixes.append(opening)

    def publish_many(
        self, payloads: Iterable[bytes], class_id: int, envelope: Envelope | None = None
    ) -> int:
        """Hand messages over, all or, when it raises what `publish` does, none of them.

        Returns the last one's position; of no messages, that of the one before.
        """
        if class_id not in self._message_prefixes:
            self._name_new_class(class_id)
        handed = list(payloads)
        if handed and set(map(type, handed)) != {bytes}:
            handed = list(map(_as_bytes, handed))
        if len(handed) > PLAIN_FRAMES_MAX and self._append_uniform(handed, class_id, envelope):
            return self.published_position - 1
        dressed = [
            self._frame_message(payload, class_id, envelope, f" at index {index}")
            for index, payload in enumerate(handed)
        ]
        for opening, content in dressed:
            self._append_framed(opening, content)
        self.published_position += len(handed)
        return self.published_position - 1

    def publish_runs(
        self, runs: list[tuple[int, list[bytes]]], envelope: Envelope | None = None
    ) -> int:
        """Hand messages of several classes over in this order, as `publish_many` does each run; all
        or, when it raises, none of them."""
        if len(runs) > 1:
            self._check_runs(runs, envelope)
        for class_id, payloads in runs:
            self.publish_many(payloads, class_id, envelope)
        return self.published_position - 1

    def _check_runs(self, runs: list[tuple[int, list[bytes]]], envelope: Envelope | None) -> None:
        """Raise what `publish_many` would, about any of these."""
        for class_id, _ in runs:
            if class_id not in self._message_prefixes:
                self._name_new_class(class_id)
        payloads = [payload for _, run in runs for payload in run]
        if set(map(type, payloads)) == {bytes}:
            surely = _surely_fitting_bytes(self._payload_bytes_max, envelope or _EMPTY_ENVELOPE)
            if max(map(len, payloads)) <= surely:
                return
        class_ids = (class_id for class_id, run in runs for _ in run)
        for index, (payload, class_id) in enumerate(zip(payloads, class_ids, strict=True)):
            self._frame_message(payload, class_id, envelope, f" at index {index}")

    def _append_uniform(
        self, payloads: list[bytes], class_id: int, envelope: Envelope | None
    ) -> bool:
        """Hand messages over in one piece. False if one of them has to be looked at for itself."""
        if envelope is None:
            opening, contents, foreign = self._message_prefixes[class_id], payloads, DELIMITER
        else:
            opening, foreign = self._envelope_prefixes[class_id], _DELIMITER_PREFIX
            front = envelopes.unstuff(envelopes.encode(envelope, b""))
            contents = [front + payload for payload in payloads]
        segment = UnnumberedFrames.from_uniform(opening, contents, foreign)
        if segment is None or (
            segment.size_bytes > self._payload_bytes_max
            and longest_frame_bytes(segment.bounds) - FRAME_BYTES_MIN > self._payload_bytes_max
        ):
            return False
        self._seal_contents()
        self._unnumbered_frames.append(segment)
        self.published_bytes += segment.size_bytes
        self.published_position += segment.count
        return True

    def publish_frames(
        self,
        data: bytearray | memoryview,
        bounds: FrameBounds,
        class_id: int,
        *,
        skipped_count: int = 0,
    ) -> int:
        """Hand over messages that are frames already, of one class, back to back behind a
        delimiter; `bounds` say where each begins behind that, and the last one ends. Their numbers
        are set here, behind so many that are `left_out`: positions of no message. Returns the last
        one's position.

        The caller has seen to it that they are good frames, and none longer than may be; and has
        numbers of its own where it leaves some out, of which less than 2**30 are under way.
        """
        if class_id not in self._message_prefixes:
            self._name_new_class(class_id)
        self._seal_contents()
        segment = UnnumberedFrames(data, bounds, len(bounds) - 1, skipped_count=skipped_count)
        self._unnumbered_frames.append(segment)
        self.published_bytes += segment.size_bytes
        self.published_position += skipped_count + segment.count
        return self.published_position - 1

    def has_class(self, class_id: int) -> bool:
        """Whether the class was named to the bus."""
        return class_id in self._message_prefixes

    def add_class(self, class_id: int) -> None:
        """The class is known to the bus."""
        self._message_prefixes[class_id] = encode_frame_prefix(frames.MESSAGE, class_id)
        self._envelope_prefixes[class_id] = encode_frame_prefix(frames.ENVELOPE, class_id)

    def remove_class(self, class_id: int) -> None:
        """The class could not be named."""
        if class_id == self._unchecked_class_id:
            self._frame_pending_contents()
        self._message_prefixes.pop(class_id, None)
        self._envelope_prefixes.pop(class_id, None)

    def _name_new_class(self, class_id: int) -> bytes:
        self._name_class(class_id)
        return self._message_prefixes[class_id]

    def _frame_message(
        self, payload: object, class_id: int, envelope: Envelope | None, location: str = ""
    ) -> tuple[bytes, bytes]:
        """Opening and content of a message that may need an envelope."""
        payload = _as_bytes(payload)
        if envelope is None and DELIMITER not in payload:
            opening, content = self._message_prefixes[class_id], payload
        else:
            content = envelopes.encode(envelope or _EMPTY_ENVELOPE, payload)
            opening = self._envelope_prefixes[class_id]
        if len(content) > self._payload_bytes_max:
            raise self._too_long_error(payload, len(content), location)
        return opening, content

    def _too_long_error(
        self, payload: bytes, framed_bytes: int, location: str
    ) -> LocalProtocolError:
        extra = f" ({framed_bytes} with its envelope)" if framed_bytes != len(payload) else ""
        return LocalProtocolError(
            f"the payload{location} has {len(payload)} bytes{extra}; a message of this connection "
            f"carries at most {self._payload_bytes_max}"
        )

    # Connections ---------------------------------------------------------------------------------

    def resume(
        self,
        *,
        next_number: int,
        credit_bytes: int,
        frame_bytes_max: int,
        is_other_server: bool = False,
        lost_count: int = 0,
    ) -> None:
        """The bus is there and goes on at this number: whatever we have below it is stored.

        A number that is none of ours comes from a bus that has forgotten us, as another bus has:
        what was not confirmed before, it is given under new numbers. `lost` messages that were
        confirmed it says it has not.

        Raises RemoteProtocolError when it does not accept frames as long as were handed over.
        """
        self._limit_frame_bytes(frame_bytes_max)
        self.credit_bytes = credit_bytes
        self.forgotten_count += lost_count
        ahead = (next_number - self._number_of(self.confirmed_position)) & MESSAGE_ID_MASK
        if not is_forgotten and ahead <= self._numbered_position - self.confirmed_position:
            self._drop_confirmed(self._resend_batches, self.confirmed_position + ahead)
            self._trim_confirmed()
        else:
            behind = (self._number_of(self.confirmed_position) - next_number) & MESSAGE_ID_MASK
            if (
                not is_other_server
                and behind < _HALF_NUMBER_RANGE
                and behind <= self.confirmed_position
            ):
                self.forgotten_count += behind
            self._base_number = next_number - self.confirmed_position
            for chunk in self._resend_batches:
                chunk.assign_numbers(self._number_of(chunk.first_position))
        self._released_position = self.confirmed_position

    def connection_lost(self) -> None:
        """The connection is gone: what was under way is to be written again."""
        self._resend_batches.extendleft(reversed(self._in_flight_batches))
        self._in_flight_batches.clear()
        self.in_flight_bytes = 0
        self._trim_confirmed()
        self._released_position = self.confirmed_position

    def release_batch(self) -> PublishBatch | None:
        """The next frames to write; None when there are none, or no credit."""
        chunk = None
        if self._resend_batches:
            chunk = self._release_resend()
        elif self._unnumbered_frames or len(self._pending_contents) > 1:
            chunk = self._release_unnumbered()
        elif self._pending_contents:
            chunk = self._release_single()
        if chunk is not None:
            self._in_flight_batches.append(chunk)
            self.in_flight_bytes += chunk.size_bytes
            self._released_position = chunk.end_position
        return chunk

    def _available_bytes(self, next_frame_bytes: int) -> int:
        """Bytes that may be released; for the next frame, of this size, if nothing is under way."""
        room = self.credit_bytes - self.in_flight_bytes
        return room if self._in_flight_batches else max(room, next_frame_bytes)

    def _release_resend(self) -> PublishBatch | None:
        """What was numbered on another connection."""
        chunk = self._resend_batches[0]
        room = self._room_bytes(chunk.bytes_below(chunk.first_position + 1))
        count = count_fitting(chunk.bounds, 0, max_bytes=_BATCH_BYTES_MAX, room_bytes=room)
        if not count:
            return None
        self._resend_batches.popleft()
        if count < chunk.count:
            chunk, rest = chunk.split(count)
            self._resend_batches.appendleft(rest)
        self.resent_count += count
        return chunk

    def _release_unnumbered(self) -> PublishBatch | None:
        if not self._unnumbered_frames:
            self._seal_contents()
        segment = self._unnumbered_frames[0]
        first = self._numbered_position + segment.skipped_count
        room = self._room_bytes(segment.next_frame_bytes)
        chunk = segment.pop_batch(
            max_bytes=_BATCH_BYTES_MAX,
            room_bytes=room,
            first_position=first,
            first_number=self._number_of(first),
        )
        if chunk is not None:
            self._numbered_position, segment.skipped_count = chunk.end_position, 0
            if segment.is_empty:
                self._unnumbered_frames.popleft()
        return chunk

    def _release_single(self) -> PublishBatch | None:
        """What `_release_next` does for the only message that is there."""
        if self._unchecked_class_id is not _NO_CLASS:
            self._frame_pending_contents()
        (content,) = self._pending_contents
        size = len(content) + FRAME_BYTES_MIN
        if size > self._available_bytes(size):
            return None
        first = self._numbered_position
        self._pending_contents.clear()
        opening = self._pending_prefixes.pop()
        self._numbered_position = first + 1
        return PublishBatch.from_message(
            opening, content, position=first, number=self._number_of(first)
        )

    def _seal_contents(self) -> None:
        """Make a segment of the contents."""
        contents = self._pending_contents
        if not contents:
            return
        segment = None
        if self._unchecked_class_id is not _NO_CLASS:
            segment = UnnumberedFrames.from_uniform(
                self._message_prefixes[self._unchecked_class_id], contents, DELIMITER
            )
            if segment is None:
                self._frame_pending_contents()
        self._unnumbered_frames.append(
            segment or UnnumberedFrames.from_mixed(self._pending_prefixes, contents)
        )
        self._unchecked_class_id, self._pending_prefixes, self._pending_contents = _NO_CLASS, [], []
        self._append_content = self._pending_contents.append

    def _limit_frame_bytes(self, frame_bytes_max: int) -> None:
        """The bus accepts frames of this length; 0 when it does not say."""
        frame_bytes_max = min(frame_bytes_max or self._frame_bytes_max, self._frame_bytes_max)
        shrinks = frame_bytes_max < self._payload_bytes_max + FRAME_BYTES_MIN
        if shrinks:
            self._seal_contents()
        self._payload_bytes_max = frame_bytes_max - FRAME_BYTES_MIN
        self._unchecked_bytes_max = _always_fitting_bytes(self._payload_bytes_max)
        if not shrinks:
            return
        bounds = [chunk.bounds for chunk in self._resend_batches]
        bounds += [segment.bounds for segment in self._unnumbered_frames]
        longest = max(map(longest_frame_bytes, bounds), default=0)
        if longest > frame_bytes_max:
            raise RemoteProtocolError(
                Reason.FRAME_TOO_LONG,
                f"the bus accepts frames of {frame_bytes_max} bytes; one of {longest} waits for it",
            )

    # What the bus says ---------------------------------------------------------------------------

    def confirm(self, next_number: int) -> None:
        """The bus has stored or refused everything below this number."""
        ahead = (next_number - self._number_of(self.confirmed_position)) & MESSAGE_ID_MASK
        if 0 < ahead < _HALF_NUMBER_RANGE:
            self._check_released(ahead, next_number)
            freed = self._drop_confirmed(self._in_flight_batches, self.confirmed_position + ahead)
            self.in_flight_bytes -= freed

    def refuse(self, first_number: int, count: int, error: RefusedError) -> None:
        """The bus has not stored `count` messages from this number on, and will not."""
        ahead = (first_number - self._number_of(self.confirmed_position)) & MESSAGE_ID_MASK
        if ahead >= _HALF_NUMBER_RANGE:
            return
        self._check_released(ahead + 1, first_number)
        first = self.confirmed_position + ahead
        last = min(first + count, self._released_position)
        self.refused_count += last - first
        refusals = self._refusal_by_position
        for position in range(max(first, last - _REFUSALS_MAX), last):
            refusals[position] = error
        while len(refusals) > _REFUSALS_MAX:
            del refusals[next(iter(refusals))]

    def pop_refusals(self) -> dict[int, RefusedError]:
        """What was refused since this was asked the last time, by position."""
        taken, self._refusal_by_position = self._refusal_by_position, {}
        return taken

    def _check_number_released(self, count: int, number: int) -> None:
        if self.confirmed_position + count > self._released_position:
            raise RemoteProtocolError(
                Reason.NUMBER_GAP,
                f"the bus speaks of number {number}; the next one to be written is "
                f"{self._number_of(self._released_position)}",
            )

    def _number_of(self, position: int) -> int:
        return (self._base_number + position) & MESSAGE_ID_MASK

    def _drop_confirmed(self, batches: deque[PublishBatch], position: int) -> int:
        """Forget what is below the position. Returns how many bytes that were."""
        freed = -self._partly_confirmed_bytes
        while batches and batches[0].end_position <= position:
            freed += batches.popleft().size_bytes
        self._partly_confirmed_bytes = batches[0].bytes_below(position) if batches else 0
        freed += self._partly_confirmed_bytes
        self.confirmed_position = position
        self._confirmed_bytes += freed
        return freed

    def _trim_confirmed(self) -> None:
        """Drop the confirmed part of the chunk that is to be written first."""
        if self._partly_confirmed_bytes:
            chunk = self._resend_batches[0]
            self._resend_batches[0] = chunk.split(self.confirmed_position - chunk.first_position)[1]
            self._partly_confirmed_bytes = 0

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert (
            self.confirmed_position
            <= self._released_position
            <= self._numbered_position
            <= self.published_position
        ), vars(self)
        sizes = sum(chunk.size_bytes for chunk in self._in_flight_batches)
        settled = self._partly_confirmed_bytes if self._in_flight_batches else 0
        assert self.in_flight_bytes == sizes - settled
        chunks = [*self._in_flight_batches, *self._resend_batches]
        positions = [chunk.first_position for chunk in chunks] + [self._numbered_position]
        assert all(
            chunk.end_position <= after for chunk, after in zip(chunks, positions[1:], strict=True)
        )


def _as_bytes(payload: object) -> bytes:
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise TypeError(
        f"a payload is bytes, got {type(payload).__name__}; encode it first, "
        "for example with str.encode() or json.dumps(…).encode()"
    )
