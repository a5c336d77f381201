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
from simplebus.client.core.frame_runs import Ids
from simplebus.core.errors import LocalProtocolError
from simplebus.core.limits import ERROR_BYTES_MAX, MESSAGE_ID_MASK
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope import stuff
from simplebus.core.protocol.frames import DELIMITER

Verdict = tuple[int, bytes]
"""A frame's type, and what its content holds behind the range."""

ACKED: Verdict = (frames.ACK, b"")
WORKING: Verdict = (frames.WORKING, b"")
NACKED: Verdict = (frames.NACK, b"")
"""The message is to come again after the bus's pause."""
NACKED_AT_ONCE: Verdict = (frames.NACK, b" 0")

_DELAY_MAX = 365 * 86_400.0
_ID_COUNT = MESSAGE_ID_MASK + 1

Span = tuple[int, int, int, int]
"""Sequences first..last-1, and where in the row they stand: both 0 for what is in no row."""


def nacked(delay: float | None = None, error: object = None) -> Verdict:
    """The verdict for a message that is to come again after so many seconds, and why."""
    if delay is None:
        return (frames.NACK, _sentence(error)) if error is not None else NACKED
    seconds = arguments.seconds("delay", delay, most=_DELAY_MAX)
    return frames.NACK, b" %d" % round(seconds * 1000) + _sentence(error)


def terminated(error: object = None) -> Verdict:
    """The verdict for a message that is never to come again, and why."""
    return frames.NACK, b" terminate" + _sentence(error)


def _sentence(error: object) -> bytes:
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
    cut = text[:ERROR_BYTES_MAX].encode(errors="replace")[:ERROR_BYTES_MAX]
    return b"\n" + stuff(cut.decode(errors="ignore").encode())


class Desk:
    """Where the verdicts of all subscriptions wait to be written."""

    def __init__(self) -> None:
        self.count = 0
        """Messages that something is to be written about."""
        self.acked = 0
        """Messages whose acknowledgement was encoded, ever."""
        self.nacked = 0
        self.by_hand: Callable[[], object] = lambda: None
        """Called when a consumer has said something by itself."""
        self.logs: list[AckLog] = []
        """Those that have something to say to the bus they are attached to."""

    def take(self) -> bytes:
        """Frames for everything."""
        encoded = b"".join([log.take() for log in self.logs])
        self.withdraw()
        return encoded

    def withdraw(self) -> None:
        """Nothing is to be written."""
        self.logs.clear()
        self.count = 0


class AckLog:
    """What one subscription has to say, oldest first."""

    def __init__(self, desk: Desk, number: int, *, settles: bool = True, spans: bool) -> None:
        self.desk = desk
        self.settles = settles
        """Whether what the consumer does not decide by hand is decided for it."""
        self.is_open = True
        """Whether anybody still wants to know."""
        self.late = -1
        """Up to here, sequences came otherwise than in a row; -1 when none did."""
        self.newer: set[int] = set()
        """Sequences of which a newer sending was dropped, because an older one was still here."""
        self.late_ones: set[int] = set()
        """Sequences that came otherwise and wait; what is judged by hand meanwhile is taken out."""
        self._number = number
        self._spans = spans
        """Whether ranges may name what was never sent."""
        self._is_attached = False
        """Whether the bus knows the subscription, on this connection."""
        self._entries: list[_Entry] = []

    def attach(self) -> None:
        """The bus knows the subscription: what is here may be written."""
        self._is_attached = True
        if self._entries:
            self.desk.logs.append(self)
            self.desk.count += self._count()

    def detach(self) -> None:
        """The connection is gone. What was not encoded is kept for another one."""
        self._is_attached = False

    @property
    def is_held(self) -> bool:
        """Whether something waits for the bus to know the subscription again."""
        return bool(self._entries) and not self._is_attached

    def close(self) -> None:
        """What is said from now on is of no use to anybody."""
        self.is_open = False

    def end(self) -> None:
        """Nor is what was said before."""
        self.is_open = False
        self.late_ones.clear()
        self.newer.clear()
        if self._is_attached:
            self.desk.count -= self._count()
        self._entries.clear()

    def add(self, verdict: Verdict, receipt: Receipt, first: int, last: int) -> None:
        """Something about the messages with these indexes in the receipt."""
        if not self.is_open:
            return
        entries = self._entries
        if entries:
            newest = entries[-1]
            if newest.receipt is receipt and newest.last == first and newest.verdict == verdict:
                newest.last = last
            else:
                entries.append(_Entry(verdict, receipt, first, last))
        else:
            entries.append(_Entry(verdict, receipt, first, last))
            if self._is_attached:
                self.desk.logs.append(self)
        if self._is_attached:
            self.desk.count += last - first

    def acknowledged(self) -> Ids:
        """What the bus is yet to hear that it is processed."""
        said = [
            np.asarray(entry.receipt.sequences[entry.first : entry.last])
            for entry in self._entries
            if entry.verdict is ACKED
        ]
        return np.concatenate(said) if said else range(0)

    def _count(self) -> int:
        return sum(entry.last - entry.first for entry in self._entries)

    def take(self) -> bytes:
        """Frames for everything in the log, which is empty then."""
        told: list[tuple[Verdict, int, int, int]] = []
        row = 0
        for entry in self._entries:
            verdict, attempt = entry.verdict, 0
            count = entry.last - entry.first
            if verdict[0] == frames.ACK:
                self.desk.acked += count
            else:
                attempt = self._attempt_of(entry)
                self.desk.nacked += count * (verdict[0] == frames.NACK)
            if self.newer and verdict[0] != frames.WORKING:
                self._forget_newer(entry)
            for first, last, row_first, row_last in self._spans_of(entry):
                if told and told[-1][0] == verdict and told[-1][3] == attempt:
                    _, begin, end, _ = told[-1]
                    if end == first or (row_first and row == row_first and end > self.late):
                        told[-1] = (verdict, begin, last, attempt)
                        row = row_last
                        continue
                told.append((verdict, first, last, attempt))
                row = row_last
        self._entries.clear()
        return b"".join([self._encode(*one) for one in told])

    def _attempt_of(self, entry: _Entry) -> int:
        """Which sending is spoken of; 0 for the last one, also where that was dropped."""
        receipt = entry.receipt
        if self.newer:
            sequences = np.asarray(receipt.sequences[entry.first : entry.last]).tolist()
            if not self.newer.isdisjoint(sequences):
                return 0
        return receipt.attempt

    def _forget_newer(self, entry: _Entry) -> None:
        sequences = np.asarray(entry.receipt.sequences[entry.first : entry.last]).tolist()
        self.newer.difference_update(sequences)

    def _spans_of(self, entry: _Entry) -> list[Span]:
        """Ranges for the messages of an entry."""
        sequences = entry.receipt.sequences
        row = entry.receipt.row if self._spans else 0
        first, last = int(sequences[entry.first]), int(sequences[entry.last - 1]) + 1
        is_whole = last - first == entry.last - entry.first
        if is_whole or (row and first > self.late):
            if not row:
                return [(first, last, 0, 0)]
            return [(first, last, row + entry.first, row + entry.last)]
        part = np.asarray(sequences)[entry.first : entry.last]
        breaks = np.flatnonzero(part[1:] != part[:-1] + 1)
        firsts = part[np.r_[0, breaks + 1]].tolist()
        lasts = (part[np.r_[breaks, part.size - 1]] + 1).tolist()
        return [(begin, end, 0, 0) for begin, end in zip(firsts, lasts, strict=True)]

    def _encode(self, verdict: Verdict, first: int, last: int, attempt: int) -> bytes:
        frame_type, argument = verdict
        begin = first & MESSAGE_ID_MASK
        end = begin + last - first
        header = frames.HEADER.pack(frame_type, self._number, attempt, 0)
        if end <= _ID_COUNT:
            return header + b"%d-%d" % (begin, end) + argument + DELIMITER
        cut = last - (end - _ID_COUNT)
        return self._encode(verdict, first, cut, attempt) + self._encode(
            verdict, cut, last, attempt
        )


class _Entry:
    __slots__ = ("first", "last", "receipt", "verdict")

    def __init__(self, verdict: Verdict, receipt: Receipt, first: int, last: int) -> None:
        self.verdict = verdict
        self.receipt = receipt
        self.first = first
        self.last = last


class Owner(Protocol):
    """Who got messages: a subscription, or a fetch."""

    decode: Callable[[bytes], Any] | None
    """What makes a message's value of its payload; None for the payload itself."""


class Receipt:
    """What one subscription owes the bus for one run of messages."""

    __slots__ = ("_decided", "_log", "attempt", "class_id", "owner", "row", "sequences")

    def __init__(
        self,
        owner: Owner,
        log: AckLog | None,
        *,
        class_id: int,
        sequences: Ids,
        attempt: int,
        row: int = 0,
    ) -> None:
        self.owner = owner
        self.class_id = class_id
        self.sequences = sequences
        self.attempt = attempt
        """Which delivery this is; 0 when the bus does not know."""
        self.row = row
        """The first message's place among those that came in a row; 0 for none."""
        self._log = log
        """None for messages that nobody has to acknowledge."""
        self._decided: set[int] | None = None
        """Messages about which the consumer has said something by hand; None for none."""

    @property
    def is_alive(self) -> bool:
        """Whether the bus still wants to hear about these messages."""
        return self._log is not None and self._log.is_open

    def settle(self, verdict: Verdict, first: int, last: int) -> None:
        """The verdict on all of first..last-1 that the consumer has said nothing about."""
        assert self._log is not None, "only subscriptions settle"
        if self._decided is None:
            self._log.add(verdict, self, first, last)
            return
        for index in range(first, last):
            if index not in self._decided:
                self._log.add(verdict, self, index, index + 1)

    def say(self, verdict: Verdict, first: int, last: int) -> None:
        """What the consumer says by hand about first..last-1.

        Raises LocalProtocolError for messages that were fetched.
        """
        if self._log is None:
            raise LocalProtocolError("a message that was fetched is nobody's to acknowledge")
        self._log.add(verdict, self, first, last)
        if self._log.late_ones and verdict is not WORKING:
            self._log.late_ones.difference_update(np.asarray(self.sequences[first:last]).tolist())
        if self._log.settles and verdict is not WORKING:
            if self._decided is None:
                self._decided = set()
            self._decided.update(range(first, last))
        self._log.desk.by_hand()

    def check_owner(self, owner: object, what: object) -> None:
        """Raise LocalProtocolError if they are another one's messages."""
        if owner is not self.owner:
            raise LocalProtocolError(f"{what!r} came from another subscription; ack it there")
