"""One session's part in a group by key (see `key_group`).

Rule 1: it holds single messages, in no order: taking one out costs the same wherever it lies.
Rule 2: what it has is told in spans, as of any member.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

from simplebus.core.group.group import GroupMember
from simplebus.core.group.keys_in_flight import KeyOrderedInFlight
from simplebus.core.limits import EXPLAINED_SPANS, REDELIVERY_BYTES
from simplebus.core.protocol.frames import Integers
from simplebus.core.redelivery.ack_timer import SequenceSet, Span
from simplebus.core.redelivery.delivery_state import Sets
from simplebus.core.session.outbox import Outbox

if TYPE_CHECKING:
    from simplebus.core.group.key_ordered_group import KeyOrderedGroup


class AssignedBatch(NamedTuple):
    """Messages that are handed out together, ascending."""

    sequences: list[int]
    sizes: list[int]
    """How long each of them is."""
    attempts: int
    """How often all of them were sent before."""

    def split_at(self, space_bytes: int) -> tuple[AssignedBatch, AssignedBatch]:
        """As many as have space, one at least, and the rest."""
        count = 1 + sum(1 for end in accumulate(self.sizes) if end < space_bytes)
        front = AssignedBatch(self.sequences[:count], self.sizes[:count], self.attempts)
        return front, AssignedBatch(self.sequences[count:], self.sizes[count:], self.attempts)


class KeyOrderedMember(GroupMember):
    """One session's part in a group by key. It holds single messages, in no order."""

    group: KeyOrderedGroup

    def __init__(
        self,
        group: KeyOrderedGroup,
        outbox: Outbox,
        subscription_number: int,
        in_flight_max: int,
        identity: str,
    ) -> None:
        super().__init__(group, outbox, subscription_number, in_flight_max)
        self.identity = identity
        """What its lanes follow from."""
        self.ready_sequences: deque[int] = deque()
        """What may be handed out to it, when it has room."""
        self._assigned_batches: deque[AssignedBatch] = deque()
        """What it was handed out and is not sent yet."""
        self._in_flight = KeyOrderedInFlight(group.attempts_by_sequence)

    @property
    def has_frames_to_copy(self) -> bool:
        return bool(self._assigned_batches)

    @property
    def has_work(self) -> bool:
        return bool(self._assigned_batches)

    def iter_spans(self) -> Iterator[Span]:
        yield from self.group.build_spans(
            s for handed in self._assigned_batches for s in handed.sequences
        )
        yield from self.group.build_spans(self._in_flight.held_messages)

    def has_in_flight(
        self, first: int, last: int, attempt: int, *, include_waiting: bool = False
    ) -> bool:
        return self._in_flight.has_in_flight(first, last, attempt)

    def assign_batch(self, batch: AssignedBatch, tick: int) -> None:
        """These are to be sent to it."""
        if not self._assigned_batches:
            self.assigned_tick = tick
        self._assigned_batches.append(batch)
        self._adjust_counts(len(batch.sequences), sum(batch.sizes))
        self.outbox.wake(self)

    def _adjust_counts(self, count: int, size_bytes: int) -> None:
        """It has so many messages more, with so many bytes."""
        self.assigned_count += count
        self.assigned_bytes += size_bytes
        self.group.update_availability(self)

    def pop_unsent(self) -> list[Span]:
        back = self._pop_assigned(lambda sequence: True)
        return self.group.build_spans(back)

    def _pop_assigned(self, predicate: Callable[[int], bool]) -> list[int]:
        """Of what it was handed out and is not sent it has these no longer. Returns them."""
        gone: list[int] = []
        size, left = 0, deque[AssignedBatch]()
        for handed in self._assigned_batches:
            kept = AssignedBatch([], [], handed.attempts)
            for sequence, length in zip(handed.sequences, handed.sizes, strict=True):
                if predicate(sequence):
                    gone.append(sequence)
                    size += length
                else:
                    kept.sequences.append(sequence)
                    kept.sizes.append(length)
            if kept.sequences:
                left.append(kept)
        self._assigned_batches = left
        if gone:
            self._adjust_counts(-len(gone), -size)
        return gone

    def iter_in_flight(self) -> Iterator[tuple[int, Span]]:
        by_due: dict[int, list[int]] = {}
        for sequence, (due, _) in self._in_flight.held_messages.items():
            by_due.setdefault(due, []).append(sequence)
        for due, held in by_due.items():
            yield from ((due, span) for span in self.group.build_spans(held))

    def pop_in_flight(self) -> list[tuple[int, Span]]:
        spans = list(self.iter_in_flight())
        self.remove_in_flight_sequences(list(self._in_flight.held_messages))
        return spans

    def remove_in_flight(self, first: int, last: int, attempt: int = 0) -> list[Span]:
        return self.group.build_spans(self.remove_in_flight_range(first, last, attempt))

    def remove_in_flight_range(self, first: int, last: int, attempt: int = 0) -> list[int]:
        """It has none of first..last-1 any longer, or none with this attempt. Returns what of them
        it was sent."""
        return self._record_removed(*self._in_flight.remove_range(first, last, attempt))

    def remove_in_flight_sequences(self, sequences: Iterable[int]) -> list[int]:
        """The same for these."""
        return self._record_removed(*self._in_flight.remove_sequences(sequences))

    def remove_in_flight_ranges(self, firsts: Integers, lasts: Integers) -> list[int]:
        """The same for many ranges."""
        if ((lasts - firsts) == 1).all():
            return self.remove_in_flight_sequences(firsts.tolist())
        gone: list[int] = []
        size = 0
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            some, some_size = self._in_flight.remove_range(first, last)
            gone += some
            size += some_size
        return self._record_removed(gone, size)

    def _record_removed(self, sequences: list[int], size_bytes: int) -> list[int]:
        if sequences:
            self._adjust_counts(-len(sequences), -size_bytes)
        return sequences

    def pop_overdue(self, tick: int) -> list[Span]:
        return self.group.build_spans(
            self.remove_in_flight_sequences(self._in_flight.find_overdue(tick))
        )

    def extend_ack_timeouts(self, first: int, last: int, tick: int, attempt: int) -> None:
        """The ack timeout of what it was sent of first..last-1, or so often, begins again."""
        pause = self.group.delivery_policy.pause
        self._in_flight.extend_timeouts(
            first, last, lambda attempts: tick + pause(attempts), attempt
        )

    def skip_to(self, floor: int) -> None:
        self.purge(0, floor)

    def purge(self, first: int, last: int) -> None:
        self.remove_in_flight_range(first, last)
        self._pop_assigned(lambda sequence: first <= sequence < last)

    @property
    def unsent_count(self) -> int:
        return sum(len(handed.sequences) for handed in self._assigned_batches)

    def in_flight_sets(self) -> Sets:
        found: dict[tuple[int, int], SequenceSet] = {}
        for sequence, (due, _) in islice(self._in_flight.held_messages.items(), EXPLAINED_SPANS):
            key = (due, self.group.attempts_by_sequence.get(sequence, 0))
            found.setdefault(key, SequenceSet()).add(sequence, sequence + 1)
        return [(*key, held) for key, held in found.items()]

    def copy_frames(self, tick: int) -> bytes:
        self._mark_responsive()
        self.scanned_count = 0
        data = b""
        while self._assigned_batches and not data:
            data = self._copy_next_batch(tick)
        self.assigned_tick = tick
        return data

    def _copy_next_batch(self, tick: int) -> bytes:
        """Send what it was handed first, as much of it as goes at once."""
        group, handed = self.group, self._assigned_batches.popleft()
        if sum(handed.sizes) > REDELIVERY_BYTES:
            handed, rest = handed.split_at(REDELIVERY_BYTES)
            if rest.sequences:
                self._assigned_batches.appendleft(rest)
        sequences, sizes = handed.sequences, handed.sizes
        self.scanned_count += len(sequences)
        late = group.find_expired(sequences)
        if late:
            size_of = dict(zip(sequences, sizes, strict=True))
            self._adjust_counts(-len(late), -sum(map(size_of.pop, late)))
            group.skip_expired(late)
            sequences, sizes = list(size_of), list(size_of.values())
        if not sequences:
            return b""
        self.attempt = handed.attempts + 1
        data, due = group.copy_messages(sequences, handed.attempts, tick)
        self._in_flight.add_sent(
            sequences, sizes, attempts=max(handed.attempts + 1, 1), due_tick=due
        )
        return data

    def _mark_responsive(self) -> None:
        if self.is_unresponsive:
            super()._mark_responsive()
            self.group.restore_member(self)

    def check_invariants(self) -> None:
        """Raise AssertionError unless what it was sent is where it is looked for."""
        self._in_flight.check_invariants()
