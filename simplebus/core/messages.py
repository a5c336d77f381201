"""Messages as a subscriber sees them, and what it owes the bus for them.

Rule 1: everything is made per run. A message of its own exists only when somebody looks at it.
Rule 2: when several subscriptions share a run, a message is acknowledged to the bus once all of
them have acknowledged it.

    Batch ── Run       the bytes
       └──── Receipt   who has still to acknowledge what of them: one per run and subscription
                └── Shares   how many subscriptions, when there are several
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt

from simplebus.core.errors import LocalProtocolError
from simplebus.core.frames import Flags
from simplebus.core.runs import Run, ranges_of

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
        run: Run,
        redelivered: bool,
        shares: Shares | None = None,
    ) -> None:
        self.owner = owner
        """The subscription that owes."""
        self.class_id: int = run.class_id
        self.first_id: int = run.first_id
        self.timer_index: int = run.timer_index
        self.redelivered = redelivered
        """Whether a later message of the class was seen before these."""
        self._acks = acks
        self._shares = shares
        """None while the owner is the only one."""
        self._owed: Flags | None = None if shares is None else np.ones(shares.left.size, np.bool_)
        """Which messages the owner has not acknowledged; kept when it is not the only one."""

    def for_owner(self, owner: object, run: Run) -> Receipt:
        """A receipt for a part of the run, owed by another subscription alone."""
        return Receipt(owner, self._acks, run=run, redelivered=self.redelivered)

    def check_owner(self, owner: object, what: object) -> None:
        if owner is not self.owner:
            raise LocalProtocolError(f"{what!r} came from another subscription; ack it there")

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

    def ack(self, owner: object) -> None:
        """Acknowledge it for its subscription. Raises LocalProtocolError if that is another."""
        self._receipt.check_owner(owner, self)
        self._receipt.ack(self.message_id, self.message_id + 1)

    def __repr__(self) -> str:
        payload = self.payload
        shown = repr(payload) if len(payload) <= _SHOWN_BYTES else f"{len(payload)} bytes"
        mark = ", redelivered" if self.redelivered else ""
        return f"<Message {self.message_id} of class {self.class_id}: {shown}{mark}>"


class Batch:
    """Messages of one class with consecutive ids. Iterate for the messages one by one."""

    __slots__ = ("_receipt", "_run")

    def __init__(self, run: Run, receipt: Receipt) -> None:
        self._run = run
        self._receipt = receipt

    @property
    def class_id(self) -> int:
        return self._receipt.class_id

    @property
    def redelivered(self) -> bool:
        """Whether they came behind a later message of their class."""
        return self._receipt.redelivered

    @property
    def first_id(self) -> int:
        """The first message's id; each of the others has the next."""
        return self._run.first_id

    @property
    def message_ids(self) -> range:
        return self._run.ids

    @property
    def data(self) -> memoryview:
        """The wire's frames back to back: header, payload and delimiter of each."""
        return memoryview(self._run.raw)

    @property
    def payloads(self) -> list[bytes]:
        """Every payload in order. Made anew on each access."""
        return self._run.contents(0, self._run.count)

    def messages(self, first: int, last: int) -> tuple[Iterator[bytes], Iterator[Message]]:
        """Messages first..last-1, made as they are asked for.

        The other iterator is the first one's source of payloads: its length hint says how many
        messages were not asked for yet, at no cost to who asks.
        """
        payloads = iter(self._run.contents(first, last))
        ids = self._run.ids[first:last]
        return payloads, map(Message, payloads, ids, repeat(self._receipt))

    def part(self, first: int, last: int) -> Batch:
        """Messages first..last-1 as a batch of their own."""
        return Batch(self._run.part(first, last), self._receipt)

    def for_owner(self, owner: object) -> Batch:
        """The same messages, owed by another subscription alone."""
        return Batch(self._run, self._receipt.for_owner(owner, self._run))

    def ack(self, owner: object) -> None:
        """Acknowledge all for its subscription. Raises LocalProtocolError if that is another."""
        self._receipt.check_owner(owner, self)
        self.ack_part(0, self._run.count)

    def ack_part(self, first: int, last: int) -> None:
        """Acknowledge the messages with these indexes, first..last-1."""
        first_id = self._run.first_id
        self._receipt.ack(first_id + first, first_id + last)

    def __len__(self) -> int:
        return self._run.count

    def __iter__(self) -> Iterator[Message]:
        return self.messages(0, self._run.count)[1]

    def __repr__(self) -> str:
        ids = self._run.ids
        mark = ", redelivered" if self.redelivered else ""
        return f"<Batch of class {self.class_id}: messages {ids[0]} to {ids[-1]}{mark}>"
