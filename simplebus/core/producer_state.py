"""Producer states: the highest stored message number of each named publisher, for deduplication.

A state outlives its sessions for PRODUCER_STATE_SECONDS; the number of states is bounded. A name
belongs to one user and to one running instance at a time. The same instance may connect again
before its former connection is known to be dead.

A message number identifies one message and is stored at most once. After a crash, or after another
instance used the name, the state may contain numbers whose messages are lost or are messages of the
other instance. Then the number in the publisher's Connect is used instead: storing a message twice
is better than losing it.

    numbers of instance A:   confirmed │ sent, outcome unknown │ next
                                       5  6  7  8  9             10

If instance B meanwhile used numbers 5 to 9 and disconnected, A can continue neither at 5 nor at 10.
The server assigns A a number that A has never used, and A sends its five messages again with new
numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    MESSAGE_ID_BITS,
    MESSAGE_ID_MASK,
    PRODUCER_BITMAPS_BYTES_MAX,
    PRODUCER_REFUSALS_MAX,
    PRODUCER_RESENT_NUMBERS_MAX,
    PRODUCER_STATE_SECONDS,
    PRODUCER_STATES_MAX,
    PRODUCER_TAKEOVER_STEP,
    TOTAL_PRODUCER_REFUSALS_MAX,
)
from simplebus.core.protocol.events import FrameRefused
from simplebus.core.protocol.frames import Flags, Integers, flags_to_ranges

_HALF_NUMBER_RANGE = 1 << (MESSAGE_ID_BITS - 1)


def make_producer_key(user: str, name: str) -> str:
    """Return the key of a producer state: the name, prefixed with its user if there is one.

    User names contain no NUL, so keys are unique.
    """
    return f"{user}\0{name}" if user or "\0" in name else name


def number_distance(first: int, last: int) -> int:
    """Return how far `last` is ahead of `first`, negative if it is behind."""
    return ((last - first + _HALF_NUMBER_RANGE) & MESSAGE_ID_MASK) - _HALF_NUMBER_RANGE


class NumberBitmap:
    """Message numbers that are stored although some before them are not.

    One bit per number from `first` up to, but not including, `end`. A single read may leave a
    hundred thousand such numbers.

        first              end
          0  1  1  0  1  1
    """

    __slots__ = ("_bits", "_count", "first")

    def __init__(self, first: int, flags: Flags) -> None:
        """Create a bitmap.

        Args:
            first: The number of the first flag.
            flags: True for each stored number, shape (n,). The last flag is True.
        """
        self.first = first
        self._count = flags.size
        self._bits = np.packbits(flags)

    @classmethod
    def from_flags(cls, first: int, flags: Flags) -> NumberBitmap | None:
        """Return a bitmap of the numbers whose flags are set, or None if no flag is set."""
        stored = np.flatnonzero(flags)
        return cls(first, flags[: stored[-1] + 1]) if stored.size else None

    @property
    def end(self) -> int:
        """The number after the last stored number."""
        return (self.first + self._count) & MESSAGE_ID_MASK

    @property
    def size_bytes(self) -> int:
        return self._bits.size

    def ranges(self) -> list[tuple[int, int]]:
        """Return the runs of stored numbers: (first number, count)."""
        return [
            ((self.first + a) & MESSAGE_ID_MASK, b - a) for a, b in flags_to_ranges(self.flags())
        ]

    def flags(self) -> Flags:
        """Return True for each stored number, from `first` on."""
        flags: Flags = np.unpackbits(self._bits)[: self._count].view(np.bool_)
        return flags

    def contains(self, numbers: Integers) -> Flags:
        """Return True for each of `numbers` that is stored."""
        offsets = (numbers - self.first) & MESSAGE_ID_MASK
        inside = offsets < self._count
        is_stored = np.zeros(numbers.size, np.bool_)
        bit = offsets[inside]
        is_stored[inside] = self._bits[bit >> 3] >> (7 - (bit & 7)) & 1
        return is_stored


@dataclass(slots=True)
class ProducerState:
    """Stored message numbers of one publisher name."""

    key: str = ""
    """User and name, see `make_producer_key`; empty for a publisher without a name."""
    name: str = ""
    instance: str = ""
    """The run of the program that used the name last."""
    next_number: int = 0
    """Every number before it is stored or was refused."""
    stored_ahead: NumberBitmap | None = None
    """Stored numbers above `next_number`; None if no such number is stored."""
    refusals: list[FrameRefused] = field(default_factory=list)
    """Refused messages whose refusal the publisher may not have received."""
    is_uncertain: bool = False
    """True if messages before `next_number` may be lost, until the publisher connects and states
    which numbers were confirmed to it.
    """
    address: str = ""
    """Address of the client that used the name last without a user; empty if unknown."""
    session_id: int | None = None
    """The session that uses the name now; None if the name is not in use."""
    disconnected_at: float = 0.0
    """Seconds since 1970."""
    remote_positions: dict[int, int] = field(default_factory=dict)
    """With remote storage: by class, the newest log position of messages that may not be stored
    yet.
    """

    @property
    def user(self) -> str:
        """The user that owns the name; empty without authentication."""
        return self.key.partition("\0")[0] if "\0" in self.key else ""

    @property
    def owner(self) -> tuple[str, str]:
        """The user, or the address without a user, to which the state is charged."""
        return self.user, self.address

    @property
    def end_number(self) -> int:
        """The first number above all stored and refused numbers."""
        ahead = self.stored_ahead
        if ahead is None or number_distance(self.next_number, ahead.end) < 0:
            return self.next_number
        return ahead.end


class NameClaim(NamedTuple):
    """A publisher name that a session has claimed."""

    producer: ProducerState
    former_session_id: int | None
    """The session from which the name is taken over; None if the name was not in use."""
    is_known: bool
    """True if a state existed."""
    is_other_instance: bool
    """True if another instance used the name before."""


class ProducerStates:
    """All producer states, by `ProducerState.key`."""

    def __init__(self) -> None:
        self.is_incomplete = False
        """True if states may be missing since a power failure."""
        self._by_key: dict[str, ProducerState] = {}
        self._disconnected: dict[str, ProducerState] = {}
        """States without a session, the longest disconnected first."""
        self._disconnected_by_owner: dict[tuple[str, str], dict[str, ProducerState]] = {}
        self._bitmap_bytes: dict[str, int] = {}
        """Size of each state's bitmap, the least recently updated first."""
        self._total_bitmap_bytes = 0
        self._refusal_counts: dict[str, int] = {}
        """Remembered refusals of each state, the least recently refused first."""
        self._total_refusal_count = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def claim_name(
        self, name: str, instance: str, session_id: int, *, user: str = "", address: str = ""
    ) -> NameClaim:
        """Assign a publisher name to a session.

        The caller ends the former session, if there is one, and then calls `resume`. States without
        a user are charged to `address`.

        Raises:
            RemoteProtocolError: (name_in_use) if another instance uses the name.
        """
        key = make_producer_key(user, name)
        producer = self._by_key.get(key)
        is_known = producer is not None
        if producer is None:
            producer = self._by_key[key] = ProducerState(key, name)
        old_session_id = producer.session_id
        is_other_instance = is_known and instance != producer.instance
        if old_session_id is not None and (is_other_instance or not instance):
            raise RemoteProtocolError(
                Reason.NAME_IN_USE,
                f"the name {name!r} is used by session {old_session_id}, "
                "which belongs to another instance",
            )
        self._remove_disconnected(producer)
        producer.instance = instance
        producer.session_id = session_id
        producer.address = address
        return NameClaim(producer, old_session_id, is_known, is_other_instance)

    def resume(self, claim: NameClaim, unconfirmed: int | None, *, is_other_bus: bool) -> int:
        """Set the number at which the publisher continues.

        Args:
            claim: The claimed name.
            unconfirmed: The publisher's first unconfirmed number; None if its Connect has none.
            is_other_bus: True if `unconfirmed` is a number of another bus.

        Returns:
            The number of confirmed messages that are known not to be stored.
        """
        producer = claim.producer
        is_other_run = claim.is_other_instance or not producer.instance
        if is_other_bus and not claim.is_other_instance:
            self._skip_numbers_of_same_instance(producer)
        elif is_other_bus or (is_other_run and unconfirmed is None):
            self.restart_at(producer, producer.end_number)
        elif unconfirmed is None:
            self.resume_without_confirmed(producer)
        elif claim.is_other_instance and not producer.is_uncertain:
            # The known numbers belong to messages of the other instance. Messages of this one may
            # be stored or not, so it continues at a number that it cannot have used.
            self.restart_at(producer, (unconfirmed + PRODUCER_TAKEOVER_STEP) & MESSAGE_ID_MASK)
        elif claim.is_known or self.is_incomplete:
            return self.resume_at(producer, unconfirmed)
        else:  # The state expired; everything that was confirmed then was stored.
            self.restart_at(producer, unconfirmed)
        return 0

    def get(self, key: str) -> ProducerState | None:
        """Return the state with a key, or None if the key is unknown."""
        return self._by_key.get(key)

    def last_instance(self, key: str) -> str | None:
        """Return the instance that used a name last: "" if unknown, None for a new name."""
        producer = self._by_key.get(key)
        return None if producer is None else producer.instance

    def __iter__(self) -> Iterator[ProducerState]:
        return iter(self._by_key.values())

    def _skip_numbers_of_same_instance(self, producer: ProducerState) -> None:
        """Continue above all stored and refused numbers, after a Connect with another bus.

        This Connect may have been delayed, so that its publisher has already used the numbers in
        another session, and comes again. So refusals are kept. If numbers are missing, the state
        continues at a number that the publisher cannot have used.
        """
        refusals, next_number = producer.refusals, producer.end_number
        if producer.stored_ahead is not None:
            next_number = (next_number + PRODUCER_TAKEOVER_STEP) & MESSAGE_ID_MASK
        self.restart_at(producer, next_number)
        self._set_refusals(producer, refusals)

    def resume_without_confirmed(self, producer: ProducerState) -> None:
        """Continue for a publisher whose Connect has no unconfirmed number.

        It may be the same instance, so its state is kept unless it is uncertain.
        """
        if producer.is_uncertain:
            self.restart_at(producer, 0)

    def restart_at(self, producer: ProducerState, next_number: int) -> None:
        """Continue at `next_number` and forget everything above it."""
        producer.is_uncertain = False
        self.set_progress(producer, next_number, None)
        self._set_refusals(producer, [])

    def resume_at(self, producer: ProducerState, unconfirmed: int) -> int:
        """Continue for the same instance, to which every number below `unconfirmed` was confirmed.

        The publisher sends all numbers again from the one in the Connect reply on. So that it
        receives refusals that it may have missed, the state goes back to the first number of these
        refusals, and the numbers used after it become `stored_ahead`.

        Returns:
            The number of confirmed messages that are known not to be stored.
        """
        missing = 0
        if producer.is_uncertain:
            missing = max(0, number_distance(producer.next_number, unconfirmed))
            self.restart_at(producer, unconfirmed)
            return missing
        if number_distance(producer.next_number, unconfirmed) > 0:
            missing = number_distance(producer.next_number, unconfirmed)
            ahead = producer.stored_ahead
            if ahead is not None:
                at = number_distance(ahead.first, unconfirmed)
                flags = ahead.flags()
                missing -= int(np.count_nonzero(flags[: max(0, at)]))
                ahead = (
                    NumberBitmap.from_flags(unconfirmed, flags[at:])
                    if 0 <= at < flags.size
                    else None
                )
            self.set_progress(producer, unconfirmed, ahead)
        oldest = unconfirmed
        if number_distance(oldest, producer.next_number) > PRODUCER_RESENT_NUMBERS_MAX:
            oldest = (producer.next_number - PRODUCER_RESENT_NUMBERS_MAX) & MESSAGE_ID_MASK
        unreceived = [
            refusal
            for refusal in producer.refusals
            if number_distance(oldest, refusal.refers_to + refusal.count) > 0
        ]
        self._set_refusals(producer, unreceived)
        starts = (max(0, number_distance(oldest, refusal.refers_to)) for refusal in unreceived)
        first = (oldest + min(starts, default=_HALF_NUMBER_RANGE)) & MESSAGE_ID_MASK
        rewound_count = number_distance(first, producer.next_number)
        if unreceived and rewound_count > 0:
            ahead_count = max(0, number_distance(producer.next_number, producer.end_number))
            flags = np.ones(rewound_count + ahead_count, np.bool_)
            if producer.stored_ahead is not None:
                numbers = np.arange(producer.next_number, producer.next_number + ahead_count)
                flags[rewound_count:] = producer.stored_ahead.contains(numbers & MESSAGE_ID_MASK)
            self.set_progress(producer, first, NumberBitmap.from_flags(first, flags))
        return missing

    def add_refusal(self, producer: ProducerState, refused: FrameRefused) -> None:
        """Record that messages were refused. Their numbers count as used."""
        refusals = producer.refusals
        joined = refusals[-1].merge(refused) if refusals else None
        if joined is not None:
            refusals[-1] = joined
        else:
            refusals = [*refusals[1 - PRODUCER_REFUSALS_MAX :], refused]
        self._set_refusals(producer, refusals)

    def _set_refusals(self, producer: ProducerState, refusals: list[FrameRefused]) -> None:
        """Replace the refusals of a state. If all states have too many refusals in total, the least
        recently refused states lose their refusals.
        """
        producer.refusals = refusals
        self._total_refusal_count -= self._refusal_counts.pop(producer.key, 0)
        if refusals:
            self._refusal_counts[producer.key] = len(refusals)
            self._total_refusal_count += len(refusals)
        while self._total_refusal_count > TOTAL_PRODUCER_REFUSALS_MAX:
            self._set_refusals(self._by_key[next(iter(self._refusal_counts))], [])

    def restore(
        self,
        key: str,
        next_number: int,
        ahead: NumberBitmap | None,
        now: float,
        *,
        instance: str = "",
        refusals: list[FrameRefused] | None = None,
        is_uncertain: bool = False,
    ) -> None:
        """Add a state that was recovered from the journal. `now` is in seconds since 1970."""
        name = key.partition("\0")[2] or key
        producer = self._by_key[key] = ProducerState(key, name, instance, is_uncertain=is_uncertain)
        self.set_progress(producer, next_number, ahead)
        self._set_refusals(producer, refusals or [])
        self.mark_disconnected(producer, now)

    def set_progress(
        self, producer: ProducerState, next_number: int, ahead: NumberBitmap | None
    ) -> None:
        """Record which numbers are stored.

        If all bitmaps together take too much memory, the least recently updated are dropped.
        """
        producer.next_number, producer.stored_ahead = next_number, ahead
        self._total_bitmap_bytes -= self._bitmap_bytes.pop(producer.key, 0)
        if ahead is not None:
            self._bitmap_bytes[producer.key] = ahead.size_bytes
            self._total_bitmap_bytes += ahead.size_bytes
        while self._total_bitmap_bytes > PRODUCER_BITMAPS_BYTES_MAX:
            self._drop_bitmap(next(iter(self._bitmap_bytes)))

    def mark_disconnected(self, producer: ProducerState, now: float) -> None:
        """Record that the session of a publisher has ended at `now`, in seconds since 1970."""
        producer.session_id = None
        producer.disconnected_at = now
        self._disconnected[producer.key] = producer
        self._disconnected_by_owner.setdefault(producer.owner, {})[producer.key] = producer

    def _remove_disconnected(self, producer: ProducerState) -> None:
        if self._disconnected.pop(producer.key, None) is not None:
            owned_producers = self._disconnected_by_owner[producer.owner]
            del owned_producers[producer.key]
            if not owned_producers:
                del self._disconnected_by_owner[producer.owner]

    def expire(self, now: float) -> None:
        """Remove expired states. If too many states remain, remove the oldest states of the user or
        address with the most states.

        Called once per tick.
        """
        while self._disconnected:
            oldest = next(iter(self._disconnected.values()))
            if oldest.disconnected_at + PRODUCER_STATE_SECONDS > now:
                break
            self._remove(oldest)
        excess = len(self._by_key) - PRODUCER_STATES_MAX
        while excess > 0 and self._disconnected:
            largest, *next_largest = heapq.nlargest(
                2, self._disconnected_by_owner.values(), key=len
            )
            count = min(
                excess, max(1, len(largest) - len(next_largest[0]) if next_largest else excess)
            )
            for oldest in list(islice(largest.values(), count)):
                self._remove(oldest)
                excess -= 1

    def _remove(self, producer: ProducerState) -> None:
        self._drop_bitmap(producer.key)
        self._set_refusals(producer, [])
        self._remove_disconnected(producer)
        del self._by_key[producer.key]

    def _drop_bitmap(self, key: str) -> None:
        producer = self._by_key[key]
        if producer.stored_ahead is not None:
            # The publisher sends all numbers from `next_number` on again, refused ones included.
            self._set_refusals(producer, [])
        producer.stored_ahead = None
        self._total_bitmap_bytes -= self._bitmap_bytes.pop(key, 0)
