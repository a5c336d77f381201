"""Messages as a subscriber sees them, and what it owes the bus for them.

Rule 1: everything is made per run: messages of one class with consecutive ids, sent together. A
message of its own exists only when somebody looks at it.
Rule 2: what is handed out owns its bytes; nothing here is a view of a receive buffer.
Rule 3: when several subscriptions share a run, a message is acknowledged to the bus once all of
them have acknowledged it.

    run   │ frame │ frame │ frame │      Batch: the bytes, Receipt: class, first id, timer index,
          first_id  +1      +2           who has still to acknowledge
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt

from simplebus.core import frames
from simplebus.core.frames import Flags, FrameBatch, Integers
from simplebus.core.limits import (
    DELIMITER_BYTES,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    MESSAGE_ID_MASK,
    PLAIN_FRAMES_MAX,
)

# Class, message id and timer index of a frame are its bytes 1 to 8: one number, whose step from
# one message of a run to the next is 1 in the message id.
_STAMP = np.dtype(">u8")
_STAMP_OFFSET = 1
_STAMP_STEP = np.uint64(1 << 16)

_SHOWN_BYTES = 40


class AckSink(Protocol):
    """Takes what is to be acknowledged to the bus."""

    def add(self, *, class_id: int, timer_index: int, first: int, last: int) -> None:
        """Message ids first..last-1 are processed."""


class Shares:
    """How many subscriptions have yet to acknowledge each message of a run."""

    __slots__ = ("left",)

    def __init__(self, *, count: int, holders: int) -> None:
        self.left: npt.NDArray[np.int32] = np.full(count, holders, np.int32)


class Receipt:
    """What one subscription owes the bus for one run of messages."""

    __slots__ = (
        "_acks",
        "_owed",
        "_shares",
        "class_id",
        "first_id",
        "owner",
        "redelivered",
        "timer_index",
    )

    def __init__(
        self,
        owner: object,
        acks: AckSink,
        *,
        class_id: int,
        first_id: int,
        timer_index: int,
        redelivered: bool,
        shares: Shares | None = None,
    ) -> None:
        self.owner = owner
        """The subscription that owes."""
        self.class_id = class_id
        self.first_id = first_id
        self.timer_index = timer_index
        self.redelivered = redelivered
        """Whether a later message of the class was seen before these."""
        self._acks = acks
        self._shares = shares
        """None while the owner is the only one."""
        self._owed: Flags | None = None if shares is None else np.ones(shares.left.size, np.bool_)
        """Which messages the owner has not acknowledged; kept when it is not the only one."""

    def for_owner(self, owner: object) -> Receipt:
        """The same run, owed by another subscription alone."""
        return Receipt(
            owner,
            self._acks,
            class_id=self.class_id,
            first_id=self.first_id,
            timer_index=self.timer_index,
            redelivered=self.redelivered,
        )

    def ack(self, first_id: int, last_id: int) -> None:
        """The owner has processed the message ids first_id..last_id-1 of this run."""
        if self._shares is None or self._owed is None:
            self._add(first_id, last_id)
            return
        part = slice(first_id - self.first_id, last_id - self.first_id)
        owed, left = self._owed[part], self._shares.left[part]
        left -= owed
        done = owed & (left == 0)
        owed[:] = False
        for first, last in ranges_of(done):
            self._add(first_id + first, first_id + last)

    def _add(self, first_id: int, last_id: int) -> None:
        self._acks.add(
            class_id=self.class_id, timer_index=self.timer_index, first=first_id, last=last_id
        )


class Message:
    """One message. Compares by identity: a message that comes twice is two of these."""

    __slots__ = ("_receipt", "message_id", "payload")

    def __init__(self, payload: bytes, message_id: int, receipt: Receipt) -> None:
        self.payload = payload
        """The publisher's bytes."""
        self.message_id = message_id
        """The low 31 bits of the message's number within its class."""
        self._receipt = receipt

    @property
    def class_id(self) -> int:
        return self._receipt.class_id

    @property
    def redelivered(self) -> bool:
        """Whether it came behind a later message of its class: perhaps it was processed before."""
        return self._receipt.redelivered

    def ack(self, owner: object) -> bool:
        """Acknowledge it for its subscription; False when the owner is another one."""
        if self._receipt.owner is not owner:
            return False
        self._receipt.ack(self.message_id, self.message_id + 1)
        return True

    def __repr__(self) -> str:
        payload = self.payload
        shown = repr(payload) if len(payload) <= _SHOWN_BYTES else f"{len(payload)} bytes"
        mark = ", redelivered" if self.redelivered else ""
        return f"<Message {self.message_id} of class {self.class_id}: {shown}{mark}>"


class Batch:
    """Messages of one class with consecutive ids. Iterate for the messages one by one."""

    __slots__ = ("_count", "_ends", "_raw", "_receipt", "_stride", "first_id")

    def __init__(
        self,
        raw: bytes,
        *,
        count: int,
        stride: int,
        ends: Integers | None,
        first_id: int,
        receipt: Receipt,
    ) -> None:
        self.first_id = first_id
        """The first message's id; each of the others has the next."""
        self._raw = raw
        self._count = count
        self._stride = stride
        self._ends = ends
        """Where each frame ends in raw; None when all are as long as the stride."""
        self._receipt = receipt

    @property
    def class_id(self) -> int:
        return self._receipt.class_id

    @property
    def redelivered(self) -> bool:
        """Whether they came behind a later message of their class."""
        return self._receipt.redelivered

    @property
    def message_ids(self) -> range:
        return range(self.first_id, self.first_id + self._count)

    @property
    def data(self) -> memoryview:
        """The wire's frames back to back: header, payload and delimiter of each."""
        return memoryview(self._raw)

    @property
    def payloads(self) -> list[bytes]:
        """Every payload in order. Made anew on each access."""
        return self.payloads_of(0, self._count)

    def payloads_of(self, first: int, last: int) -> list[bytes]:
        """The payloads of the messages with these indexes, first..last-1."""
        raw, stride = self._raw, self._stride
        if self._ends is None:
            length = stride - FRAME_BYTES_MIN
            start = first * stride + HEADER_BYTES
            if last - first > PLAIN_FRAMES_MAX and length:
                dtype = f"V{length}"
                payloads: list[bytes] = np.ndarray(
                    (last - first,), dtype, raw, start, (stride,)
                ).tolist()
                return payloads
            return [raw[at : at + length] for at in range(start, last * stride, stride)]
        begins = [int(self._ends[first - 1]) if first else 0]
        ends = self._ends[first:last].tolist()
        begins += ends[:-1]
        return [
            raw[begin + HEADER_BYTES : end - DELIMITER_BYTES]
            for begin, end in zip(begins, ends, strict=True)
        ]

    def messages(self, first: int, last: int) -> tuple[Iterator[bytes], Iterator[Message]]:
        """Messages first..last-1, made as they are asked for.

        The other iterator is the first one's source of payloads: its length hint says how many
        messages were not asked for yet, at no cost to who asks.
        """
        payloads = iter(self.payloads_of(first, last))
        ids = range(self.first_id + first, self.first_id + last)
        return payloads, map(Message, payloads, ids, repeat(self._receipt))

    def part(self, first: int, last: int, *, receipt: Receipt | None = None) -> Batch:
        """Messages first..last-1 as a batch of their own."""
        if receipt is None:
            receipt = self._receipt
            if first == 0 and last == self._count:
                return self
        if self._ends is None:
            begin, end, ends = first * self._stride, last * self._stride, None
        else:
            begin = int(self._ends[first - 1]) if first else 0
            end = int(self._ends[last - 1])
            ends = self._ends[first:last] - begin
        return Batch(
            self._raw[begin:end],
            count=last - first,
            stride=self._stride,
            ends=ends,
            first_id=self.first_id + first,
            receipt=receipt,
        )

    def for_owner(self, owner: object) -> Batch:
        """The same messages, owed by another subscription alone."""
        return self.part(0, self._count, receipt=self._receipt.for_owner(owner))

    def with_receipt(self, receipt: Receipt) -> Batch:
        """The same messages with the receipt of one of several subscriptions."""
        return self.part(0, self._count, receipt=receipt)

    def ack(self, owner: object) -> bool:
        """Acknowledge all of it for its subscription; False when the owner is another one."""
        if self._receipt.owner is not owner:
            return False
        self.ack_part(0, self._count)
        return True

    def ack_part(self, first: int, last: int) -> None:
        """Acknowledge the messages with these indexes, first..last-1."""
        self._receipt.ack(self.first_id + first, self.first_id + last)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Message]:
        return self.messages(0, self._count)[1]

    def __repr__(self) -> str:
        last_id = self.first_id + self._count - 1
        mark = ", redelivered" if self.redelivered else ""
        return f"<Batch of class {self.class_id}: messages {self.first_id} to {last_id}{mark}>"


# Runs --------------------------------------------------------------------------------------------


class Run:
    """Frames of one type and class with consecutive ids and one timer index, as received."""

    __slots__ = ("class_id", "count", "first_id", "frame_type", "frames", "timer_index")

    def __init__(self, batch: FrameBatch) -> None:
        """Reads the first frame; the caller knows that the others follow from it."""
        header = batch.data[:HEADER_BYTES].tobytes()
        self.frame_type, self.class_id, self.first_id, self.timer_index = frames.HEADER.unpack(
            header
        )
        self.count = batch.count
        self.frames = batch
        """A view: valid until the receive buffer is filled again."""

    @property
    def is_deliverable(self) -> bool:
        """Whether these are messages with ids that a bus gives."""
        return (
            self.frame_type == frames.MESSAGE
            and 0 <= self.first_id <= MESSAGE_ID_MASK + 1 - self.count
        )


def runs(batch: FrameBatch) -> Iterator[Run]:
    """Cut a batch into its runs."""
    if batch.count == 1:
        yield Run(batch)
        return
    if batch.stride:
        stamps = np.ndarray(
            (batch.count,), _STAMP, batch.data, _STAMP_OFFSET, (batch.stride,)
        )
        types = batch.data[:: batch.stride]
    else:
        starts = batch.starts
        stamps = frames.unaligned(batch.data, _STAMP)[starts + _STAMP_OFFSET]
        types = batch.data[starts]
    breaks = (np.diff(stamps) != _STAMP_STEP) | (types[1:] != types[:-1])
    if not breaks.any():
        yield Run(batch)
        return
    first = 0
    for last in (*(np.flatnonzero(breaks) + 1).tolist(), batch.count):
        yield Run(batch.slice(first, last))
        first = last


def ranges_of(flags: Flags) -> list[tuple[int, int]]:
    """The half-open index ranges in which flags are set."""
    if flags.all():
        return [(0, flags.size)] if flags.size else []
    steps = np.diff(np.concatenate(([0], flags.view(np.int8), [0])))
    begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
