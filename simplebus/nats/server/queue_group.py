"""Queue groups: each message is delivered to one random member.

If the chosen member does not accept a message, another member does. The cost per message does not
grow with the size of the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Protocol

import numpy as np

from simplebus.core.channel.paged_set import PagedSet
from simplebus.core.channel.sharded_dict import ShardedDict
from simplebus.nats.limits import DELIVERY_COST_BYTES
from simplebus.nats.protocol.events import Indexes, MixedBatch, Pub, UniformBatch, row_indexes
from simplebus.nats.server.session import NatsSession, NatsSubscription

QUEUE_GROUPS = "queue groups"
"""`order_key` of all queue groups: a client may be a member of several."""

_DRAW_COUNT = 256
# Up to this many messages are distributed one by one: arrays cost more.
_FEW_ROWS = 24
# Groups with at least this many members keep the index of each member.
_INDEXED_MEMBERS = 16
_GET_VERSION = attrgetter("version")
# Attempts to choose an accepting member of a large group at random, before all members of clients
# that may accept the message are examined.
_LARGE_GROUP_MEMBERS = 1024
_LARGE_GROUP_ATTEMPTS = 32


class RandomNumbers:
    """Random numbers drawn in blocks: drawing them one by one costs as much as a delivery."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._drawn: list[float] = []

    def draw(self, below: int) -> int:
        """Return a random integer from 0 to `below` - 1."""
        if not self._drawn:
            self._drawn = self._generator.random(_DRAW_COUNT).tolist()
        return int(self._drawn.pop() * below)

    def draw_many(self, below: int, count: int) -> Indexes:
        """Return `count` random integers from 0 to `below` - 1, shape (count,)."""
        return self._generator.integers(below, size=count)


class _MemberSequence(Protocol):
    """Sequence of subscriptions."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> NatsSubscription: ...
    def __iter__(self) -> Iterator[NatsSubscription]: ...


class _ConcatenatedMembers:
    """Members of several groups, without a copy of the lists: there may be many combinations."""

    __slots__ = ("_ends", "_lists")

    def __init__(self, lists: list[list[NatsSubscription]]) -> None:
        self._lists = lists
        self._ends = list(accumulate(map(len, lists)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int, /) -> NatsSubscription:
        list_index = bisect_right(self._ends, number)
        # A negative index, counted from the end of that list.
        return self._lists[list_index][number - self._ends[list_index]]

    def __iter__(self) -> Iterator[NatsSubscription]:
        return chain.from_iterable(self._lists)


_NO_MEMBERS = _ConcatenatedMembers([])


class _GroupSink(ABC):
    """Sink that delivers each message to one of its members."""

    __slots__ = ("_accepting", "_accepting_key", "_random")

    def __init__(self, random: RandomNumbers) -> None:
        self._random = random
        self._accepting: Sequence[NatsSubscription] = ()
        self._accepting_key: tuple[NatsSession | None, bytes, int] | None = None
        """Publisher, subject and version for which `_accepting` is valid."""

    @property
    def is_ordered(self) -> bool:
        """False: rows are sorted when they are encoded."""
        return False

    @property
    def order_key(self) -> str:
        """The key of all queue groups."""
        return QUEUE_GROUPS

    def further_cost_bytes(self, count: int) -> int:
        """Return the cost of the members that may receive some of the messages."""
        members = self.current_members()
        if not members:
            return 0
        member_count = min(count, len(members))
        return (member_count - 1) * DELIVERY_COST_BYTES + count * len(members[0].sid)

    def receiving_sessions(self) -> list[NatsSession]:
        """Return the sessions of the members."""
        return [member.session for member in self.current_members()]

    @abstractmethod
    def current_version(self) -> int:
        """Return a number that grows with every change of the members."""

    @abstractmethod
    def current_members(self) -> _MemberSequence:
        """Return the current members."""

    @abstractmethod
    def members_that_may_accept(self, origin: NatsSession | None) -> Iterable[NatsSubscription]:
        """Return the members of clients that accept messages of this publisher. A client may have
        thousands of members.
        """

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        members = self.current_members()
        if not members:
            return False
        for _ in range(_count_attempts(members)):
            if members[self._random.draw(len(members))].deliver(message, origin):
                return True
        accepting = self._find_accepting(message.subject, origin)
        return bool(accepting) and accepting[self._random.draw(len(accepting))].deliver(
            message, origin
        )

    def deliver_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> None:
        members = self.current_members()
        if len(members) <= 1:
            for member in members:
                member.deliver_batch(messages, rows, origin)
            return
        rejected = row_indexes(messages, rows)
        for _ in range(_count_attempts(members)):
            rejected = self._distribute(members, messages, rejected, origin)
            members = self.current_members()  # Some may have ended with their last message.
            if not (rejected.size and members):
                return
        for subject, undelivered_rows in _group_by_subject(messages, rejected):
            size = undelivered_rows.size + 1
            while 0 < undelivered_rows.size < size and (
                accepting := self._find_accepting(subject, origin)
            ):
                size = undelivered_rows.size
                undelivered_rows = self._distribute(accepting, messages, undelivered_rows, origin)

    def _find_accepting(
        self, subject: bytes, origin: NatsSession | None
    ) -> Sequence[NatsSubscription]:
        """Return the members that accept messages of this publisher on this subject."""
        key = (origin, subject, self.current_version())
        if self._accepting_key != key:
            members = self.members_that_may_accept(origin)
            self._accepting = [member for member in members if member.accepts(subject, origin)]
            self._accepting_key = key
        return self._accepting

    def _distribute(
        self,
        members: _MemberSequence,
        messages: UniformBatch | MixedBatch,
        rows: Indexes,
        origin: NatsSession | None,
    ) -> Indexes:
        """Deliver each row to a random member. Returns the rejected rows, ascending."""
        if rows.size <= _FEW_ROWS:
            return self._distribute_few(members, messages, rows, origin)
        chosen = self._random.draw_many(len(members), rows.size)
        order = chosen.argsort(kind="stable")
        parts = np.split(rows[order], np.flatnonzero(np.diff(chosen[order])) + 1)
        chosen_members = [members[number] for number in np.unique(chosen).tolist()]
        rejected = [
            member.deliver_rows(messages, part, origin)
            for member, part in zip(chosen_members, parts, strict=True)
        ]
        return np.sort(np.concatenate(rejected))

    def _distribute_few(
        self,
        members: _MemberSequence,
        messages: UniformBatch | MixedBatch,
        rows: Indexes,
        origin: NatsSession | None,
    ) -> Indexes:
        """Do the same without arrays, which are slower for a few rows."""
        rows_by_member: dict[int, list[int]] = {}
        for row in rows.tolist():
            rows_by_member.setdefault(self._random.draw(len(members)), []).append(row)
        # Resolved before the first delivery: a member may end with it, which changes the indexes.
        deliveries = [(members[number], part) for number, part in rows_by_member.items()]
        rejected = [
            rejected_rows
            for member, part in deliveries
            if (rejected_rows := member.deliver_rows(messages, np.array(part), origin)).size
        ]
        return np.sort(np.concatenate(rejected)) if rejected else rows[:0]


class QueueGroup(_GroupSink):
    """Subscriptions with the same subject and queue name."""

    __slots__ = (
        "_member_indexes",
        "_members_by_session",
        "members",
        "queue",
        "subject",
        "version",
    )

    def __init__(self, random: RandomNumbers, subject: bytes, queue: bytes) -> None:
        super().__init__(random)
        self.subject = subject
        self.queue = queue
        self.members: list[NatsSubscription] = []
        self._member_indexes: ShardedDict[NatsSubscription, int] | None = None
        self._members_by_session: dict[NatsSession, PagedSet[NatsSubscription]] = {}
        """Members of each client, if the index of each member is kept."""
        self.version = 0

    def current_version(self) -> int:
        return self.version

    def current_members(self) -> list[NatsSubscription]:
        return self.members

    def members_that_may_accept(self, origin: NatsSession | None) -> Iterable[NatsSubscription]:
        if self._member_indexes is None:
            return self.members
        sessions = [each for each in self._members_by_session if each.accepts_from(origin)]
        return chain.from_iterable(map(self._members_by_session.__getitem__, sessions))

    def add(self, member: NatsSubscription) -> None:
        """Add a member."""
        self.members.append(member)
        if self._member_indexes is not None:
            self._index_member(member, len(self.members) - 1)
        elif len(self.members) >= _INDEXED_MEMBERS:
            self._member_indexes = ShardedDict()
            for index, each in enumerate(self.members):
                self._index_member(each, index)
        self.version += 1

    def _index_member(self, member: NatsSubscription, index: int) -> None:
        assert self._member_indexes is not None
        self._member_indexes[member] = index
        session_members = self._members_by_session.get(member.session)
        if session_members is None:
            self._members_by_session[member.session] = PagedSet((member,))
        else:
            session_members.add(member)

    def remove(self, member: NatsSubscription) -> None:
        """Remove a member. The last member takes its index."""
        if self._member_indexes is None:
            index = self.members.index(member)
        else:
            index = self._member_indexes.pop(member)
            session_members = self._members_by_session[member.session]
            session_members.remove(member)
            if not session_members:
                del self._members_by_session[member.session]
        last = self.members.pop()
        if last is not member:
            self.members[index] = last
            if self._member_indexes is not None:
                self._member_indexes[last] = index
        self.version += 1


class MergedQueueGroup(_GroupSink):
    """Queue groups with the same name whose different subjects match one message."""

    __slots__ = ("_groups", "_member_lists", "_members", "_members_version")

    def __init__(self, random: RandomNumbers, group: QueueGroup) -> None:
        """Create it with one group."""
        super().__init__(random)
        self._groups = [group]
        self._member_lists = [group.members]
        self._members = _NO_MEMBERS
        self._members_version = -1

    def add_group(self, group: QueueGroup) -> None:
        """Add a group before the first message is delivered."""
        self._groups.append(group)
        self._member_lists.append(group.members)

    @property
    def group_count(self) -> int:
        return len(self._groups)

    def current_version(self) -> int:
        return sum(map(_GET_VERSION, self._groups))

    def members_that_may_accept(self, origin: NatsSession | None) -> Iterable[NatsSubscription]:
        return chain.from_iterable(group.members_that_may_accept(origin) for group in self._groups)

    def current_members(self) -> _MemberSequence:
        version = self.current_version()
        if version != self._members_version:
            self._members = _ConcatenatedMembers(self._member_lists)
            self._members_version = version
        return self._members


def _count_attempts(members: _MemberSequence) -> int:
    """Return how many random members a message is offered to."""
    return _LARGE_GROUP_ATTEMPTS if len(members) >= _LARGE_GROUP_MEMBERS else 1


def _group_by_subject(
    messages: UniformBatch | MixedBatch, rows: Indexes
) -> Iterator[tuple[bytes, Indexes]]:
    """Yield the rows of each subject."""
    if isinstance(messages, UniformBatch):
        yield messages.first_message.subject, rows
        return
    numbers = messages.subject_numbers[rows]
    for number in np.unique(numbers).tolist():
        subject_rows = rows[numbers == number]
        yield messages.subject_at(subject_rows[0]), subject_rows
