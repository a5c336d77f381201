"""Queue groups: each message is delivered to one random member.

If the chosen member does not accept a message, another member does. The cost per message does not
grow with the size of the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Protocol

import numpy as np

from simplebus.core.channel.paged_set import PagedSet
from simplebus.core.channel.sharded_dict import ShardedDict
from simplebus.core.steps import run_to_end
from simplebus.nats.limits import (
    DECISION_STEP_COST_BYTES,
    DELIVERY_COST_BYTES,
    FILTERED_DELIVERY_COST_BYTES,
    FILTERS_PER_BATCH_MAX,
    FOUND_SINK_COST_BYTES,
)
from simplebus.nats.protocol.events import Indexes, MixedBatch, Pub, UniformBatch, row_indexes
from simplebus.nats.server.permissions import PermissionCache
from simplebus.nats.server.session import NatsSession, NatsSubscription

QUEUE_GROUPS = "queue groups"
"""`order_key` of all queue groups: a client may be a member of several."""

_DRAW_COUNT = 256
# Up to this many messages are distributed one by one: arrays cost more.
_FEW_ROWS = 24
# Groups with at least this many members keep the index of each member.
_INDEXED_MEMBERS = 16
_GET_VERSION = attrgetter("version")
_GET_SESSION = attrgetter("session")
_GET_DELIVERY_FILTERS = attrgetter("delivery_filters")
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

    __slots__ = ("_accepting", "_accepting_key", "_is_accepting_new", "_random")

    def __init__(self, random: RandomNumbers) -> None:
        self._random = random
        self._accepting: Sequence[NatsSubscription] = ()
        self._accepting_key: tuple[NatsSession | None, frozenset[PermissionCache], int] | None = (
            None
        )
        """Publisher, denying filters and version for which `_accepting` is valid."""
        self._is_accepting_new = False
        """True if the last call of `_accepting_members` searched for them."""

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
        cost_bytes = (member_count - 1) * DELIVERY_COST_BYTES + count * len(members[0].sid)
        if self.delivery_filters:
            cost_bytes += member_count * FILTERED_DELIVERY_COST_BYTES
        return cost_bytes

    @property
    @abstractmethod
    def delivery_filters(self) -> Collection[PermissionCache]:
        """The delivery filters of the members, each once. Copy them before members may change."""

    @abstractmethod
    def receiving_sessions(self) -> Collection[NatsSession]:
        """Return the sessions of the members, each once."""

    @abstractmethod
    def current_version(self) -> int:
        """Return a number that grows with every change of the members."""

    @abstractmethod
    def current_members(self) -> _MemberSequence:
        """Return the current members."""

    @abstractmethod
    def search_accepting_members(
        self, denying: frozenset[PermissionCache], origin: NatsSession | None
    ) -> tuple[list[NatsSubscription], int]:
        """Return the members without these delivery filters that accept messages of this publisher,
        and the cost of the search, as a number of examined sinks.
        """

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        return run_to_end(self.deliver_in_steps(message, origin))

    def deliver_in_steps(
        self, message: Pub, origin: NatsSession | None
    ) -> Generator[None, None, bool]:
        members = self.current_members()
        if not members:
            return False
        for _ in range(_count_attempts(members)):
            if members[self._random.draw(len(members))].deliver(message, origin):
                return True
        denying = yield from self._find_denying_in_steps(message.subject)
        while accepting := self._accepting_members(denying, origin):
            member = accepting[self._random.draw(len(accepting))]
            if member.deliver(message, origin):
                return True
            if self._is_accepting_new:
                if member.denied_subjects is None or member.denied_subjects in denying:
                    return False
                denying |= {member.denied_subjects}  # It has decided anew since.
            self._accepting_key = None  # The member may have ended since the search.
        return False

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
            size = rejected.size
            rejected = self._distribute(members, messages, rejected, origin)
            members = self.current_members()  # Some may have ended with their last message.
            if not (rejected.size and members):
                return
            if size > _FEW_ROWS and 8 * rejected.size > 7 * size:
                break  # Few members accept these messages, or none.
        for denying, undelivered_rows in self._group_by_denying(messages, rejected):
            while undelivered_rows.size and (accepting := self._accepting_members(denying, origin)):
                size = undelivered_rows.size
                undelivered_rows = self._distribute(accepting, messages, undelivered_rows, origin)
                if undelivered_rows.size == size and self._is_accepting_new:
                    break
                self._accepting_key = None  # Some members may have ended since the search.

    def _find_denying_in_steps(
        self, subject: bytes
    ) -> Generator[None, None, frozenset[PermissionCache]]:
        """Return the delivery filters that deny a subject.

        More than FILTERS_PER_BATCH_MAX filters decide in steps, each of which costs about
        DECISION_STEP_COST_BYTES.
        """
        filters = self.delivery_filters
        if len(filters) <= FILTERS_PER_BATCH_MAX:
            return frozenset(each for each in filters if each.get(subject))
        decisions: dict[PermissionCache, bool] = {}
        cost_bytes = 0
        # Members may join between the steps: their filters decide, too.
        while undecided := [each for each in self.delivery_filters if each not in decisions]:
            self._add_cost(len(undecided))
            for each in undecided:
                if cost_bytes > DECISION_STEP_COST_BYTES:
                    yield
                    cost_bytes = 0
                cost_bytes += each.decision_cost_bytes
                decisions[each] = each.decide(subject)
        return frozenset(each for each, is_denied in decisions.items() if is_denied)

    def _find_denying(self, subject: bytes) -> frozenset[PermissionCache]:
        """Return the delivery filters that deny a subject, without steps."""
        return run_to_end(self._find_denying_in_steps(subject))

    def _accepting_members(
        self, denying: frozenset[PermissionCache], origin: NatsSession | None
    ) -> Sequence[NatsSubscription]:
        """Return the members without these delivery filters that accept messages of this publisher.

        The last result is cached, see `_is_accepting_new`. Some of its members may have ended.
        """
        if not self.current_members():
            return ()
        key = (origin, denying, self.current_version())
        self._is_accepting_new = self._accepting_key != key
        if self._is_accepting_new:
            self._accepting, sink_count = self.search_accepting_members(denying, origin)
            self._accepting_key = key
            self._add_cost(1 + sink_count)
        return self._accepting

    def _add_cost(self, sink_count: int) -> None:
        """Add the cost of examined sinks to that of the turn. There must be a member."""
        # Every member has the same server, which counts the cost of the turn.
        session = self.current_members()[0].session
        session.add_read_cost(sink_count * FOUND_SINK_COST_BYTES)

    def _group_by_denying(
        self, messages: UniformBatch | MixedBatch, rows: Indexes
    ) -> Iterator[tuple[frozenset[PermissionCache], Indexes]]:
        """Yield groups of rows with the delivery filters that deny them.

        Their subjects are compared one by one if the filters are many.
        """
        filters = list(self.delivery_filters)
        if isinstance(messages, UniformBatch):
            yield self._find_denying(messages.first_message.subject), rows
        elif len(filters) <= FILTERS_PER_BATCH_MAX:
            keys = np.zeros(rows.size, np.int64)
            for number, each in enumerate(filters):
                keys |= each.get_rows(messages, rows).astype(np.int64) << number
            for key in np.unique(keys).tolist():
                denying = (each for number, each in enumerate(filters) if key >> number & 1)
                yield frozenset(denying), rows[keys == key]
        else:
            numbers = messages.subject_numbers[rows]
            for number in np.unique(numbers).tolist():
                equal_rows = rows[numbers == number]
                yield self._find_denying(messages.subject_at(equal_rows[0])), equal_rows

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
        "_filter_counts",
        "_member_indexes",
        "_members_by_session",
        "_unfiltered_count",
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
        self._filter_counts: Counter[PermissionCache] = Counter()
        """Number of members by delivery filter."""
        self._unfiltered_count = 0
        """Number of members without a delivery filter."""
        self.version = 0

    def current_version(self) -> int:
        return self.version

    def current_members(self) -> list[NatsSubscription]:
        return self.members

    @property
    def delivery_filters(self) -> Collection[PermissionCache]:
        return self._filter_counts.keys()

    def receiving_sessions(self) -> Collection[NatsSession]:
        if self._member_indexes is None:
            return {member.session for member in self.members}
        return self._members_by_session

    def search_accepting_members(
        self, denying: frozenset[PermissionCache], origin: NatsSession | None
    ) -> tuple[list[NatsSubscription], int]:
        if not self._unfiltered_count and denying.issuperset(self._filter_counts):
            return [], 0
        if self._member_indexes is None:
            accepting = [
                member
                for member in self.members
                if member.denied_subjects not in denying and member.accepts_from(origin)
            ]
            return accepting, len(self.members)
        accepting, sink_count = [], 0
        for session, members in self._members_by_session.items():
            sink_count += 1
            if not session.accepts_from(origin):
                continue
            first = next(iter(members))
            # Members that have ended may belong to another user than the others of the client.
            if first.has_ended or first.denied_subjects not in denying:
                sink_count += len(members)
                accepting += [
                    member
                    for member in members
                    if not member.has_ended and member.denied_subjects not in denying
                ]
        return accepting, sink_count

    def add(self, member: NatsSubscription) -> None:
        """Add a member."""
        self.members.append(member)
        self._adjust_filter_count(member, 1)
        if self._member_indexes is not None:
            self._index_member(member, len(self.members) - 1)
        elif len(self.members) >= _INDEXED_MEMBERS:
            self._member_indexes = ShardedDict()
            for index, each in enumerate(self.members):
                self._index_member(each, index)
        self.version += 1

    def _adjust_filter_count(self, member: NatsSubscription, change: int) -> None:
        """Add `change` to the number of members with the delivery filter of a member."""
        if (delivery_filter := member.denied_subjects) is None:
            self._unfiltered_count += change
            return
        self._filter_counts[delivery_filter] += change
        if not self._filter_counts[delivery_filter]:
            del self._filter_counts[delivery_filter]

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
        self._adjust_filter_count(member, -1)
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

    @property
    def delivery_filters(self) -> Collection[PermissionCache]:
        # Without a loop in Python: there may be thousands of groups.
        return set(chain.from_iterable(map(_GET_DELIVERY_FILTERS, self._groups)))

    def receiving_sessions(self) -> Collection[NatsSession]:
        if len(self.current_members()) < 2 * len(self._groups):
            return set(map(_GET_SESSION, self.current_members()))
        return set(chain.from_iterable(group.receiving_sessions() for group in self._groups))

    def search_accepting_members(
        self, denying: frozenset[PermissionCache], origin: NatsSession | None
    ) -> tuple[list[NatsSubscription], int]:
        found = [group.search_accepting_members(denying, origin) for group in self._groups]
        accepting = list(chain.from_iterable(members for members, _ in found))
        return accepting, sum(count for _, count in found)

    def current_members(self) -> _MemberSequence:
        version = self.current_version()
        if version != self._members_version:
            self._members = _ConcatenatedMembers(self._member_lists)
            self._members_version = version
        return self._members


def _count_attempts(members: _MemberSequence) -> int:
    """Return how many random members a message is offered to."""
    return _LARGE_GROUP_ATTEMPTS if len(members) >= _LARGE_GROUP_MEMBERS else 1
