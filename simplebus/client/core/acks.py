"""Acks, nacks and working notices of a client, from the program's call to the encoded frame.

Nothing is stored per message. Outcomes of consecutive messages are merged into ranges and sent in
the order in which the program settled them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from simplebus.client.core import arguments
from simplebus.client.core.frame_runs import MessageIds
from simplebus.core.errors import LocalProtocolError
from simplebus.core.limits import FAILURE_REASON_BYTES_MAX, MESSAGE_ID_MASK
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import stuff
from simplebus.core.protocol.frames import DELIMITER

AckOutcome = tuple[int, bytes]
"""Frame type of an outcome, and the content behind its range."""

ACKED: AckOutcome = (frames.ACK, b"")
WORKING: AckOutcome = (frames.WORKING, b"")
NACKED: AckOutcome = (frames.NACK, b"")
"""Redeliver after the server's backoff."""
NACKED_WITHOUT_DELAY: AckOutcome = (frames.NACK, b" 0")
"""Redeliver at once."""

_DELAY_MAX = 365 * 86_400.0
_ID_COUNT = MESSAGE_ID_MASK + 1

AckRange = tuple[int, int, int, int]
"""Sequences first..last-1 and their arrival indexes; both indexes are 0 outside of a row."""


def nack_outcome(delay: float | None = None, error: object = None) -> AckOutcome:
    """Return the outcome for a redelivery after `delay` seconds, by default after the backoff."""
    if delay is None:
        return (frames.NACK, _encode_error(error)) if error is not None else NACKED
    seconds = arguments.check_seconds("delay", delay, maximum=_DELAY_MAX)
    return frames.NACK, b" %d" % round(seconds * 1000) + _encode_error(error)


def terminate_outcome(error: object = None) -> AckOutcome:
    """Return the outcome that turns a message into a dead letter."""
    return frames.NACK, b" terminate" + _encode_error(error)


def _encode_error(error: object) -> bytes:
    """Encode an exception as its type and text, anything else as text, up to the maximum length."""
    if error is None:
        return b""
    try:
        text = str(error)
    except Exception:  # A broken __str__ must not prevent the nack.
        text = ""
    if isinstance(error, BaseException):
        text = f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__
    truncated = text[:FAILURE_REASON_BYTES_MAX].encode(errors="replace")[:FAILURE_REASON_BYTES_MAX]
    return b"\n" + stuff(truncated.decode(errors="ignore").encode())


class AckSink:
    """Outcomes of all subscriptions that wait to be sent."""

    def __init__(self) -> None:
        self.pending_count = 0
        """Messages whose outcome is not encoded yet."""
        self.acked_count = 0
        """Messages whose ack was encoded, in total."""
        self.nacked_count = 0
        self.on_manual_ack: Callable[[], object] = lambda: None
        """Called after the program has settled a message itself."""
        self.ack_buffers: list[AckBuffer] = []
        """Buffers with outcomes that may be sent now."""

    def encode_pending(self) -> bytes:
        """Return the frames for all pending outcomes."""
        ack_buffers, self.ack_buffers, self.pending_count = self.ack_buffers, [], 0
        if len(ack_buffers) == 1:
            return ack_buffers[0].encode_pending()
        return b"".join([ack_buffer.encode_pending() for ack_buffer in ack_buffers])

    def clear(self) -> None:
        """Remove all pending outcomes from the send order. The buffers keep their outcomes."""
        self.ack_buffers.clear()
        self.pending_count = 0


class AckBuffer:
    """Outcomes of one subscription, oldest first.

    A range may include sequences that this client never received, for example those of other
    channels, because the server skips them. This needs first deliveries in a row without a
    redelivery in between, see `AckToken.arrival_index`. After the first deliveries 3, 7 and 12,
    acking all three sends `3-13`; if 7 was redelivered in between, it sends `3-4`, `7-8` and
    `12-13`. A range never crosses the wrap.

    Outcomes are offered for sending when there are `batch_messages` of them, and by `offer`.
    """

    def __init__(
        self,
        ack_sink: AckSink,
        subscription_number: int,
        *,
        is_auto_ack: bool = True,
        can_span_gaps: bool,
        batch_messages: int = 1,
    ) -> None:
        self.ack_sink = ack_sink
        self.batch_messages = batch_messages
        self.is_auto_ack = is_auto_ack
        """True if messages that the program does not settle itself are settled for it."""
        self.is_open = True
        """True while further outcomes are accepted."""
        self.last_out_of_order = -1
        """Highest sequence that arrived as a redelivery or out of order; -1 if all arrived in
        order.
        """
        self.dropped_redeliveries: set[int] = set()
        """Sequences whose redelivery was dropped because an earlier delivery still waits here, or
        its ack is not sent yet.
        """
        self.undecided_out_of_order: set[int] = set()
        """Redelivered sequences that wait here and that the program has not settled."""
        self._subscription_number = subscription_number
        self._can_span_gaps = can_span_gaps
        """True if a range may include sequences that were never sent to this client."""
        self._is_attached = False
        """True if the server has confirmed the subscription on this connection."""
        self._entries: list[_AckEntry] = []
        self._is_offered = False
        """True if the outcomes are among the pending ones of the sink."""
        self._waiting_count = 0
        """Messages whose outcome is not offered yet."""

    def attach(self) -> None:
        """Allow sending, because the server has confirmed the subscription."""
        self._is_attached = True
        self._waiting_count = self._count_messages()
        self.offer()

    def detach(self) -> None:
        """Keep outcomes that are not encoded for the next connection."""
        self._is_attached = self._is_offered = False

    def offer(self) -> None:
        """Let the sink send all outcomes."""
        if self._is_attached and not self._is_offered and self._entries:
            self._is_offered = True
            self.ack_sink.ack_buffers.append(self)
            self.ack_sink.pending_count += self._waiting_count
            self._waiting_count = 0

    @property
    def has_held_acks(self) -> bool:
        """True if outcomes wait until the server confirms the subscription again."""
        return bool(self._entries) and not self._is_attached

    def close(self) -> None:
        """Ignore further outcomes."""
        self.is_open = False

    def discard(self) -> None:
        """Ignore further outcomes and remove all outcomes that are not encoded."""
        self.is_open = False
        self.undecided_out_of_order.clear()
        self.dropped_redeliveries.clear()
        if self._is_offered:
            self.ack_sink.pending_count -= self._count_messages()
        self._entries.clear()

    def append(self, outcome: AckOutcome, ack_token: AckToken, first: int, last: int) -> None:
        """Add `outcome` for the messages with the indexes first..last-1 of the token."""
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
        if self._is_offered:
            self.ack_sink.pending_count += last - first
        else:
            self._waiting_count += last - first
            if self._waiting_count >= self.batch_messages:
                self.offer()

    def acked_sequences(self) -> MessageIds:
        """Return the sequences of all acks that are not encoded yet."""
        acked = [
            np.asarray(entry.ack_token.sequences[entry.first : entry.last])
            for entry in self._entries
            if entry.outcome is ACKED
        ]
        return np.concatenate(acked) if acked else range(0)

    def _count_messages(self) -> int:
        return sum(entry.last - entry.first for entry in self._entries)

    def encode_pending(self) -> bytes:
        """Return the frames for all outcomes and empty the buffer."""
        self._is_offered = False
        if len(self._entries) == 1 and not self.dropped_redeliveries:
            entry = self._entries[0]
            if entry.outcome is ACKED and entry.last - entry.first == 1:
                self._entries.clear()
                self.ack_sink.acked_count += 1
                sequence = int(entry.ack_token.sequences[entry.first])
                return self._encode_range(ACKED, sequence, sequence + 1, 0)
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
                        first_index
                        and range_end_index == first_index
                        and end > self.last_out_of_order
                    ):
                        ranges[-1] = (outcome, begin, last, attempt)
                        range_end_index = last_index
                        continue
                ranges.append((outcome, first, last, attempt))
                range_end_index = last_index
        self._entries.clear()
        return b"".join([self._encode_range(*ack_range) for ack_range in ranges])

    def _attempt_to_encode(self, entry: _AckEntry) -> int:
        """Return the attempt to name; 0, the latest, if a later delivery was dropped."""
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
    """Subscription or fetch that received messages."""

    decode: Callable[[bytes], Any] | None
    """Converts a payload into a message's value; None returns the payload."""


class AckToken:
    """Acknowledgement handle of a run of messages of one subscription."""

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
        """Number of the delivery; 0 if unknown."""
        self.arrival_index = arrival_index
        """Index of the first message among the first deliveries in a row; 0 outside of a row."""
        self._ack_buffer = ack_buffer
        """None for fetched messages, which are not acknowledged."""
        self._decided_indexes: set[int] | None = None
        """Indexes that the program has settled itself; None if it has settled no message."""

    @property
    def is_ack_wanted(self) -> bool:
        """True if the server still accepts acks for these messages."""
        return self._ack_buffer is not None and self._ack_buffer.is_open

    def settle(self, outcome: AckOutcome, first: int, last: int) -> None:
        """Record `outcome` for the messages first..last-1 that the program has not settled."""
        assert self._ack_buffer is not None, "a fetched message cannot be settled"
        if self._decided_indexes is None:
            self._ack_buffer.append(outcome, self, first, last)
            return
        for index in range(first, last):
            if index not in self._decided_indexes:
                self._ack_buffer.append(outcome, self, index, index + 1)

    def is_decided(self, index: int) -> bool:
        """Return True if the program has settled the message itself; False with manual acks."""
        return self._decided_indexes is not None and index in self._decided_indexes

    def record_outcome(self, outcome: AckOutcome, first: int, last: int) -> None:
        """Record an outcome that the program chose for first..last-1.

        Raises:
            LocalProtocolError: If the messages were fetched.
        """
        if self._ack_buffer is None:
            raise LocalProtocolError(
                "a fetched message cannot be acknowledged; expected one from a subscription"
            )
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
        """Raise LocalProtocolError unless `owner` received the messages."""
        if owner is not self.owner:
            raise LocalProtocolError(
                f"{message_or_batch!r} came from another subscription; ack it there"
            )
