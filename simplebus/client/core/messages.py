"""Messages as a subscriber sees them.

Rule 1: everything is made per run. A message of its own exists only when somebody looks at it.
Rule 2: an envelope is taken apart only for who asks what stands in it; payloads are cut out of
their frames without that.

    Batch ── Run       the bytes
       └──── Receipt   what became of them: one per run
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, Generic, TypeVar, cast

import numpy as np

from simplebus.client.core.acks import ACKED, WORKING, AckToken, nack_outcome, terminate_outcome
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
    """How long every envelope of the run is; None when they differ, or one holds stuffing."""
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
    """Whether every frame has the first one's fields, and its lengths in these places."""
    raw = run.raw
    if run.count <= PLAIN_FRAMES_MAX:
        parts = [
            slice(HEADER_BYTES, HEADER_BYTES + 1),
            *(slice(at, at + 2) for at in length_offsets),
        ]
        frame_offsets = range(0, len(raw), run.stride) if run.bounds is None else run.bounds[:-1].tolist()
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
    return not any((lengths[frame_offsets + at] != lengths[at]).any() for at in length_offsets)


REPLY_TO = "reply-to"
"""The header that names the channel on which an answer is expected."""

_REPR_BYTES_MAX = 40
_EMPTY_ENVELOPE = Envelope()

T = TypeVar("T")
"""What a subscription makes of its messages' payloads."""


class Message(Generic[T]):
    """One message. Compares by identity: a message that comes twice is two of these."""

    __slots__ = ("_ack_token", "_index", "payload")

    def __init__(self, payload: bytes, index: int, ack_token: AckToken) -> None:
        self.payload = payload
        """The publisher's bytes."""
        self._index = index
        self._ack_token = ack_token

    # What it is ----------------------------------------------------------------------------------

    @property
    def value(self) -> T:
        """What the payload means to its subscription: the payload itself if that says nothing."""
        decode = self._ack_token.owner.decode
        return cast(T, self.payload if decode is None else decode(self.payload))

    @property
    def class_id(self) -> int:
        return self._ack_token.class_id

    @property
    def sequence(self) -> int:
        """Its number within its class, from 0; never used twice."""
        return int(self._ack_token.sequences[self._index])

    @property
    def message_id(self) -> int:
        """The low 31 bits of the sequence."""
        return self.sequence & MESSAGE_ID_MASK

    @property
    def attempt(self) -> int:
        """Which delivery to this subscription it is: 1 for the first one, 0 when the bus does not
        know, as for what somebody else left behind."""
        return self._ack_token.attempt

    @property
    def redelivered(self) -> bool:
        """Whether it may have been delivered before, and perhaps processed."""
        return self._ack_token.attempt != 1

    # What its publisher said about it ------------------------------------------------------------

    @property
    def envelope(self) -> Envelope:
        """All of it. Raises RemoteProtocolError when the bus has sent what is no envelope."""
        return _EMPTY_ENVELOPE

    @property
    def channel(self) -> str:
        """Empty for none."""
        return self.envelope.channel

    @property
    def key(self) -> bytes:
        return self.envelope.key

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Names and values, in order; a name may repeat."""
        return self.envelope.headers

    @property
    def published(self) -> int | None:
        """Microseconds since 1970 by the publisher's clock; None when it did not say."""
        return self.envelope.published

    @property
    def expires_ms(self) -> int | None:
        """Milliseconds that it had to live when the bus accepted it; None for ever."""
        return self.envelope.expires_ms

    @property
    def is_request(self) -> bool:
        """Whether its publisher waits for an answer."""
        return any(name == REPLY_TO for name, _ in self.headers)

    # What becomes of it --------------------------------------------------------------------------

    def ack(self, owner: object = None) -> None:
        """It is processed. Raises LocalProtocolError if it is not this owner's, if one is named."""
        if owner is not None:
            self._ack_token.check_owner(owner, self)
        self._ack_token.record_outcome(ACKED, self._index, self._index + 1)

    def nack(self, delay: float | None = None, error: object = None) -> None:
        """It is to come again after so many seconds; by default the bus's pause, which grows.
        `error` says what went wrong: an exception, or a sentence of up to 1,024 bytes. The bus
        tells it in the dead letter, if it comes to that."""
        self._ack_token.record_outcome(nack_outcome(delay, error), self._index, self._index + 1)

    def terminate(self, error: object = None) -> None:
        """It can never be processed: it becomes a dead letter now, which says why."""
        self._ack_token.record_outcome(terminate_outcome(error), self._index, self._index + 1)

    def working(self) -> None:
        """Its processing takes longer: the ack timeout starts again."""
        self._ack_token.record_outcome(WORKING, self._index, self._index + 1)

    def __repr__(self) -> str:
        payload = self.payload
        payload_text = repr(payload) if len(payload) <= _REPR_BYTES_MAX else f"{len(payload)} bytes"
        suffix = ", redelivered" if self.redelivered else ""
        return f"<Message {self.sequence} of class {self.class_id}: {payload_text}{suffix}>"


class _EnvelopedMessage(Message[T]):
    """A message that came in an envelope."""

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


class Batch:
    """Messages of one class, in order. Iterate for the messages one by one."""

    __slots__ = ("_ack_token", "_first_index", "_run")

    def __init__(self, run: FrameRun, ack_token: AckToken, *, first_index: int = 0) -> None:
        self._run = run
        self._ack_token = ack_token
        self._first_index = first_index
        """Where in the receipt the first message stands."""

    @property
    def class_id(self) -> int:
        return self._ack_token.class_id

    @property
    def attempt(self) -> int:
        """As each message's."""
        return self._ack_token.attempt

    @property
    def redelivered(self) -> bool:
        """Whether they may have been delivered before, and perhaps processed."""
        return self._ack_token.attempt != 1

    @property
    def is_alive(self) -> bool:
        """Whether the bus still wants to hear about them."""
        return self._ack_token.is_ack_wanted

    @property
    def is_late(self) -> bool:
        """Whether they came otherwise than in the row."""
        return not self._ack_token.arrival_index

    @property
    def sequences(self) -> MessageIds:
        """The messages' numbers within their class, ascending; a range if none is left out."""
        return self._ack_token.sequences[self._first_index : self._first_index + self._run.count]

    @property
    def data(self) -> memoryview:
        """The wire's frames back to back: header, content and delimiter of each."""
        return memoryview(self._run.raw)

    @property
    def bounds(self) -> Integers:
        """Where each frame begins in `data`, and where the last one ends."""
        run = self._run
        if run.bounds is None:
            return np.arange(0, len(run.raw) + 1, run.stride, dtype=np.int64)
        return run.bounds

    @property
    def stride(self) -> int:
        """How long each frame is; 0 where they differ."""
        return self._run.stride if self._run.bounds is None else 0

    @property
    def size(self) -> int:
        """Bytes of the frames."""
        return len(self._run.raw)

    @property
    def payloads(self) -> list[bytes]:
        """Every payload in order. Made anew on each access."""
        return self._slice_payloads(0, self._run.count)

    def _slice_payloads(self, first: int, last: int) -> list[bytes]:
        run = self._run
        if run.frame_type == frames.MESSAGE:
            return run.contents(first, last)
        envelope_bytes = uniform_envelope_bytes(run)
        if envelope_bytes is not None:
            return run.contents(first, last, skip=envelope_bytes)
        return list(map(envelopes.payload_of, run.contents(first, last)))

    def messages(self, first: int, last: int) -> tuple[Iterator[bytes], Iterator[Message[Any]]]:
        """Messages first..last-1, made as they are asked for.

        The other iterator is the first one's source of payloads: its length hint says how many
        messages were not asked for yet, at no cost to who asks.
        """
        payloads = iter(self._slice_payloads(first, last))
        indexes = range(self._first_index + first, self._first_index + last)
        ack_tokens = repeat(self._ack_token)
        if self._run.frame_type == frames.MESSAGE:
            return payloads, map(Message, payloads, indexes, ack_tokens)
        contents = self._run.contents(first, last)
        return payloads, map(_EnvelopedMessage, payloads, indexes, ack_tokens, contents)

    def part(self, first: int, last: int) -> Batch:
        """Messages first..last-1 as a batch of their own."""
        return Batch(
            self._run.slice(first, last), self._ack_token, first_index=self._first_index + first
        )

    # What becomes of them ------------------------------------------------------------------------

    def ack(self, owner: object = None) -> None:
        """All are processed. Raises LocalProtocolError if they are not this owner's."""
        if owner is not None:
            self._ack_token.check_owner(owner, self)
        self._ack_token.record_outcome(
            ACKED, self._first_index, self._first_index + self._run.count
        )

    def nack(self, delay: float | None = None, error: object = None) -> None:
        """All are to come again, as `Message.nack` says."""
        self._ack_token.record_outcome(
            nack_outcome(delay, error), self._first_index, self._first_index + self._run.count
        )

    def terminate(self, error: object = None) -> None:
        """None can ever be processed, as `Message.terminate` says."""
        self._ack_token.record_outcome(
            terminate_outcome(error), self._first_index, self._first_index + self._run.count
        )

    def working(self) -> None:
        """The ack timeout of all starts again."""
        self._ack_token.record_outcome(
            WORKING, self._first_index, self._first_index + self._run.count
        )

    def settle(self, outcome: tuple[int, bytes], first: int, last: int) -> None:
        """The verdict on first..last-1, as far as nothing was said about them by hand."""
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
