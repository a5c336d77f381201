"""One session's part in a group by key (see `key_group`).

Rule 1: it holds single messages, in no order: taking one out costs the same wherever it lies.
Rule 2: what it has is told in spans, as of any member.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

from simplebus.core.group.group import Member
from simplebus.core.group.keys_in_flight import Sent
from simplebus.core.limits import EXPLAINED_SPANS, REDELIVERY_BYTES
from simplebus.core.protocol.frames import Integers
from simplebus.core.redelivery.ack_timer import SequenceSet, Span
from simplebus.core.redelivery.delivery_state import Sets
from simplebus.core.session.outbox import Outbox

if TYPE_CHECKING:
    from simplebus.core.group.key_ordered_group import KeyGroup


class Handed(NamedTuple):
    """Messages that are handed out together, ascending."""

    sequences: list[int]
    sizes: list[int]
    """How long each of them is."""
    attempts: int
    """How often all of them were sent before."""

    def cut(self, space: int) -> tuple[Handed, Handed]:
        """As many as have space, one at least, and the rest."""
        count = 1 + sum(1 for end in accumulate(self.sizes) if end < space)
        front = Handed(self.sequences[:count], self.sizes[:count], self.attempts)
        return front, Handed(self.sequences[count:], self.sizes[count:], self.attempts)


class KeyMember(Member):
    """One session's part in a group by key. It holds single messages, in no order."""

    group: KeyGroup

    def __init__(
        self, group: KeyGroup, outbox: Outbox, number: int, in_flight_max: int, identity: str
    ) -> None:
        super().__init__(group, outbox, number, in_flight_max)
        self.identity = identity
        """What its lanes follow from."""
        self.ready: deque[int] = deque()
        """What may be handed out to it, when it has room."""
        self._handed: deque[Handed] = deque()
        """What it was handed out and is not sent yet."""
        self._sent = Sent(group.attempts_of)

    @property
    def copies(self) -> bool:
        return bool(self._handed)

    @property
    def has_work(self) -> bool:
        return bool(self._handed)

    def parts(self) -> Iterator[Span]:
        yield from self.group.spans_of(s for handed in self._handed for s in handed.sequences)
        yield from self.group.spans_of(self._sent.held)

    def holds(self, first: int, last: int, attempt: int, *, waiting: bool = False) -> bool:
        return self._sent.holds(first, last, attempt)

    def hand_some(self, handed: Handed, tick: int) -> None:
        """These are to be sent to it."""
        if not self._handed:
            self.handed_tick = tick
        self._handed.append(handed)
        self._weigh(len(handed.sequences), sum(handed.sizes))
        self.outbox.wake(self)

    def _weigh(self, count: int, size: int) -> None:
        """It has so many messages more, with so many bytes."""
        self.held += count
        self.held_bytes += size
        self.group.offer(self)

    def give_back(self) -> list[Span]:
        back = self._take_handed(lambda sequence: True)
        return self.group.spans_of(back)

    def _take_handed(self, which: Callable[[int], bool]) -> list[int]:
        """Of what it was handed out and is not sent it has these no longer. Returns them."""
        gone: list[int] = []
        size, left = 0, deque[Handed]()
        for handed in self._handed:
            kept = Handed([], [], handed.attempts)
            for sequence, length in zip(handed.sequences, handed.sizes, strict=True):
                if which(sequence):
                    gone.append(sequence)
                    size += length
                else:
                    kept.sequences.append(sequence)
                    kept.sizes.append(length)
            if kept.sequences:
                left.append(kept)
        self._handed = left
        if gone:
            self._weigh(-len(gone), -size)
        return gone

    def in_flight(self) -> Iterator[tuple[int, Span]]:
        by_due: dict[int, list[int]] = {}
        for sequence, (due, _) in self._sent.held.items():
            by_due.setdefault(due, []).append(sequence)
        for due, held in by_due.items():
            yield from ((due, span) for span in self.group.spans_of(held))

    def give_up(self) -> list[tuple[int, Span]]:
        spans = list(self.in_flight())
        self.lose_some(list(self._sent.held))
        return spans

    def lose(self, first: int, last: int, attempt: int = 0) -> list[Span]:
        return self.group.spans_of(self.lose_range(first, last, attempt))

    def lose_range(self, first: int, last: int, attempt: int = 0) -> list[int]:
        """It has none of first..last-1 any longer, or none with this attempt. Returns what of them
        it was sent."""
        return self._lost(*self._sent.lose_range(first, last, attempt))

    def lose_some(self, sequences: Iterable[int]) -> list[int]:
        """The same for these."""
        return self._lost(*self._sent.lose(sequences))

    def lose_ranges(self, firsts: Integers, lasts: Integers) -> list[int]:
        """The same for many ranges."""
        if ((lasts - firsts) == 1).all():
            return self.lose_some(firsts.tolist())
        gone: list[int] = []
        size = 0
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            some, some_size = self._sent.lose_range(first, last)
            gone += some
            size += some_size
        return self._lost(gone, size)

    def _lost(self, sequences: list[int], size: int) -> list[int]:
        if sequences:
            self._weigh(-len(sequences), -size)
        return sequences

    def overdue(self, tick: int) -> list[Span]:
        return self.group.spans_of(self.lose_some(self._sent.overdue(tick)))

    def postpone(self, first: int, last: int, tick: int, attempt: int) -> None:
        """The ack timeout of what it was sent of first..last-1, or so often, begins again."""
        pause = self.group.terms.pause
        self._sent.postpone(first, last, lambda attempts: tick + pause(attempts), attempt)

    def skip_to(self, floor: int) -> None:
        self.purge(0, floor)

    def purge(self, first: int, last: int) -> None:
        self.lose_range(first, last)
        self._take_handed(lambda sequence: first <= sequence < last)

    @property
    def unsent(self) -> int:
        return sum(len(handed.sequences) for handed in self._handed)

    def sets(self) -> Sets:
        found: dict[tuple[int, int], SequenceSet] = {}
        for sequence, (due, _) in islice(self._sent.held.items(), EXPLAINED_SPANS):
            key = (due, self.group.attempts_of.get(sequence, 0))
            found.setdefault(key, SequenceSet()).add(sequence, sequence + 1)
        return [(*key, held) for key, held in found.items()]

    def take(self, tick: int) -> bytes:
        self._is_here()
        self.looked = 0
        data = b""
        while self._handed and not data:
            data = self._take_some(tick)
        self.handed_tick = tick
        return data

    def _take_some(self, tick: int) -> bytes:
        """Send what it was handed first, as much of it as goes at once."""
        group, handed = self.group, self._handed.popleft()
        if sum(handed.sizes) > REDELIVERY_BYTES:
            handed, rest = handed.cut(REDELIVERY_BYTES)
            if rest.sequences:
                self._handed.appendleft(rest)
        sequences, sizes = handed.sequences, handed.sizes
        self.looked += len(sequences)
        late = group.late_ones(sequences)
        if late:
            size_of = dict(zip(sequences, sizes, strict=True))
            self._weigh(-len(late), -sum(map(size_of.pop, late)))
            group.leave_out(late)
            sequences, sizes = list(size_of), list(size_of.values())
        if not sequences:
            return b""
        self.attempt = handed.attempts + 1
        data, due = group.write(sequences, handed.attempts, tick)
        self._sent.put(sequences, sizes, attempts=max(handed.attempts + 1, 1), due=due)
        return data

    def _is_here(self) -> None:
        if self.is_late:
            super()._is_here()
            self.group.is_back(self)

    def check(self) -> None:
        """Raise AssertionError unless what it was sent is where it is looked for."""
        self._sent.check()
