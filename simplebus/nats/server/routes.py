"""Routes from subjects to sinks.

One index holds all subscriptions. Results are cached by subject number until a route changes.
Subjects with the same sinks share a result unless it is paged, so a batch is split by results and
not by subjects.
Every ack has a unique subject, for which no result would be cached. So all ack subjects are looked
up as one placeholder subject, unless a pattern matches only some of them. Queue groups of one name
are merged: at once if the sinks are a tuple, and by the delivery, in several turns, if they are
paged.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from simplebus.core.channel.matches import Matches, PagedMatches, pages_of
from simplebus.core.channel.sharded_dict import ShardedDict
from simplebus.core.channel.subscription_index import SubscriptionIndex
from simplebus.core.limits import INQUIRY_TEXT_CHARACTERS_MAX, Limits
from simplebus.core.protocol.inquiry import ListenerInfo
from simplebus.core.steps import drain_list
from simplebus.nats import subjects
from simplebus.nats.limits import (
    CACHED_SINKS_MAX,
    MERGED_GROUP_COST,
    REMOVALS_PER_TURN_MAX,
    SCATTERED_FRACTION,
    SUBJECTS_MAX,
)
from simplebus.nats.protocol.events import Indexes, MixedBatch, Pub, UniformBatch
from simplebus.nats.protocol.subject_table import SubjectTable, count_until
from simplebus.nats.server.permissions import PermissionCache
from simplebus.nats.server.queue_group import MergedQueueGroup, QueueGroup, RandomNumbers
from simplebus.nats.server.session import NatsSession, NatsSubscription
from simplebus.nats.server.subscription_memory import SubscriptionMemory, memory_limit


class SubjectSink(Protocol):
    """Receiver of messages of a subject. `origin` is the publishing session; None for the bus."""

    def __hash__(self) -> int: ...

    @property
    def is_ordered(self) -> bool:
        """True if the rows of a mixed batch must arrive in one call, in publication order."""

    @property
    def order_key(self) -> Hashable:
        """Key of the sinks that receive a batch in the same turn, so that their messages stay in
        publication order: the session of a subscription, QUEUE_GROUPS, or any other object.
        """

    @property
    def delivery_filters(self) -> Collection[PermissionCache]:
        """Caches that decide which subjects are not delivered, each once."""

    def further_cost_bytes(self, count: int) -> int:
        """Return what `count` messages cost besides their bytes, DELIVERY_COST_BYTES, and the
        decisions of delivery filters.
        """

    def receiving_sessions(self) -> Collection[NatsSession]:
        """Return the sessions of the NATS clients that may receive a message, each once."""

    def deliver(self, message: Pub, origin: NatsSession | None) -> bool:
        """Deliver a message. Returns True if a receiver accepted it."""

    def deliver_in_steps(
        self, message: Pub, origin: NatsSession | None
    ) -> Generator[None, None, bool]:
        """Deliver a message in steps of limited cost. Returns True if a receiver accepted it."""

    def deliver_batch(
        self, messages: UniformBatch | MixedBatch, rows: Indexes | None, origin: NatsSession | None
    ) -> None:
        """Deliver these rows of a batch, in ascending order; None for all rows."""


SubjectSinks: TypeAlias = Matches[SubjectSink]
"""Sinks of a subject. Paged ones are not merged: a message to them must be delivered to the sinks
that a `SinkMerger` returns.
"""
SinkRows: TypeAlias = tuple[SubjectSinks, Indexes | None]
"""Sinks of some messages of a batch, and the rows of these messages; None for all rows."""

_UNKNOWN = -1
_NO_GENERATION = (-1, -1)
_SAMPLED_RESULTS = 4096
_ACK_PLACEHOLDER = subjects.ACK_PREFIX + b"placeholder"
_SUBSCRIPTIONS_ONLY = {NatsSubscription}
_LISTENERS_PER_STEP = 256


@dataclass(frozen=True, slots=True)
class SubjectRoutesStatistics:
    """Counters of the routes."""

    subscriptions: int = 0
    """Subscriptions of clients."""
    inserts: int = 0
    """Pairs of subject and sink added so far."""
    removes: int = 0
    """Pairs of subject and sink removed so far."""
    searches: int = 0
    """Subjects looked up."""
    results: int = 0
    """Cached results."""
    widest: int = 0
    """Most sinks of a sampled result."""
    mean_width: float = 0.0
    """Mean number of sinks of the sampled results."""


class SubjectRoutes:
    """Subscription index with a result cache."""

    def __init__(self, generator: np.random.Generator, bus: Limits | None = None) -> None:
        """`bus` are the limits of the bus, which bound the memory of subscriptions."""
        self.table = SubjectTable()
        self.subscription_memory = SubscriptionMemory(memory_limit(bus or Limits()))
        self.subscription_count = 0
        """Subscriptions of clients."""
        self.filtered_count = 0
        """Subscriptions of clients with a delivery filter."""
        self.on_has_subscriptions: Callable[[bool], None] = lambda has_subscriptions: None
        """Called with True for the first subscription and with False after the last one."""
        self.has_repeated_sinks = False
        """True if one sink may be registered for two subjects that both match."""
        self._random = RandomNumbers(generator)
        self._sublist: SubscriptionIndex[SubjectSink] = SubscriptionIndex(
            check=lambda pattern: pattern
        )
        self._groups: ShardedDict[tuple[bytes, bytes], QueueGroup] = ShardedDict()
        """Groups by subject and queue name."""
        self._group_counts: ShardedDict[bytes, int] = ShardedDict()
        """Number of groups by queue name."""
        self._partial_ack_patterns = 0
        """Number of routes whose pattern may match some ack subjects but not all."""
        self._abandoned: deque[ShardedDict[bytes, NatsSubscription]] = deque()
        """Subscriptions of sessions that have ended, until their routes are removed. No dict is
        empty.
        """
        self._merged_results: dict[int, tuple[SubjectSinks, SubjectSinks]] = {}
        """Sinks that were found, and these sinks merged, by the `id` of the first."""
        self._merged_sink_count = 0
        self._results: dict[tuple[SubjectSink, ...], int] = {}
        """Results by their sinks, except for paged ones."""
        self._results_by_identity: dict[int, int] = {}
        """Results by the `id` of their sinks: hashing thousands of sinks takes long."""
        self._sinks: list[SubjectSinks] = []
        self._result_by_subject = np.full(SUBJECTS_MAX, _UNKNOWN, np.int32)
        self._result_generation = _NO_GENERATION
        self._cached_sink_count = 0

    @property
    def generation(self) -> int:
        """Number that stays the same while no route changes."""
        return self._sublist.generation

    def __len__(self) -> int:
        """Return the number of pairs of subject and sink."""
        return len(self._sublist)

    def statistics(self) -> SubjectRoutesStatistics:
        """Return the current counters."""
        widths = [len(sinks) for sinks in islice(self._sinks, _SAMPLED_RESULTS)]
        return SubjectRoutesStatistics(
            subscriptions=self.subscription_count,
            inserts=self._sublist.insert_count,
            removes=self._sublist.insert_count - len(self._sublist),
            searches=self._sublist.search_count,
            results=len(self._sinks),
            widest=max(widths, default=0),
            mean_width=sum(widths) / len(widths) if widths else 0.0,
        )

    def add(self, subject: bytes, sink: SubjectSink) -> None:
        """Route messages that match a legal subject to the sink."""
        self._forget_results()
        if self._sublist.insert(subjects.index_key(subject), sink):
            self._partial_ack_patterns += _matches_some_acks(subject)

    def remove(self, subject: bytes, sink: SubjectSink) -> None:
        """Remove a route."""
        self._forget_results()
        self._sublist.remove(subjects.index_key(subject), sink)
        self._partial_ack_patterns -= _matches_some_acks(subject)

    def subscribe(self, subscription: NatsSubscription) -> bool:
        """Add a subscription. Returns False if the memory limit is reached."""
        if not self.subscription_memory.reserve(subscription):
            return False
        self._change_subscription_count(1)
        self.filtered_count += subscription.denied_subjects is not None
        subject, queue = subscription.subject, subscription.queue
        if not queue:
            self.add(subject, subscription)
            return True
        group = self._groups.get((subject, queue))
        if group is None:
            group = self._groups[subject, queue] = QueueGroup(self._random, subject, queue)
            self._group_counts[queue] = self._group_counts.get(queue, 0) + 1
            self.add(subject, group)
        group.add(subscription)
        return True

    def unsubscribe(self, subscription: NatsSubscription) -> None:
        """Remove a subscription."""
        self._change_subscription_count(-1)
        self.filtered_count -= subscription.denied_subjects is not None
        self.subscription_memory.uncharge_account(subscription)
        self.subscription_memory.free(subscription)
        subject, queue = subscription.subject, subscription.queue
        if not queue:
            self.remove(subject, subscription)
            return
        group = self._groups[subject, queue]
        group.remove(subscription)
        if not group.members:
            self._remove_group(group)

    def _remove_group(self, group: QueueGroup) -> None:
        del self._groups[group.subject, group.queue]
        count = self._group_counts.pop(group.queue) - 1
        if count:
            self._group_counts[group.queue] = count
        self.remove(group.subject, group)

    def abandon_all(
        self, session: NatsSession, subscriptions: ShardedDict[bytes, NatsSubscription]
    ) -> None:
        """End all subscriptions of a session, and remove their routes in later calls of
        `remove_abandoned`.

        They must not accept messages any more. `subscriptions` is emptied.
        """
        self._change_subscription_count(-len(subscriptions))
        self.subscription_memory.uncharge_session(session)
        self._abandoned.append(subscriptions)

    @property
    def has_abandoned(self) -> bool:
        """True if `remove_abandoned` has work to do."""
        return bool(self._abandoned)

    def remove_abandoned(self) -> None:
        """Remove the routes of some abandoned subscriptions."""
        for _ in range(REMOVALS_PER_TURN_MAX):
            if not self._abandoned:
                return
            _, subscription = self._abandoned[0].popitem()
            if not self._abandoned[0]:
                self._abandoned.popleft()
            self.filtered_count -= subscription.denied_subjects is not None
            subject, queue = subscription.subject, subscription.queue
            if not queue:
                self.remove(subject, subscription)
            else:
                group = self._groups[subject, queue]
                group.remove(subscription)
                if not group.members:
                    self._remove_group(group)
            self.subscription_memory.free(subscription)

    def _change_subscription_count(self, change: int) -> None:
        before, self.subscription_count = self.subscription_count, self.subscription_count + change
        if not (before and self.subscription_count):
            self.on_has_subscriptions(self.subscription_count > 0)

    def match(self, subject: bytes) -> SubjectSinks:
        """Return the sinks of a subject, merged unless they are paged."""
        if (
            subject.startswith(subjects.ACK_PREFIX)
            and not self._partial_ack_patterns
            and subjects.is_legal(subject)
        ):
            subject = _ACK_PLACEHOLDER
        sinks = self._sublist.match(subjects.index_key(subject))
        has_repeated = self.has_repeated_sinks or len(self._groups) > len(self._group_counts)
        if has_repeated and isinstance(sinks, tuple) and len(sinks) > 1:
            return self._merge(sinks)
        return sinks

    def create_merger(self) -> SinkMerger:
        """Return a merger without sinks."""
        return SinkMerger(self._random)

    def iter_sinks(self, subject: bytes) -> Iterator[SubjectSink]:
        """Yield the sinks of a subject in any order, without merging queue groups. Finds the first
        one faster than `match`.
        """
        return self._sublist.iter_matches(subjects.index_key(subject))

    def _merge(self, sinks: tuple[SubjectSink, ...]) -> SubjectSinks:
        """Merge the sinks of a subject. Until a route changes, equal results are often cached."""
        cached = self._merged_results.get(id(sinks))
        if cached is not None:
            return cached[1]
        merger = self.create_merger()
        merger.add(sinks)
        merged = tuple(merger.drain())
        if len(merged) == len(sinks):
            merged = sinks
        if self._merged_sink_count > CACHED_SINKS_MAX:
            self._merged_results.clear()
            self._merged_sink_count = 0
        self._merged_results[id(sinks)] = (sinks, merged)
        self._merged_sink_count += len(sinks) + _search_cost(merged)
        return merged

    def split_by_sinks(self, numbers: npt.NDArray[np.int32]) -> list[SinkRows]:
        """Split messages by their sinks.

        Args:
            numbers: Subject numbers of the messages, shape (n,).
        """
        results = self._look_up_results(numbers)
        if (results == results[0]).all():
            return [(self._sinks[results[0]], None)]
        order = results.argsort(kind="stable")
        cuts = np.flatnonzero(np.diff(results[order])) + 1
        return [(self._sinks[results[rows[0]]], rows) for rows in np.split(order, cuts)]

    def match_each(self, numbers: npt.NDArray[np.int32]) -> list[SubjectSinks]:
        """Return the sinks of each subject number."""
        return [self._sinks[result] for result in self._look_up_results(numbers).tolist()]

    def is_scattered(self, numbers: npt.NDArray[np.int32]) -> bool:
        """Return True if single delivery is faster because sinks differ a lot."""
        results = self._look_up_results(numbers)
        max_results = len(numbers) * SCATTERED_FRACTION
        return bool((results != results[0]).any()) and len(np.unique(results)) > max_results

    def _look_up_results(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        self.search(numbers)
        return self._result_by_subject[numbers]

    def search(
        self, numbers: npt.NDArray[np.int32], max_sinks: float = math.inf
    ) -> tuple[int, int]:
        """Search for the sinks of subjects without a cached result.

        Args:
            numbers: Subject numbers, shape (n,).
            max_sinks: The search ends when more sinks are found.

        Returns:
            The number of sinks found, or a higher number if the search took longer, and the number
            of subjects searched. Sinks that several subjects share count once.
        """
        self._forget_old_results()
        is_unknown = self._result_by_subject[numbers] == _UNKNOWN
        sink_count = subject_count = 0
        if is_unknown.any():
            for number in np.unique(numbers[is_unknown]).tolist():
                if sink_count > max_sinks:
                    break
                subject_count += 1
                sinks = self.match(self.table.names[number])
                result = self._results_by_identity.get(id(sinks))
                if result is None:
                    sink_count += _search_cost(sinks)
                    result = self._result_number(sinks)
                self._result_by_subject[number] = result
        return sink_count, subject_count

    def match_some(
        self, names: Sequence[bytes], max_sinks: float
    ) -> tuple[list[SubjectSinks], int]:
        """Return the sinks of each of these subjects, or of the first ones with more than
        `max_sinks`, and their number, which counts as in `search`.
        """
        results: list[SubjectSinks] = []
        found_ids: set[int] = set()
        sink_count = 0
        for name in names:
            if sink_count > max_sinks:
                break
            sinks = self.match(name)
            results.append(sinks)
            if id(sinks) not in found_ids:
                found_ids.add(id(sinks))
                sink_count += _search_cost(sinks)
        return results, sink_count

    def count_until_searched(self, numbers: npt.NDArray[np.int32], limit: int) -> int:
        """Return the number of leading messages of which at most `limit` have no cached result.

        Args:
            numbers: Subject numbers of the messages, shape (n,).
        """
        self._forget_old_results()
        return count_until(self._result_by_subject[numbers] == _UNKNOWN, limit)

    def _forget_old_results(self) -> None:
        """Forget cached results if a route or the table of subjects has changed, or if they are
        too many.
        """
        valid_for = (self._sublist.generation, self.table.generation)
        if valid_for != self._result_generation or self._cached_sink_count > CACHED_SINKS_MAX:
            self._forget_results()
            self._result_generation = valid_for

    def _forget_results(self) -> None:
        """Forget cached results. They would keep subscriptions that have ended."""
        if self._merged_results:
            self._merged_results.clear()
            self._merged_sink_count = 0
        if self._sinks:
            self._results.clear()
            self._results_by_identity.clear()
            self._sinks.clear()
            self._cached_sink_count = 0
            self._result_by_subject.fill(_UNKNOWN)

    def _result_number(self, sinks: SubjectSinks) -> int:
        number = None
        if isinstance(sinks, tuple):
            number = self._results.get(sinks)
        if number is None:
            number = len(self._sinks)
            if isinstance(sinks, tuple):
                self._results[sinks] = number
            self._sinks.append(sinks)
            self._cached_sink_count += _search_cost(sinks)
            self._results_by_identity[id(sinks)] = number
        return number


class SinkMerger:
    """Merges queue groups of one name: a message goes to one member, whichever subject it
    subscribed to. Also removes repeated sinks.
    """

    def __init__(self, random: RandomNumbers) -> None:
        self._random = random
        self._subscription_pages: list[Collection[SubjectSink]] = []
        """Pages with subscriptions outside queue groups only, which need no merging."""
        self._sinks: list[SubjectSink] = []
        """The sinks of other pages, merged."""
        self._places: ShardedDict[Hashable, int] = ShardedDict()
        """Index in `_sinks` by the name of a queue group, or by a sink that may be repeated."""

    def add(self, sinks: Collection[SubjectSink]) -> int:
        """Add some of the sinks of a subject. The collection must not change until `drain` ends.
        Returns the cost, as a number of sinks that are examined one by one.
        """
        if set(map(type, sinks)) == _SUBSCRIPTIONS_ONLY:
            self._subscription_pages.append(sinks)
            return 0
        cost, merged = len(sinks), self._sinks
        for sink in sinks:
            # Not `isinstance`, which is slow for the subclasses of an abstract class.
            if type(sink) is NatsSubscription:
                merged.append(sink)
                continue
            key: Hashable = sink.queue if type(sink) is QueueGroup else sink
            place = self._places.setdefault(key, len(merged))
            if place == len(merged):
                merged.append(sink)
            elif type(sink) is QueueGroup:
                earlier = merged[place]
                if type(earlier) is QueueGroup:
                    cost += 2  # A new object takes longer.
                    earlier = merged[place] = MergedQueueGroup(self._random, earlier)
                assert type(earlier) is MergedQueueGroup
                earlier.add_group(sink)
        return cost

    def drain(self) -> Iterator[SubjectSink]:
        """Yield the merged sinks, and release them part by part."""
        pages: Iterator[Collection[SubjectSink]] = drain_list(self._subscription_pages)
        return chain(chain.from_iterable(pages), drain_list(self._sinks))


def _search_cost(sinks: SubjectSinks) -> int:
    """Return the number of sinks, and MERGED_GROUP_COST for each group that is merged."""
    if isinstance(sinks, PagedMatches) or MergedQueueGroup not in map(type, sinks):
        return len(sinks)
    merged = [sink for sink in sinks if isinstance(sink, MergedQueueGroup)]
    return len(sinks) + MERGED_GROUP_COST * sum(sink.group_count for sink in merged)


def _matches_some_acks(pattern: bytes) -> bool:
    """Return False if the pattern matches all ack subjects or none, else True."""
    tokens = pattern.split(b".")
    for token, ack_token in zip(tokens, (b"$JS", b"ACK"), strict=False):
        if token not in (b"*", ack_token):  # `>` matches all ack subjects, other tokens none.
            return False
    return tokens[2:] != [b">"]


class ChannelListeners:
    """Source of NATS subscriptions for the explain request."""

    def __init__(self, routes: SubjectRoutes) -> None:
        self._routes = routes

    def find_listeners(
        self, channel: str, max_count: int
    ) -> Generator[None, None, tuple[list[ListenerInfo], int]]:
        """Return up to `max_count` subscriptions and queue groups, and the number left out."""
        subject = channel.encode()
        merger = self._routes.create_merger()
        merged_count = 0
        for page in pages_of(self._routes.match(subject)):
            if merged_count >= _LISTENERS_PER_STEP:
                merged_count = 0
                yield
            merger.add(page)
            merged_count += len(page)
        listeners: list[ListenerInfo] = []
        left_out = 0
        for number, sink in enumerate(merger.drain(), 1):
            if number % _LISTENERS_PER_STEP == 0:
                yield
            queue, members = b"", 1
            if isinstance(sink, NatsSubscription):
                if not sink.accepts(subject, None):
                    continue
                subscription = sink
            elif isinstance(sink, QueueGroup | MergedQueueGroup):
                current_members = sink.current_members()
                members = len(current_members)
                if not members:
                    continue
                subscription, queue = current_members[0], current_members[0].queue
            else:
                continue  # For example a class that the subject is bound to.
            if len(listeners) >= max_count:
                left_out += 1
                continue
            listeners.append(
                ListenerInfo(
                    pattern=_to_short_text(subscription.subject),
                    queue=_to_short_text(queue),
                    members=members,
                    peer=subscription.session.peer[:INQUIRY_TEXT_CHARACTERS_MAX],
                )
            )
        return listeners, left_out


def _to_short_text(subject: bytes) -> str:
    return subject.decode("utf-8", "backslashreplace")[:INQUIRY_TEXT_CHARACTERS_MAX]
