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

from simplebus.nats.protocol.events import Indexes, MixedBatch, Pub, UniformBatch, row_indexes
from simplebus.nats.server.subscription import NatsSubscription

if TYPE_CHECKING:
    from simplebus.nats.server.session import NatsSession

_DRAW_COUNT = 256
# So many messages are shared one by one: arrays for them cost more.
_FEW_ROWS = 24
# From so many members on it is remembered where in the list each is.
_INDEXED_MEMBERS = 16


class RandomNumbers:
    """Random numbers, drawn by the dozen: one by one they cost what a message does."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._drawn: list[float] = []

    def draw(self, below: int) -> int:
        """From 0 on."""
        if not self._drawn:
            self._drawn = self._generator.random(_DRAW_COUNT).tolist()
        return int(self._drawn.pop() * below)

    def draw_many(self, below: int, count: int) -> Indexes:
        """Shape (count,)."""
        return self._generator.integers(below, size=count)


class _MemberSequence(Protocol):
    """Some subscriptions, by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> NatsSubscription: ...
    def __iter__(self) -> Iterator[NatsSubscription]: ...


class _ConcatenatedMembers:
    """The members of several groups: there are many such combinations, so none has its copy."""

    __slots__ = ("_ends", "_lists")

    def __init__(self, lists: list[list[NatsSubscription]]) -> None:
        self._lists = lists
        self._ends = list(accumulate(map(len, lists)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int, /) -> NatsSubscription:
        at = bisect_right(self._ends, number)  # Counted from the end of the list that has it:
        return self._lists[at][number - self._ends[at]]

    def __iter__(self) -> Iterator[NatsSubscription]:
        return chain.from_iterable(self._lists)


class _GroupSink(ABC):
    """A sink that puts each message to one of its members."""

    __slots__ = ("_random", "_accepting", "_accepting_key")

    def __init__(self, random: RandomNumbers) -> None:
        self._random = random
        self._accepting: list[NatsSubscription] = []
        self._accepting_key: tuple[NatsSession | None, bytes, int] | None = None
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
    def current_members(self) -> _MemberSequence:
        """Its members now."""

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        members = self.current_members()
        if not members:
            return False
        if members[self._random.draw(len(members))].deliver(message, origin):
            return True
        takers = self._find_accepting(message.subject, origin)
        return bool(takers) and takers[self._random.draw(len(takers))].deliver(message, origin)

    def deliver_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> None:
        members = self.current_members()
        if len(members) <= 1:
            for member in members:
                member.deliver_batch(messages, rows, origin)
            return
        left = self._distribute(members, messages, row_indexes(messages, rows), origin)
        if not left.size:
            return
        for subject, rest in _group_by_subject(messages, left):
            size = rest.size + 1
            while 0 < rest.size < size and (takers := self._find_accepting(subject, origin)):
                size = rest.size
                rest = self._distribute(takers, messages, rest, origin)

    def _find_accepting(self, subject: bytes, origin: NatsSession | None) -> list[NatsSubscription]:
        """Members that take this client's messages on this subject."""
        asked = (origin, subject, self.version)
        if self._accepting_key != asked:
            members = self.current_members()
            self._accepting = [member for member in members if member.accepts(subject, origin)]
            self._accepting_key = asked
        return self._accepting

    def _distribute(
        self,
        members: _MemberSequence,
        messages: UniformBatch | MixedBatch,
        rows: Indexes,
        origin: NatsSession | None,
    ) -> Indexes:
        """Put the messages to these members. Returns those that none takes, in ascending order."""
        if rows.size <= _FEW_ROWS:
            return self._distribute_few(members, messages, rows, origin)
        chosen = self._random.draw_many(len(members), rows.size)
        order = chosen.argsort(kind="stable")
        parts = np.split(rows[order], np.flatnonzero(np.diff(chosen[order])) + 1)
        whose = [members[number] for number in np.unique(chosen).tolist()]
        left = [
            member.deliver_rows(messages, part, origin)
            for member, part in zip(whose, parts, strict=True)
        ]
        return np.sort(np.concatenate(left))

    def _distribute_few(
        self,
        members: _MemberSequence,
        messages: UniformBatch | MixedBatch,
        rows: Indexes,
        origin: NatsSession | None,
    ) -> Indexes:
        """The same for a few rows: arrays cost more than they save."""
        chosen: dict[int, list[int]] = {}
        for row in rows.tolist():
            chosen.setdefault(self._random.draw(len(members)), []).append(row)
        # Found before any takes its part: with that it may end, and the others have other numbers.
        whose = [(members[number], part) for number, part in chosen.items()]
        left = [
            rest
            for member, part in whose
            if (rest := member.deliver_rows(messages, np.array(part), origin)).size
        ]
        return np.sort(np.concatenate(left)) if left else rows[:0]


class QueueGroup(_GroupSink):
    """Those that subscribed to one subject by one queue name."""

    __slots__ = ("_member_indexes", "_version", "members", "queue", "subject")

    def __init__(self, random: RandomNumbers, subject: bytes, queue: bytes) -> None:
        super().__init__(random)
        self.subject = subject
        self.queue = queue
        self.members: list[NatsSubscription] = []
        self._member_indexes: dict[NatsSubscription, int] | None = None
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def current_members(self) -> list[NatsSubscription]:
        return self.members

    def add(self, member: NatsSubscription) -> None:
        """One more."""
        if self._member_indexes is not None:
            self._member_indexes[member] = len(self.members)
        self.members.append(member)
        if self._member_indexes is None and len(self.members) >= _INDEXED_MEMBERS:
            self._member_indexes = {member: at for at, member in enumerate(self.members)}
        self._version += 1

    def remove(self, member: NatsSubscription) -> None:
        """It leaves. The last one takes its place in the list."""
        at = (
            self.members.index(member)
            if self._member_indexes is None
            else self._member_indexes.pop(member)
        )
        last = self.members.pop()
        if last is not member:
            self.members[at] = last
            if self._member_indexes is not None:
                self._member_indexes[last] = at
        self._version += 1


class MergedQueueGroup(_GroupSink):
    """Those that subscribed by one queue name to several subjects that all match a message."""

    __slots__ = ("_groups", "_members", "_members_version")

    def __init__(self, random: RandomNumbers, groups: tuple[QueueGroup, ...]) -> None:
        super().__init__(random)
        self._groups = groups
        self._members = _ConcatenatedMembers([])
        self._members_version = -1

    @property
    def version(self) -> int:
        return sum(group.version for group in self._groups)

    def current_members(self) -> _MemberSequence:
        version = self.version
        if version != self._members_version:
            self._members = _ConcatenatedMembers([group.members for group in self._groups])
            self._members_version = version
        return self._members


def _group_by_subject(
    messages: UniformBatch | MixedBatch, rows: Indexes
) -> Iterator[tuple[bytes, Indexes]]:
    """Rows of the same subject together."""
    if isinstance(messages, UniformBatch):
        yield messages.first_message.subject, rows
        return
    numbers = messages.subject_numbers[rows]
    for number in np.unique(numbers).tolist():
        these = rows[numbers == number]
        yield messages.subject_at(these[0]), these
