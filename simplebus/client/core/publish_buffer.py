"""Published messages until the server has confirmed them.

A position counts the messages of this client from 0 and never wraps; the message number on the wire
follows from it. After a reconnect the server sends the number that it expects next. All messages
from this number on are sent again, in order and before new messages.

    │ confirmed │ in flight │ resend │ unnumbered frames │ pending contents │
    0       confirmed    released  numbered                            published

Invariant: confirmed <= released <= numbered <= published
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

# Batches are at most this long, so that requests and acks can be sent between them.
_BATCH_BYTES_MAX = 256 * 1024
# If more refusals wait for `pop_refusals`, the oldest are dropped.
_REFUSALS_MAX = 65_536
_HALF_NUMBER_RANGE = 1 << (MESSAGE_ID_BITS - 1)
_EMPTY_ENVELOPE = Envelope()
_DELIMITER_PREFIX = DELIMITER[:-1]
"""Bytes that the content of an envelope contains only with byte stuffing behind them."""
_NO_CLASS = cast(int, object())
"""Differs from every class id, including invalid ones."""


def _always_fitting_bytes(payload_bytes_max: int, envelope: Envelope = _EMPTY_ENVELOPE) -> int:
    """Return a payload length that fits even in an envelope with the maximum of byte stuffing."""
    return payload_bytes_max // 4 * 3 - len(envelopes.encode(envelope, b""))


class PublishBuffer:
    """Unconfirmed messages of one client, across connections.

    The bytes in flight, sent on this connection and not confirmed, stay within the credit, except
    that one frame may always be sent. If a publish method raises, none of its messages was
    published.

    A program that assigns its own message numbers may skip some; the skipped positions have no
    message.

    With `late_confirms`, a flag in a message lets the server delay its Confirm, unless messages are
    sent in large numbers. `require_confirm` forbids the delay for given positions. While one of
    them is unconfirmed, no message has the flag.
    """

    def __init__(
        self,
        *,
        frame_bytes_max: int,
        name_class: Callable[[int], None],
        late_confirms: bool = False,
    ) -> None:
        self.published_position = 0
        """Number of published messages, which is the position of the next one."""
        self.confirmed_position = 0
        """All messages below this position were stored or refused by the server."""
        self.published_bytes = 0
        """Bytes of the frames of all published messages."""
        self.credit_bytes = CREDIT_BYTES
        """Bytes that may be in flight: a default until the server has sent its limit."""
        self.refused_count = 0
        self.resent_count = 0
        self.forgotten_count = 0
        """Confirmed messages that the server has lost."""
        self._frame_bytes_max = frame_bytes_max
        self._payload_bytes_max = frame_bytes_max - FRAME_BYTES_MIN
        self._unchecked_bytes_max = _always_fitting_bytes(self._payload_bytes_max)
        self._name_class = name_class
        self._message_prefixes: dict[int, bytes] = {}
        self._envelope_prefixes: dict[int, bytes] = {}
        self._unchecked_class_id = _NO_CLASS
        """If not _NO_CLASS, all pending contents are unchecked payloads of this class and have no
        prefixes.
        """
        self._pending_contents: list[bytes] = []
        self._append_content = self._pending_contents.append
        self._pending_prefixes: list[bytes] = []
        """Frame prefixes of the pending contents; empty while the contents are unchecked."""
        self._unnumbered_frames: deque[UnnumberedFrames] = deque()
        self._resend_batches: deque[PublishBatch] = deque()
        """Numbered batches that were not sent on this connection."""
        self._in_flight_batches: deque[PublishBatch] = deque()
        """Batches sent on this connection."""
        self.in_flight_bytes = 0
        """Bytes sent on this connection and not confirmed."""
        self._partly_confirmed_bytes = 0
        """Confirmed bytes of the oldest batch."""
        self._confirmed_bytes = 0
        self._released_position = self._numbered_position = 0
        self._base_number = 0
        """Message number of position 0."""
        self._has_fixed_numbers = False
        """True if messages must not be renumbered; see `fix_numbers`."""
        self._refusal_by_position: dict[int, RefusedError] = {}
        self._late_confirms = late_confirms
        self._required_position = 0
        """The server must not delay the Confirm of messages below this position."""
        self._is_confirm_late = False
        """True if the Confirm of the messages released last may wait."""

    @property
    def stored_before_count(self) -> int:
        """Messages of this publisher name that were stored or refused before the first one here.

        It is 0 if the name was new to the server, and changes if the server forgets the name.
        """
        return self._base_number

    @property
    def accepted_frame_bytes_max(self) -> int:
        """Bytes of the longest frame that may be published."""
        return self._payload_bytes_max + FRAME_BYTES_MIN

    @property
    def first_unconfirmed_number(self) -> int:
        """The lowest message number that is not confirmed."""
        return self._number_of(self.confirmed_position)

    @property
    def unconfirmed_bytes(self) -> int:
        """Bytes of the frames of unconfirmed messages."""
        return self.published_bytes - self._confirmed_bytes

    @property
    def has_credit(self) -> bool:
        """True if the credit allows one more message, so that it need not wait in the buffer."""
        return self.unconfirmed_bytes < self.credit_bytes

    @property
    def unreleased_bytes(self) -> int:
        """Unconfirmed bytes that were not released for sending on this connection."""
        return self.unconfirmed_bytes - self.in_flight_bytes

    @property
    def has_unreleased(self) -> bool:
        """True if any messages were not released for sending on this connection."""
        return self._released_position != self.published_position

    @property
    def released_position(self) -> int:
        """All messages below this position were released for sending."""
        return self._released_position

    # Publishing ----------------------------------------------------------------------------------

    def publish(self, payload: bytes, class_id: int, envelope: Envelope | None = None) -> int:
        """Add a message and return its position.

        Raises:
            LocalProtocolError: If the frame would be longer than the server accepts.
            ValueError: If `class_id` is not a valid class id.
            TypeError: If `payload` is not bytes.
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

    def publish_encoded(self, content: bytes, class_id: int, payload_bytes: int) -> int:
        """Add a message whose envelope is encoded already, and return its position.

        Args:
            content: Valid content of an Envelope frame.
            class_id: Class of the message.
            payload_bytes: Length of its payload, for the error message.

        Raises:
            LocalProtocolError, ValueError: As `publish`.
        """
        if class_id not in self._envelope_prefixes:
            self._name_new_class(class_id)
        if len(content) > self._payload_bytes_max:
            raise self._too_long_error(payload_bytes, len(content), "")
        self._append_framed(self._envelope_prefixes[class_id], content)
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
        """Check the pending payloads, and give each its frame prefix."""
        class_id, self._unchecked_class_id = self._unchecked_class_id, _NO_CLASS
        for index, payload in enumerate(self._pending_contents):
            prefix, content = self._frame_message(payload, class_id, None)
            self.published_bytes += len(content) - len(payload)
            self._pending_contents[index] = content
            self._pending_prefixes.append(prefix)

    def publish_many(
        self, payloads: Iterable[bytes], class_id: int, envelope: Envelope | None = None
    ) -> int:
        """Add all messages, or none of them if it raises; see `publish`.

        Returns:
            Position of the last message; without messages, that of the previous one.
        """
        if class_id not in self._message_prefixes:
            self._name_new_class(class_id)
        payload_list = list(payloads)
        if payload_list and set(map(type, payload_list)) != {bytes}:
            payload_list = list(map(as_bytes, payload_list))
        if len(payload_list) > PLAIN_FRAMES_MAX and self._append_uniform(
            payload_list, class_id, envelope
        ):
            return self.published_position - 1
        framed = [
            self._frame_message(payload, class_id, envelope, f" at index {index}")
            for index, payload in enumerate(payload_list)
        ]
        for prefix, content in framed:
            self._append_framed(prefix, content)
        self.published_position += len(payload_list)
        return self.published_position - 1

    def publish_runs(
        self, runs: list[tuple[int, list[bytes]]], envelope: Envelope | None = None
    ) -> int:
        """Add messages of several classes in this order, or none of them if it raises.

        Args:
            runs: Pairs of a class id and its payloads.
            envelope: Metadata of every message.

        Returns:
            Position of the last message.

        Raises:
            LocalProtocolError, ValueError, TypeError: As `publish`.
        """
        if len(runs) > 1:
            self._check_runs(runs, envelope)
        for class_id, payloads in runs:
            self.publish_many(payloads, class_id, envelope)
        return self.published_position - 1

    def _check_runs(self, runs: list[tuple[int, list[bytes]]], envelope: Envelope | None) -> None:
        """Raise the error that `publish_many` would raise for any of the messages."""
        for class_id, _ in runs:
            if class_id not in self._message_prefixes:
                self._name_new_class(class_id)
        payloads = [payload for _, run in runs for payload in run]
        if set(map(type, payloads)) == {bytes}:
            always_fitting_bytes = _always_fitting_bytes(
                self._payload_bytes_max, envelope or _EMPTY_ENVELOPE
            )
            if max(map(len, payloads)) <= always_fitting_bytes:
                return
        class_ids = (class_id for class_id, run in runs for _ in run)
        for index, (payload, class_id) in enumerate(zip(payloads, class_ids, strict=True)):
            self._frame_message(payload, class_id, envelope, f" at index {index}")

    def _append_uniform(
        self, payloads: list[bytes], class_id: int, envelope: Envelope | None
    ) -> bool:
        """Add all messages as one byte array. Return False if they must be checked one by one."""
        if envelope is None:
            prefix, contents, marker = self._message_prefixes[class_id], payloads, DELIMITER
        else:
            prefix, marker = self._envelope_prefixes[class_id], _DELIMITER_PREFIX
            envelope_content = envelopes.unstuff(envelopes.encode(envelope, b""))
            contents = [envelope_content + payload for payload in payloads]
        unnumbered = UnnumberedFrames.from_uniform(prefix, contents, marker)
        if unnumbered is None or (
            unnumbered.size_bytes > self._payload_bytes_max
            and longest_frame_bytes(unnumbered.bounds) - FRAME_BYTES_MIN > self._payload_bytes_max
        ):
            return False
        self._seal_contents()
        self._unnumbered_frames.append(unnumbered)
        self.published_bytes += unnumbered.size_bytes
        self.published_position += unnumbered.count
        return True

    def publish_frames(
        self,
        data: bytearray | memoryview,
        bounds: FrameBounds,
        class_id: int,
        *,
        skipped_count: int = 0,
    ) -> int:
        """Add messages that are encoded as frames already; they are numbered here.

        Args:
            data: A delimiter and, behind it, valid frames of one class, none longer than
                `accepted_frame_bytes_max`.
            bounds: Offsets of the frames behind that delimiter, and the end of the last one.
            class_id: Class of all messages.
            skipped_count: Positions to skip before the first message. Only for a program with
                its own message numbers, of which less than 2^30 are in flight.

        Returns:
            Position of the last message.
        """
        if class_id not in self._message_prefixes:
            self._name_new_class(class_id)
        self._seal_contents()
        unnumbered = UnnumberedFrames(data, bounds, len(bounds) - 1, skipped_count=skipped_count)
        self._unnumbered_frames.append(unnumbered)
        self.published_bytes += unnumbered.size_bytes
        self.published_position += skipped_count + unnumbered.count
        return self.published_position - 1

    def has_class(self, class_id: int) -> bool:
        """Return True if the class was named to the server."""
        return class_id in self._message_prefixes

    def add_class(self, class_id: int) -> None:
        """Note that the class was named to the server."""
        self._message_prefixes[class_id] = encode_frame_prefix(frames.MESSAGE, class_id)
        self._envelope_prefixes[class_id] = encode_frame_prefix(frames.ENVELOPE, class_id)

    def remove_class(self, class_id: int) -> None:
        """Note that the server refused the class."""
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
        """Return frame prefix and content of a message, with an envelope if it needs one."""
        payload = as_bytes(payload)
        if envelope is None and DELIMITER not in payload:
            prefix, content = self._message_prefixes[class_id], payload
        else:
            content = envelopes.encode(envelope or _EMPTY_ENVELOPE, payload)
            prefix = self._envelope_prefixes[class_id]
        if len(content) > self._payload_bytes_max:
            raise self._too_long_error(len(payload), len(content), location)
        return prefix, content

    def _too_long_error(
        self, payload_bytes: int, framed_bytes: int, location: str
    ) -> LocalProtocolError:
        envelope_note = (
            f" ({framed_bytes} with its envelope)" if framed_bytes != payload_bytes else ""
        )
        return LocalProtocolError(
            f"the payload{location} has {payload_bytes} bytes{envelope_note}; a message of this "
            f"connection carries at most {self._payload_bytes_max}"
        )

    # Connections ---------------------------------------------------------------------------------

    def fix_numbers(self) -> None:
        """Let `resume` fail instead of renumbering messages at the same server.

        For programs that share a name and publish the same messages under the same numbers:
        renumbered messages would be stored twice.
        """
        self._has_fixed_numbers = True

    def resume(
        self,
        *,
        next_number: int,
        credit_bytes: int,
        frame_bytes_max: int,
        is_other_server: bool = False,
        lost_count: int = 0,
    ) -> None:
        """Continue on a new connection.

        Messages below `next_number` are stored. If this publisher is new to the server, all
        unconfirmed messages are renumbered.

        Args:
            next_number: The message number that the server expects next.
            credit_bytes: Bytes that may be in flight.
            frame_bytes_max: Longest frame that the server accepts; 0 if unknown.
            is_other_server: True if earlier messages were confirmed by another server.
            lost_count: Confirmed messages that the server has lost.

        Raises:
            RemoteProtocolError: If a published frame is longer than the server accepts, or fixed
                numbers would change.
        """
        self._limit_frame_bytes(frame_bytes_max)
        self.credit_bytes = credit_bytes
        self.forgotten_count += lost_count
        advance_count = (next_number - self._number_of(self.confirmed_position)) & MESSAGE_ID_MASK
        if (
            not is_other_server
            and advance_count <= self._numbered_position - self.confirmed_position
        ):
            self._drop_confirmed(self._resend_batches, self.confirmed_position + advance_count)
            self._trim_confirmed()
        else:
            if self._has_fixed_numbers and not is_other_server:
                raise RemoteProtocolError(
                    Reason.TAKEN_OVER,
                    f"the server expects message {next_number}, which this program has not sent: "
                    "another program with the same name has published meanwhile",
                )
            missing_count = (
                self._number_of(self.confirmed_position) - next_number
            ) & MESSAGE_ID_MASK
            if (
                not is_other_server
                and missing_count < _HALF_NUMBER_RANGE
                and missing_count <= self.confirmed_position
            ):
                self.forgotten_count += missing_count
            self._base_number = next_number - self.confirmed_position
            for batch in self._resend_batches:
                batch.assign_numbers(self._number_of(batch.first_position))
        self._released_position = self.confirmed_position

    def connection_lost(self) -> None:
        """Prepare the messages in flight to be sent again."""
        self._resend_batches.extendleft(reversed(self._in_flight_batches))
        self._in_flight_batches.clear()
        self.in_flight_bytes = 0
        self._trim_confirmed()
        self._released_position = self.confirmed_position
        self._is_confirm_late = False

    def release_batch(self) -> PublishBatch | None:
        """Return the next frames to send; None if no frames wait or the credit is used up."""
        batch = None
        if self._resend_batches:
            batch = self._release_resend()
        elif self._unnumbered_frames or len(self._pending_contents) > 1:
            batch = self._release_unnumbered()
        elif self._pending_contents:
            batch = self._release_single()
        if batch is not None:
            self._in_flight_batches.append(batch)
            self.in_flight_bytes += batch.size_bytes
            self._released_position = batch.end_position
            self._is_confirm_late = batch.has_late_confirm
        return batch

    def _allows_late_confirm(self) -> bool:
        """Return True if nothing waits for the Confirm of the messages to be released next."""
        return self._late_confirms and self._required_position <= self.confirmed_position

    def _available_bytes(self, next_frame_bytes: int) -> int:
        """Return the bytes that may be released; the next frame if nothing is in flight."""
        credit_left = self.credit_bytes - self.in_flight_bytes
        return credit_left if self._in_flight_batches else max(credit_left, next_frame_bytes)

    def _release_resend(self) -> PublishBatch | None:
        """Return the next frames that were numbered on an earlier connection."""
        batch = self._resend_batches[0]
        available_bytes = self._available_bytes(batch.bytes_below(batch.first_position + 1))
        count = count_fitting(
            batch.bounds, 0, max_bytes=_BATCH_BYTES_MAX, available_bytes=available_bytes
        )
        if not count:
            return None
        self._resend_batches.popleft()
        if count < batch.count:
            batch, remaining = batch.split(count)
            self._resend_batches.appendleft(remaining)
        self.resent_count += count
        batch.set_late_confirm(False)
        return batch

    def _release_unnumbered(self) -> PublishBatch | None:
        if not self._unnumbered_frames:
            self._seal_contents()
        unnumbered = self._unnumbered_frames[0]
        first = self._numbered_position + unnumbered.skipped_count
        available_bytes = self._available_bytes(unnumbered.next_frame_bytes)
        batch = unnumbered.pop_batch(
            max_bytes=_BATCH_BYTES_MAX,
            available_bytes=available_bytes,
            first_position=first,
            first_number=self._number_of(first),
            allows_late_confirm=self._allows_late_confirm(),
        )
        if batch is not None:
            self._numbered_position, unnumbered.skipped_count = batch.end_position, 0
            if unnumbered.is_empty:
                self._unnumbered_frames.popleft()
        return batch

    def _release_single(self) -> PublishBatch | None:
        """Return the frame of the only pending message."""
        if self._unchecked_class_id is not _NO_CLASS:
            self._frame_pending_contents()
        (content,) = self._pending_contents
        size = len(content) + FRAME_BYTES_MIN
        if size > self._available_bytes(size):
            return None
        first = self._numbered_position
        self._pending_contents.clear()
        prefix = self._pending_prefixes.pop()
        self._numbered_position = first + 1
        return PublishBatch.from_message(
            prefix,
            content,
            position=first,
            number=(self._base_number + first) & MESSAGE_ID_MASK,
            has_late_confirm=self._allows_late_confirm(),
        )

    def _seal_contents(self) -> None:
        """Join the pending contents to frames."""
        contents = self._pending_contents
        if not contents:
            return
        unnumbered = None
        if self._unchecked_class_id is not _NO_CLASS:
            unnumbered = UnnumberedFrames.from_uniform(
                self._message_prefixes[self._unchecked_class_id], contents, DELIMITER
            )
            if unnumbered is None:
                self._frame_pending_contents()
        self._unnumbered_frames.append(
            unnumbered or UnnumberedFrames.from_mixed(self._pending_prefixes, contents)
        )
        self._unchecked_class_id, self._pending_prefixes, self._pending_contents = _NO_CLASS, [], []
        self._append_content = self._pending_contents.append

    def _limit_frame_bytes(self, frame_bytes_max: int) -> None:
        """Apply the server's limit on the frame length; 0 if unknown."""
        frame_bytes_max = min(frame_bytes_max or self._frame_bytes_max, self._frame_bytes_max)
        shrinks = frame_bytes_max < self._payload_bytes_max + FRAME_BYTES_MIN
        if shrinks:
            self._seal_contents()
        self._payload_bytes_max = frame_bytes_max - FRAME_BYTES_MIN
        self._unchecked_bytes_max = _always_fitting_bytes(self._payload_bytes_max)
        if not shrinks:
            return
        bounds = [batch.bounds for batch in self._resend_batches]
        bounds += [unnumbered.bounds for unnumbered in self._unnumbered_frames]
        longest_bytes = max(map(longest_frame_bytes, bounds), default=0)
        if longest_bytes > frame_bytes_max:
            raise RemoteProtocolError(
                Reason.FRAME_TOO_LONG,
                f"the server accepts frames of up to {frame_bytes_max} bytes, but an unconfirmed "
                f"message has {longest_bytes}",
            )

    # Confirms ------------------------------------------------------------------------------------

    def require_confirm(self, end: int) -> bool:
        """Let the server confirm the messages below position `end` without waiting.

        Returns:
            True if they were all released and their Confirm may wait, so that a frame must be sent
            that ends the wait.
        """
        if end > self._required_position:
            self._required_position = end
        is_in_flight = self.confirmed_position < end <= self._released_position
        if not (self._is_confirm_late and is_in_flight):
            return False
        self._is_confirm_late = False
        return True

    def require_credit(self) -> bool:
        """Return True, once, if messages wait for credit that a late Confirm brings."""
        if not self._is_confirm_late or not self.has_unreleased:
            return False
        self._is_confirm_late = False
        return self.in_flight_bytes > 0

    def confirm(self, next_number: int) -> None:
        """Remove the messages below `next_number`, which the server has stored or refused."""
        advance_count = (next_number - self._number_of(self.confirmed_position)) & MESSAGE_ID_MASK
        if 0 < advance_count < _HALF_NUMBER_RANGE:
            self._check_number_released(advance_count, next_number)
            freed_bytes = self._drop_confirmed(
                self._in_flight_batches, self.confirmed_position + advance_count
            )
            self.in_flight_bytes -= freed_bytes

    def refuse(self, first_number: int, count: int, error: RefusedError) -> None:
        """Record that the server refused `count` messages from `first_number` on."""
        offset = (first_number - self._number_of(self.confirmed_position)) & MESSAGE_ID_MASK
        if offset >= _HALF_NUMBER_RANGE:
            return
        self._check_number_released(offset + 1, first_number)
        first = self.confirmed_position + offset
        last = min(first + count, self._released_position)
        self.refused_count += last - first
        refusals = self._refusal_by_position
        for position in range(max(first, last - _REFUSALS_MAX), last):
            refusals[position] = error
        while len(refusals) > _REFUSALS_MAX:
            del refusals[next(iter(refusals))]

    @property
    def has_refusals(self) -> bool:
        """True if `pop_refusals` returns any."""
        return bool(self._refusal_by_position)

    def pop_refusals(self) -> dict[int, RefusedError]:
        """Return the refusals since the previous call, by position."""
        refusals, self._refusal_by_position = self._refusal_by_position, {}
        return refusals

    def _check_number_released(self, count: int, number: int) -> None:
        if self.confirmed_position + count > self._released_position:
            raise RemoteProtocolError(
                Reason.NUMBER_GAP,
                f"the server sent a confirm or an error for message number {number}, but the next "
                f"number to be sent is {self._number_of(self._released_position)}",
            )

    def _number_of(self, position: int) -> int:
        return (self._base_number + position) & MESSAGE_ID_MASK

    def _drop_confirmed(self, batches: deque[PublishBatch], position: int) -> int:
        """Remove the messages below `position`. Return the number of bytes they had."""
        freed_bytes = -self._partly_confirmed_bytes
        while batches and batches[0].end_position <= position:
            freed_bytes += batches.popleft().size_bytes
        self._partly_confirmed_bytes = batches[0].bytes_below(position) if batches else 0
        freed_bytes += self._partly_confirmed_bytes
        self.confirmed_position = position
        self._confirmed_bytes += freed_bytes
        return freed_bytes

    def _trim_confirmed(self) -> None:
        """Cut the confirmed messages off the first batch to resend."""
        if self._partly_confirmed_bytes:
            batch = self._resend_batches[0]
            self._resend_batches[0] = batch.split(self.confirmed_position - batch.first_position)[1]
            self._partly_confirmed_bytes = 0

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert (
            self.confirmed_position
            <= self._released_position
            <= self._numbered_position
            <= self.published_position
        ), vars(self)
        size_bytes = sum(batch.size_bytes for batch in self._in_flight_batches)
        confirmed_bytes = self._partly_confirmed_bytes if self._in_flight_batches else 0
        assert self.in_flight_bytes == size_bytes - confirmed_bytes
        batches = [*self._in_flight_batches, *self._resend_batches]
        positions = [batch.first_position for batch in batches] + [self._numbered_position]
        assert all(
            batch.end_position <= after for batch, after in zip(batches, positions[1:], strict=True)
        )


def as_bytes(payload: object) -> bytes:
    """Return a payload as bytes. Raises TypeError if it is neither bytes nor a buffer."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise TypeError(
        f"a payload is bytes, got {type(payload).__name__}; encode it first, "
        "for example with str.encode() or json.dumps(…).encode()"
    )
