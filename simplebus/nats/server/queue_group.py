"""The subscriptions that share messages: each message goes to one of those with a queue's name.

Rule 1: any member is as likely as any other. Where the one that is chosen takes none, it is another
that does; a message that no member takes is taken by nobody.
Rule 2: a large group costs its messages no more than a small one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol

import numpy as np

from simplebus.nats.protocol.events import MixedBatch, Indexes, Pub, UniformBatch, row_indexes
from simplebus.nats.server.subscription import Subscription

if TYPE_CHECKING:
    from simplebus.nats.server.session import NatsSession

_DRAWN = 256
# So many messages are shared one by one: arrays for them cost more.
_FEW_ROWS = 24
# From so many members on it is remembered where in the list each is.
_INDEXED_MEMBERS = 16


class Dice:
    """Random numbers, drawn by the dozen: one by one they cost what a message does."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._drawn: list[float] = []

    def one(self, below: int) -> int:
        """From 0 on."""
        if not self._drawn:
            self._drawn = self._generator.random(_DRAWN).tolist()
        return int(self._drawn.pop() * below)

    def many(self, below: int, count: int) -> Indexes:
        """Shape (count,)."""
        return self._generator.integers(below, size=count)


class _Members(Protocol):
    """Some subscriptions, by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Subscription: ...
    def __iter__(self) -> Iterator[Subscription]: ...


class _Chained:
    """The members of several groups: there are many such combinations, so none has its copy."""

    __slots__ = ("_ends", "_lists")

    def __init__(self, lists: list[list[Subscription]]) -> None:
        self._lists = lists
        self._ends = list(accumulate(map(len, lists)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int, /) -> Subscription:
        at = bisect_right(self._ends, number)  # Counted from the end of the list that has it:
        return self._lists[at][number - self._ends[at]]

    def __iter__(self) -> Iterator[Subscription]:
        return chain.from_iterable(self._lists)


class _Sharing(ABC):
    """A sink that puts each message to one of its members."""

    __slots__ = ("_dice", "_takers", "_takers_for")

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self._takers: list[Subscription] = []
        self._takers_for: tuple[NatsSession | None, bytes, int] | None = None
        """For whose messages, on which subject, of which members these are those who take."""

    @property
    def is_ordered(self) -> bool:
        """Its members' messages are put in order when they are written."""
        return False

    @property
    @abstractmethod
    def version(self) -> int:
        """Grows when a member comes or goes."""

    @abstractmethod
    def current(self) -> _Members:
        """Its members now."""

    def one(self, message: Pub, origin: NatsSession | None) -> bool:
        members = self.current()
        if not members:
            return False
        if members[self._dice.one(len(members))].one(message, origin):
            return True
        takers = self._who_take(message.subject, origin)
        return bool(takers) and takers[self._dice.one(len(takers))].one(message, origin)

    def many(self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None) -> None:
        members = self.current()
        if len(members) <= 1:
            for member in members:
                member.many(messages, rows, origin)
            return
        left = self._share(members, messages, row_indexes(messages, rows), origin)
        if not left.size:
            return
        for subject, rest in _by_subject(messages, left):
            size = rest.size + 1
            while 0 < rest.size < size and (takers := self._who_take(subject, origin)):
                size = rest.size
                rest = self._share(takers, messages, rest, origin)

    def _who_take(self, subject: bytes, origin: NatsSession | None) -> list[Subscription]:
        """Members that take this client's messages on this subject."""
        asked = (origin, subject, self.version)
        if self._takers_for != asked:
            members = self.current()
            self._takers = [member for member in members if member.takes(subject, origin)]
            self._takers_for = asked
        return self._takers

    def _share(
        self,
        takers: _Members,
        messages: UniformBatch | MixedBatch,
        rows: Indexes,
        origin: NatsSession | None,
    ) -> Indexes:
        """Put the messages to these members. Returns those that none takes, in ascending order."""
        if rows.size <= _FEW_ROWS:
            return self._share_few(takers, messages, rows, origin)
        chosen = self._dice.many(len(takers), rows.size)
        order = chosen.argsort(kind="stable")
        parts = np.split(rows[order], np.flatnonzero(np.diff(chosen[order])) + 1)
        whose = [takers[number] for number in np.unique(chosen).tolist()]
        left = [
            member.part(messages, part, origin) for member, part in zip(whose, parts, strict=True)
        ]
        return np.sort(np.concatenate(left))

    def _share_few(
        self,
        takers: _Members,
        messages: UniformBatch | MixedBatch,
        rows: Indexes,
        origin: NatsSession | None,
    ) -> Indexes:
        """The same for a few rows: arrays cost more than they save."""
        chosen: dict[int, list[int]] = {}
        for row in rows.tolist():
            chosen.setdefault(self._dice.one(len(takers)), []).append(row)
        # Found before any takes its part: with that it may end, and the others have other numbers.
        whose = [(takers[number], part) for number, part in chosen.items()]
        left = [
            rest
            for member, part in whose
            if (rest := member.part(messages, np.array(part), origin)).size
        ]
        return np.sort(np.concatenate(left)) if left else rows[:0]


class QueueGroup(_Sharing):
    """Those that subscribed to one subject by one queue name."""

    __slots__ = ("_at", "_version", "members", "queue", "subject")

    def __init__(self, dice: Dice, subject: bytes, queue: bytes) -> None:
        super().__init__(dice)
        self.subject = subject
        self.queue = queue
        self.members: list[Subscription] = []
        self._at: dict[Subscription, int] | None = None
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def current(self) -> list[Subscription]:
        return self.members

    def add(self, member: Subscription) -> None:
        """One more."""
        if self._at is not None:
            self._at[member] = len(self.members)
        self.members.append(member)
        if self._at is None and len(self.members) >= _INDEXED_MEMBERS:
            self._at = {member: at for at, member in enumerate(self.members)}
        self._version += 1

    def remove(self, member: Subscription) -> None:
        """It leaves. The last one takes its place in the list."""
        at = self.members.index(member) if self._at is None else self._at.pop(member)
        last = self.members.pop()
        if last is not member:
            self.members[at] = last
            if self._at is not None:
                self._at[last] = at
        self._version += 1


class JoinedGroup(_Sharing):
    """Those that subscribed by one queue name to several subjects that all match a message."""

    __slots__ = ("_groups", "_members", "_members_for")

    def __init__(self, dice: Dice, groups: tuple[QueueGroup, ...]) -> None:
        super().__init__(dice)
        self._groups = groups
        self._members = _Chained([])
        self._members_for = -1

    @property
    def version(self) -> int:
        return sum(group.version for group in self._groups)

    def current(self) -> _Members:
        version = self.version
        if version != self._members_for:
            self._members = _Chained([group.members for group in self._groups])
            self._members_for = version
        return self._members


def _by_subject(messages: UniformBatch | MixedBatch, rows: Indexes) -> Iterator[tuple[bytes, Indexes]]:
    """Rows of the same subject together."""
    if isinstance(messages, UniformBatch):
        yield messages.first_message.subject, rows
        return
    numbers = messages.subject_numbers[rows]
    for number in np.unique(numbers).tolist():
        these = rows[numbers == number]
        yield messages.subject_at(these[0]), these
