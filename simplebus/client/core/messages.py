"""Received messages: `Message` and `Batch`.

A batch holds the frames of many messages and one AckToken. `Message` objects are created when a
program iterates over a batch, and envelopes are decoded when one of their fields is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, Generic, TypeVar, cast

import numpy as np

from simplebus.client.core.acks import (
    ACKED,
    WORKING,
    AckOutcome,
    AckToken,
    nack_outcome,
    terminate_outcome,
)
from simplebus.client.core.frame_runs import FrameRun, MessageIds
from simplebus.core.limits import (
    DELIMITER_BYTES,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    MESSAGE_ID_MASK,
    PLAIN_FRAMES_MAX,
)
from simplebus.core.protocol import envelope_batch as envelopes
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frames import DELIMITER, Integers

_TIME_FIELDS = 0b000111
_TEXT_FIELDS = (0b001000, 0b010000, 0b100000)
_UNKNOWN_FIELDS = 0b11000000
_LENGTH_DTYPE: np.dtype[np.uint16] = np.dtype(">u2")
_DELIMITER_PREFIX = DELIMITER[:-1]


def uniform_envelope_bytes(run: FrameRun) -> int | None:
    """Return the length of each envelope in the run; None if they differ or are byte-stuffed."""
    raw = run.raw
    if run.count == 1 or raw.count(_DELIMITER_PREFIX) != run.count:
        return None
    shortest = run.stride if run.bounds is None else int(np.diff(run.bounds).min())
    if shortest == FRAME_BYTES_MIN or raw[HEADER_BYTES] & _UNKNOWN_FIELDS:
        return None
    fields = raw[HEADER_BYTES]
    offset = HEADER_BYTES + 1 + 8 * (fields & _TIME_FIELDS).bit_count()
    length_offsets = []
    for text_field in _TEXT_FIELDS:
        if fields & text_field:
            length_offsets.append(offset)
            offset += 2 + int.from_bytes(raw[offset : offset + 2], "big")
    if offset > shortest - DELIMITER_BYTES or not _has_uniform_fields(run, length_offsets):
        return None
    return offset - HEADER_BYTES


def _has_uniform_fields(run: FrameRun, length_offsets: list[int]) -> bool:
    """Return True if all envelopes have the fields of the first one, with the same text lengths."""
    raw = run.raw
    if run.count <= PLAIN_FRAMES_MAX:
        parts = [
            slice(HEADER_BYTES, HEADER_BYTES + 1),
            *(slice(offset, offset + 2) for offset in length_offsets),
        ]
        frame_offsets = (
            range(0, len(raw), run.stride) if run.bounds is None else run.bounds[:-1].tolist()
        )
        return all(
            raw[begin + part.start : begin + part.stop] == raw[part]
            for begin in frame_offsets
            for part in parts
        )
    data = np.frombuffer(raw, np.uint8)
    lengths = frames.unaligned(data, _LENGTH_DTYPE)
    frame_offsets = np.arange(0, data.size, run.stride) if run.bounds is None else run.bounds[:-1]
    if (data[frame_offsets + HEADER_BYTES] != raw[HEADER_BYTES]).any():
        return False
    return not any(
        (lengths[frame_offsets + offset] != lengths[offset]).any() for offset in length_offsets
    )


REPLY_TO_HEADER = "reply-to"
"""Header with the channel on which the publisher expects a reply."""

_REPR_BYTES_MAX = 40
_EMPTY_ENVELOPE = Envelope()

T = TypeVar("T")
"""Type of a message's value."""


class Message(Generic[T]):
    """A received message.

    Messages compare by identity: a redelivery is a new object.

    Example:
        async with bus.subscribe("orders", auto_ack=False) as orders:
            async for order in orders:
                print(order.sequence, order.channel, order.payload)
                order.ack()
    """

    __slots__ = ("_ack_token", "_index", "payload")

    def __init__(self, payload: bytes, index: int, ack_token: AckToken) -> None:
        self.payload = payload
        """The bytes that the publisher wrote."""
        self._index = index
        self._ack_token = ack_token

    @property
    def value(self) -> T:
        """The payload decoded to the subscribed type.

        The payload itself if the subscription names a class id or class name. Decoded on each
        access.

        Raises:
            DecodeError: If the payload is not a value of the subscribed type.
        """
        decode = self._ack_token.owner.decode
        return cast(T, self.payload if decode is None else decode(self.payload))

    @property
    def class_id(self) -> int:
        """Id of the message class, 0 to 65535."""
        return self._ack_token.class_id

    @property
    def sequence(self) -> int:
        """Number of the message within its class, counted from 0.

        A server without a data directory begins at 0 again when it restarts.
        """
        return int(self._ack_token.sequences[self._index])

    @property
    def message_id(self) -> int:
        """The low 31 bits of the sequence."""
        return self.sequence & MESSAGE_ID_MASK

    @property
    def attempt(self) -> int:
        """Number of this delivery: 1 for the first, 0 if unknown.

        It is unknown for a message that another subscription left unacknowledged.
        """
        return self._ack_token.attempt

    @property
    def redelivered(self) -> bool:
        """True if the message may have been delivered, and perhaps processed, before."""
        return self._ack_token.attempt != 1

    # Metadata ------------------------------------------------------------------------------------

    @property
    def envelope(self) -> Envelope:
        """The metadata of the message.

        Raises:
            RemoteProtocolError: If the server sent an invalid envelope.
        """
        return _EMPTY_ENVELOPE

    @property
    def envelope_content(self) -> bytes:
        """Encoded envelope and payload; empty for a message without an envelope. Internal."""
        return b""

    @property
    def channel(self) -> str:
        """Dotted channel name; empty for a message without a channel."""
        return self.envelope.channel

    @property
    def key(self) -> bytes:
        """Key of the message; empty for a message without a key."""
        return self.envelope.key

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Pairs of header name and value in publisher order. A name may occur several times."""
        return self.envelope.headers

    @property
    def published(self) -> int | None:
        """Microseconds since 1970 by the publisher's clock; None if the publisher set no time."""
        return self.envelope.published

    @property
    def expires_ms(self) -> int | None:
        """Lifetime in milliseconds after acceptance by the server; None if it never expires."""
        return self.envelope.expires_ms

    @property
    def is_request(self) -> bool:
        """True if the publisher waits for a reply."""
        return any(name == REPLY_TO_HEADER for name, _ in self.headers)

    # Acknowledgement -----------------------------------------------------------------------------

    def ack(self, owner: object = None) -> None:
        """Acknowledge the message: it was processed and is not redelivered.

        Args:
            owner: If given, the subscription that must have received the message.

        Raises:
            LocalProtocolError: If the message belongs to another subscription or was fetched.
        """
        if owner is not None:
            self._ack_token.check_owner(owner, self)
        self._ack_token.record_outcome(ACKED, self._index, self._index + 1)

    def nack(self, delay: float | None = None, error: object = None) -> None:
        """Reject the message, so that it is redelivered.

        Args:
            delay: Seconds until the redelivery. None uses the backoff of the subscription.
            error: Exception or text, of which up to 1,024 bytes are sent. The server stores it
                in the dead letter if the message reaches its maximum deliveries.

        Raises:
            LocalProtocolError: If the message was fetched.
            ValueError: If `delay` is negative or longer than 365 days.
            TypeError: If `delay` is not a number.
        """
        self._ack_token.record_outcome(nack_outcome(delay, error), self._index, self._index + 1)

    def terminate(self, error: object = None) -> None:
        """Reject the message for good: it becomes a dead letter now and is not redelivered.

        Args:
            error: Exception or text, as for `nack`, to be stored in the dead letter.

        Raises:
            LocalProtocolError: If the message was fetched.
        """
        self._ack_token.record_outcome(terminate_outcome(error), self._index, self._index + 1)

    def working(self) -> None:
        """Restart the ack timeout, because processing the message takes longer.

        Raises:
            LocalProtocolError: If the message was fetched.
        """
        self._ack_token.record_outcome(WORKING, self._index, self._index + 1)

    def settle(self, outcome: AckOutcome) -> None:
        """Record `outcome` if the handler of the message has not settled it itself. Internal."""
        if not self._ack_token.is_decided(self._index):
            self._ack_token.record_outcome(outcome, self._index, self._index + 1)

    def __repr__(self) -> str:
        payload = self.payload
        payload_text = repr(payload) if len(payload) <= _REPR_BYTES_MAX else f"{len(payload)} bytes"
        suffix = ", redelivered" if self.redelivered else ""
        return f"<Message {self.sequence} of class {self.class_id}: {payload_text}{suffix}>"


class _EnvelopedMessage(Message[T]):
    """A message with an envelope."""

    __slots__ = ("_content", "_envelope")

    def __init__(self, payload: bytes, index: int, ack_token: AckToken, content: bytes) -> None:
        super().__init__(payload, index, ack_token)
        self._content = content
        self._envelope: Envelope | None = None

    @property
    def envelope(self) -> Envelope:
        if self._envelope is None:
            self._envelope = envelopes.decode(self._content)[0]
        return self._envelope

    @property
    def envelope_content(self) -> bytes:
        return self._content


class Batch:
    """Messages of one class, in ascending order of their sequences.

    Iterate over a batch for its `Message` objects, or read `payloads`, `data` and `bounds` to
    process many messages at once. `len(batch)` is the number of messages, called n below.

    Example:
        async for batch in orders.batches():
            for order in batch:
                print(order.payload)
    """

    __slots__ = ("_ack_token", "_first_index", "_run")

    def __init__(self, run: FrameRun, ack_token: AckToken, *, first_index: int = 0) -> None:
        self._run = run
        self._ack_token = ack_token
        self._first_index = first_index
        """Index of the first message in the AckToken."""

    @property
    def class_id(self) -> int:
        """Id of the message class, 0 to 65535."""
        return self._ack_token.class_id

    @property
    def attempt(self) -> int:
        """Number of this delivery, equal for all messages; see `Message.attempt`."""
        return self._ack_token.attempt

    @property
    def redelivered(self) -> bool:
        """True if the messages may have been delivered, and perhaps processed, before."""
        return self._ack_token.attempt != 1

    @property
    def is_alive(self) -> bool:
        """True if the server still accepts acks for these messages."""
        return self._ack_token.is_ack_wanted

    @property
    def is_late(self) -> bool:
        """True if the messages were redelivered or overtaken by later ones."""
        return not self._ack_token.arrival_index

    @property
    def sequences(self) -> MessageIds:
        """The n ascending sequences.

        A range if they are contiguous, otherwise an int64 array of shape (n,).
        """
        return self._ack_token.sequences[self._first_index : self._first_index + self._run.count]

    @property
    def data(self) -> memoryview:
        """The n frames back to back: frame header, content and delimiter of each."""
        return memoryview(self._run.raw)

    @property
    def bounds(self) -> Integers:
        """Offsets of the frames in `data`, an int64 array of shape (n + 1,).

        Frame i is `data[bounds[i]:bounds[i + 1]]`.
        """
        run = self._run
        if run.bounds is None:
            return np.arange(0, len(run.raw) + 1, run.stride, dtype=np.int64)
        return run.bounds

    @property
    def stride(self) -> int:
        """Bytes of each frame if all have the same length, otherwise 0."""
        return self._run.stride if self._run.bounds is None else 0

    @property
    def size(self) -> int:
        """Bytes of all frames."""
        return len(self._run.raw)

    @property
    def payloads(self) -> list[bytes]:
        """The n payloads in order. Each access creates a new list."""
        return self._slice_payloads(0, self._run.count)

    def _slice_payloads(self, first: int, last: int) -> list[bytes]:
        run = self._run
        if run.frame_type == frames.MESSAGE:
            return run.contents(first, last)
        envelope_bytes = uniform_envelope_bytes(run)
        if envelope_bytes is not None:
            return run.contents(first, last, skip=envelope_bytes)
        return list(map(envelopes.extract_payload, run.contents(first, last)))

    def messages(self, first: int, last: int) -> tuple[Iterator[bytes], Iterator[Message[Any]]]:
        """Create the messages first..last-1 lazily.

        Returns:
            Iterator of the payloads and iterator of the messages. The messages are made from the
            first iterator, so its `length_hint` is the number of messages that were not read yet.
        """
        if self._run.count == 1 and last - first == 1:
            return self._single_message()
        payloads = iter(self._slice_payloads(first, last))
        indexes = range(self._first_index + first, self._first_index + last)
        ack_tokens = repeat(self._ack_token)
        if self._run.frame_type == frames.MESSAGE:
            return payloads, map(Message, payloads, indexes, ack_tokens)
        contents = self._run.contents(first, last)
        return payloads, map(_EnvelopedMessage, payloads, indexes, ack_tokens, contents)

    def _single_message(self) -> tuple[Iterator[bytes], Iterator[Message[Any]]]:
        """Create the only message lazily, as `messages` does."""
        content, indexes, ack_tokens = self._run.content, (self._first_index,), (self._ack_token,)
        if self._run.frame_type == frames.MESSAGE:
            payloads = iter((content,))
            return payloads, map(Message, payloads, indexes, ack_tokens)
        payloads = iter((envelopes.extract_payload(content),))
        return payloads, map(_EnvelopedMessage, payloads, indexes, ack_tokens, (content,))

    def part(self, first: int, last: int) -> Batch:
        """Return the messages first..last-1 as a separate batch."""
        return Batch(
            self._run.slice(first, last), self._ack_token, first_index=self._first_index + first
        )

    # Acknowledgement -----------------------------------------------------------------------------

    def ack(self, owner: object = None) -> None:
        """Acknowledge all messages.

        Args:
            owner: If given, the subscription that must have received the messages.

        Raises:
            LocalProtocolError: If the messages belong to another subscription or were fetched.
        """
        if owner is not None:
            self._ack_token.check_owner(owner, self)
        self._ack_token.record_outcome(
            ACKED, self._first_index, self._first_index + self._run.count
        )

    def nack(self, delay: float | None = None, error: object = None) -> None:
        """Reject all messages, so that they are redelivered; see `Message.nack`."""
        self._ack_token.record_outcome(
            nack_outcome(delay, error), self._first_index, self._first_index + self._run.count
        )

    def terminate(self, error: object = None) -> None:
        """Reject all messages for good; see `Message.terminate`."""
        self._ack_token.record_outcome(
            terminate_outcome(error), self._first_index, self._first_index + self._run.count
        )

    def working(self) -> None:
        """Restart the ack timeout of all messages; see `Message.working`."""
        self._ack_token.record_outcome(
            WORKING, self._first_index, self._first_index + self._run.count
        )

    def settle(self, outcome: tuple[int, bytes], first: int, last: int) -> None:
        """Record `outcome` for the messages first..last-1 that the program has not settled."""
        self._ack_token.settle(outcome, self._first_index + first, self._first_index + last)

    def __len__(self) -> int:
        return self._run.count

    def __iter__(self) -> Iterator[Message[Any]]:
        return self.messages(0, self._run.count)[1]

    def __repr__(self) -> str:
        sequences = self.sequences
        suffix = ", redelivered" if self.redelivered else ""
        return (
            f"<Batch of class {self.class_id}: {len(self)} messages, "
            f"{int(sequences[0])} to {int(sequences[-1])}{suffix}>"
        )
