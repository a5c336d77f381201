"""What subscriptions have to tell the bus about the messages that came: acks, nacks, workings.

Rule 1: nothing is told per message. What is said about messages in the order in which they came
grows into ranges, until somebody can write them.
Rule 2: what was said first is written first, so that the last word about a message is the last.
Rule 3: a range names sequences that were never sent here only where messages came in a row, each
for the first time, and nothing that lies between them came otherwise: the bus passes them over.
Rule 4: a range never spans the wrap of the message ids.

    came in a row    3   7   12          acknowledged all three:  3-13
    came otherwise       7               …then:                   3-4 7-8 12-13
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from simplebus.client.core import arguments
from simplebus.client.core.frame_runs import MessageIds
from simplebus.core.errors import LocalProtocolError
from simplebus.core.limits import ERROR_BYTES_MAX, MESSAGE_ID_MASK
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import stuff
from simplebus.core.protocol.frames import DELIMITER

AckOutcome = tuple[int, bytes]
"""A frame's type, and what its content holds behind the range."""

ACKED: AckOutcome = (frames.ACK, b"")
WORKING: AckOutcome = (frames.WORKING, b"")
NACKED: AckOutcome = (frames.NACK, b"")
"""The message is to come again after the bus's pause."""
NACKED_WITHOUT_DELAY: AckOutcome = (frames.NACK, b" 0")

_DELAY_MAX = 365 * 86_400.0
_ID_COUNT = MESSAGE_ID_MASK + 1

AckRange = tuple[int, int, int, int]
"""Sequences first..last-1, and where in the row they stand: both 0 for what is in no row."""


def nack_outcome(delay: float | None = None, error: object = None) -> AckOutcome:
    """The verdict for a message that is to come again after so many seconds, and why."""
    if delay is None:
        return (frames.NACK, _encode_error(error)) if error is not None else NACKED
    seconds = arguments.check_seconds("delay", delay, maximum=_DELAY_MAX)
    return frames.NACK, b" %d" % round(seconds * 1000) + _encode_error(error)


def terminate_outcome(error: object = None) -> AckOutcome:
    """The verdict for a message that is never to come again, and why."""
    return frames.NACK, b" terminate" + _encode_error(error)


def _encode_error(error: object) -> bytes:
    """How a Nack says what went wrong: an exception by its type and text, anything else as text;
    so much of it as a Nack may hold."""
    if error is None:
        return b""
    try:
        text = str(error)
    except Exception:  # Whoever wrote it: what it is about still has to be told.
        text = ""
    if isinstance(error, BaseException):
        text = f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__
    truncated = text[:ERROR_BYTES_MAX].encode(errors="replace")[:ERROR_BYTES_MAX]
    return b"\n" + stuff(truncated.decode(errors="ignore").encode())


class AckSink:
    """Where the verdicts of all subscriptions wait to be written."""

    def __init__(self) -> None:
        self.pending_count = 0
        """Messages that something is to be written about."""
        self.acked_count = 0
        """Messages whose acknowledgement was encoded, ever."""
        self.nacked_count = 0
        self.on_manual_ack: Callable[[], object] = lambda: None
        """Called when a consumer has said something by itself."""
        self.ack_buffers: list[AckBuffer] = []
        """Those that have something to say to the bus they are attached to."""

    def encode_pending(self) -> bytes:
        """Frames for everything."""
        encoded = b"".join([ack_buffer.encode_pending() for ack_buffer in self.ack_buffers])
        self.clear()
        return encoded

    def clear(self) -> None:
        """Nothing is to be written."""
        self.ack_buffers.clear()
        self.pending_count = 0


class AckBuffer:
    """What one subscription has to say, oldest first."""

    def __init__(
        self,
        ack_sink: AckSink,
        subscription_number: int,
        *,
        is_auto_ack: bool = True,
        can_span_gaps: bool,
    ) -> None:
        self.ack_sink = ack_sink
        self.is_auto_ack = is_auto_ack
        """Whether what the consumer does not decide by hand is decided for it."""
        self.is_open = True
        """Whether anybody still wants to know."""
        self.last_out_of_order = -1
        """Up to here, sequences came otherwise than in a row; -1 when none did."""
        self.dropped_redeliveries: set[int] = set()
        """Sequences of which a newer sending was dropped, because an older one was still here."""
        self.undecided_out_of_order: set[int] = set()
        """Sequences that came otherwise and wait; what is judged by hand meanwhile is taken out."""
        self._subscription_number = subscription_number
        self._can_span_gaps = can_span_gaps
        """Whether ranges may name what was never sent."""
        self._is_attached = False
        """Whether the bus knows the subscription, on this connection."""
        self._entries: list[_AckEntry] = []

    def attach(self) -> None:
        """The bus knows the subscription: what is here may be written."""
        self._is_attached = True
        if self._entries:
            self.ack_sink.ack_buffers.append(self)
            self.ack_sink.pending_count += self._count_messages()

    def detach(self) -> None:
        """The connection is gone. What was not encoded is kept for another one."""
        self._is_attached = False

    @property
    def has_held_acks(self) -> bool:
        """Whether something waits for the bus to know the subscription again."""
        return bool(self._entries) and not self._is_attached

    def close(self) -> None:
        """What is said from now on is of no use to anybody."""
        self.is_open = False

    def discard(self) -> None:
        """Nor is what was said before."""
        self.is_open = False
        self.undecided_out_of_order.clear()
        self.dropped_redeliveries.clear()
        if self._is_attached:
            self.ack_sink.pending_count -= self._count_messages()
        self._entries.clear()

    def append(self, outcome: AckOutcome, ack_token: AckToken, first: int, last: int) -> None:
        """Something about the messages with these indexes in the receipt."""
        if not self.is_open:
            return
        entries = self._entries
        if entries:
            newest = entries[-1]
            if newest.ack_token is ack_token and newest.last == first and newest.outcome == outcome:
                newest.last = last
            else:
                entries.append(_AckEntry(outcome, ack_token, first, last))
        else:
            entries.append(_AckEntry(outcome, ack_token, first, last))
            if self._is_attached:
                self.ack_sink.ack_buffers.append(self)
        if self._is_attached:
            self.ack_sink.pending_count += last - first

    def acked_sequences(self) -> MessageIds:
        """What the bus is yet to hear that it is processed."""
        acked = [
            np.asarray(entry.ack_token.sequences[entry.first : entry.last])
            for entry in self._entries
            if entry.outcome is ACKED
        ]
        return np.concatenate(acked) if acked else range(0)

    def _count_messages(self) -> int:
        return sum(entry.last - entry.first for entry in self._entries)

    def encode_pending(self) -> bytes:
        """Frames for everything in the log, which is empty then."""
        ranges: list[tuple[AckOutcome, int, int, int]] = []
        range_end_index = 0
        for entry in self._entries:
            outcome, attempt = entry.outcome, 0
            count = entry.last - entry.first
            if outcome[0] == frames.ACK:
                self.ack_sink.acked_count += count
            else:
                attempt = self._attempt_to_encode(entry)
                self.ack_sink.nacked_count += count * (outcome[0] == frames.NACK)
            if self.dropped_redeliveries and outcome[0] != frames.WORKING:
                self._forget_redeliveries(entry)
            for first, last, first_index, last_index in self._compute_ranges(entry):
                if ranges and ranges[-1][0] == outcome and ranges[-1][3] == attempt:
                    _, begin, end, _ = ranges[-1]
                    if end == first or (
                        first_index and range_end_index == first_index and end > self.last_out_of_order
                    ):
                        ranges[-1] = (outcome, begin, last, attempt)
                        range_end_index = last_index
                        continue
                ranges.append((outcome, first, last, attempt))
                range_end_index = last_index
        self._entries.clear()
        return b"".join([self._encode_range(*one) for one in ranges])

    def _attempt_to_encode(self, entry: _AckEntry) -> int:
        """Which sending is spoken of; 0 for the last one, also where that was dropped."""
        ack_token = entry.ack_token
        if self.dropped_redeliveries:
            sequences = np.asarray(ack_token.sequences[entry.first : entry.last]).tolist()
            if not self.dropped_redeliveries.isdisjoint(sequences):
                return 0
        return ack_token.attempt

    def _forget_redeliveries(self, entry: _AckEntry) -> None:
        sequences = np.asarray(entry.ack_token.sequences[entry.first : entry.last]).tolist()
        self.dropped_redeliveries.difference_update(sequences)

    def _compute_ranges(self, entry: _AckEntry) -> list[AckRange]:
        """Ranges for the messages of an entry."""
        sequences = entry.ack_token.sequences
        arrival_index = entry.ack_token.arrival_index if self._can_span_gaps else 0
        first, last = int(sequences[entry.first]), int(sequences[entry.last - 1]) + 1
        is_contiguous = last - first == entry.last - entry.first
        if is_contiguous or (arrival_index and first > self.last_out_of_order):
            if not arrival_index:
                return [(first, last, 0, 0)]
            return [(first, last, arrival_index + entry.first, arrival_index + entry.last)]
        entry_sequences = np.asarray(sequences)[entry.first : entry.last]
        breaks = np.flatnonzero(entry_sequences[1:] != entry_sequences[:-1] + 1)
        firsts = entry_sequences[np.r_[0, breaks + 1]].tolist()
        lasts = (entry_sequences[np.r_[breaks, entry_sequences.size - 1]] + 1).tolist()
        return [(begin, end, 0, 0) for begin, end in zip(firsts, lasts, strict=True)]

    def _encode_range(self, outcome: AckOutcome, first: int, last: int, attempt: int) -> bytes:
        frame_type, argument = outcome
        begin = first & MESSAGE_ID_MASK
        end = begin + last - first
        header = frames.HEADER.pack(frame_type, self._subscription_number, attempt, 0)
        if end <= _ID_COUNT:
            return header + b"%d-%d" % (begin, end) + argument + DELIMITER
        wrap_sequence = last - (end - _ID_COUNT)
        return self._encode_range(outcome, first, wrap_sequence, attempt) + self._encode_range(
            outcome, wrap_sequence, last, attempt
        )


class _AckEntry:
    __slots__ = ("ack_token", "first", "last", "outcome")

    def __init__(self, outcome: AckOutcome, ack_token: AckToken, first: int, last: int) -> None:
        self.outcome = outcome
        self.ack_token = ack_token
        self.first = first
        self.last = last


class DecodingOwner(Protocol):
    """Who got messages: a subscription, or a fetch."""

    decode: Callable[[bytes], Any] | None
    """What makes a message's value of its payload; None for the payload itself."""


class AckToken:
    """What one subscription owes the bus for one run of messages."""

    __slots__ = (
        "_ack_buffer",
        "_decided_indexes",
        "arrival_index",
        "attempt",
        "class_id",
        "owner",
        "sequences",
    )

    def __init__(
        self,
        owner: DecodingOwner,
        ack_buffer: AckBuffer | None,
        *,
        class_id: int,
        sequences: MessageIds,
        attempt: int,
        arrival_index: int = 0,
    ) -> None:
        self.owner = owner
        self.class_id = class_id
        self.sequences = sequences
        self.attempt = attempt
        """Which delivery this is; 0 when the bus does not know."""
        self.arrival_index = arrival_index
        """The first message's place among those that came in a row; 0 for none."""
        self._ack_buffer = ack_buffer
        """None for messages that nobody has to acknowledge."""
        self._decided_indexes: set[int] | None = None
        """Messages about which the consumer has said something by hand; None for none."""

    @property
    def is_ack_wanted(self) -> bool:
        """Whether the bus still wants to hear about these messages."""
        return self._ack_buffer is not None and self._ack_buffer.is_open

    def settle(self, outcome: AckOutcome, first: int, last: int) -> None:
        """The verdict on all of first..last-1 that the consumer has said nothing about."""
        assert self._ack_buffer is not None, "only subscriptions settle"
        if self._decided_indexes is None:
            self._ack_buffer.append(outcome, self, first, last)
            return
        for index in range(first, last):
            if index not in self._decided_indexes:
                self._ack_buffer.append(outcome, self, index, index + 1)

    def record_outcome(self, outcome: AckOutcome, first: int, last: int) -> None:
        """What the consumer says by hand about first..last-1.

        Raises LocalProtocolError for messages that were fetched.
        """
        if self._ack_buffer is None:
            raise LocalProtocolError("a message that was fetched is nobody's to acknowledge")
        self._ack_buffer.append(outcome, self, first, last)
        if self._ack_buffer.undecided_out_of_order and outcome is not WORKING:
            self._ack_buffer.undecided_out_of_order.difference_update(
                np.asarray(self.sequences[first:last]).tolist()
            )
        if self._ack_buffer.is_auto_ack and outcome is not WORKING:
            if self._decided_indexes is None:
                self._decided_indexes = set()
            self._decided_indexes.update(range(first, last))
        self._ack_buffer.ack_sink.on_manual_ack()

    def check_owner(self, owner: object, message_or_batch: object) -> None:
        """Raise LocalProtocolError if they are another one's messages."""
        if owner is not self.owner:
            raise LocalProtocolError(f"{message_or_batch!r} came from another subscription; ack it there")
