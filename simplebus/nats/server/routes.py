"""Which sinks a subject leads to.

Rule 1: one sublist holds all interest of this door. What a subject leads to is looked up once, and
remembered by the subject's number until something changes.
Rule 2: subjects that lead to the same sinks have one result: a batch is split by results, not by
subjects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from simplebus.core.channel.subscription_index import Sublist
from simplebus.core.limits import EXPLAINED_CHARACTERS, Limits
from simplebus.core.protocol.inquiry import Listener
from simplebus.nats import subjects
from simplebus.nats.limits import JOINED_MAX, SCATTERED_PART, SUBJECTS_MAX, TIDIED_AT_ONCE
from simplebus.nats.protocol.events import MixedBatch, Indexes, UniformBatch
from simplebus.nats.server.queue_group import Dice, JoinedGroup, QueueGroup
from simplebus.nats.server.subject_table import SubjectTable
from simplebus.nats.server.subscription import Sink, Subscription
from simplebus.nats.server.subscription_memory import Interest, limit_of

Sinks: TypeAlias = tuple[Sink, ...]

_UNKNOWN = -1
_NEVER = (-1, -1)


_LOOKED_RESULTS = 4096


@dataclass(frozen=True, slots=True)
class RoutesStatistics:
    """A snapshot."""

    subscriptions: int
    """How many clients have."""
    inserts: int
    """Pairs of a subject and a sink that there ever were."""
    removes: int
    """And those that are gone."""
    searches: int
    """Subjects that were looked up."""
    results: int
    """What is remembered that subjects lead to."""
    widest: int
    """Of these, as far as that is soon found, the most sinks;"""
    mean_width: float
    """and how many it are on average."""


class Routes:
    """Of one front."""

    def __init__(self, generator: np.random.Generator, bus: Limits | None = None) -> None:
        """`bus` says what the bus may hold, of which subscriptions may take a part."""
        self.table = SubjectTable()
        self.interest = Interest(limit_of(bus or Limits()))
        self.subscriptions = 0
        """How many clients have."""
        self.heard: Callable[[bool], None] = lambda is_heard: None
        """Called when the first one comes, and when the last one goes."""
        self.has_twins = False
        """Whether a sink may be there for two subjects that both match."""
        self._dice = Dice(generator)
        self._sublist: Sublist[Sink] = Sublist(check=lambda pattern: pattern)
        self._groups: dict[tuple[bytes, bytes], QueueGroup] = {}
        self._abandoned: deque[Subscription] = deque()
        self._joined: dict[tuple[QueueGroup, ...], JoinedGroup] = {}
        self._results: dict[Sinks, int] = {}
        self._sinks: list[Sinks] = []
        self._result_of = np.full(SUBJECTS_MAX, _UNKNOWN, np.int32)
        self._valid_for = _NEVER

    @property
    def generation(self) -> int:
        """As long as it stays, subjects lead to the same sinks."""
        return self._sublist.generation

    def __len__(self) -> int:
        """Pairs of a subject and a sink."""
        return len(self._sublist)

    def statistics(self) -> RoutesStatistics:
        """A snapshot."""
        widths = [len(sinks) for sinks in islice(self._sinks, _LOOKED_RESULTS)]
        return RoutesStatistics(
            subscriptions=self.subscriptions,
            inserts=self._sublist.inserts,
            removes=self._sublist.inserts - len(self._sublist),
            searches=self._sublist.searches,
            results=len(self._sinks),
            widest=max(widths, default=0),
            mean_width=sum(widths) / len(widths) if widths else 0.0,
        )

    def add(self, subject: bytes, sink: Sink) -> None:
        """What matches this legal subject is for the sink."""
        self._sublist.insert(subjects.index_key(subject), sink)

    def remove(self, subject: bytes, sink: Sink) -> None:
        """No longer."""
        self._sublist.remove(subjects.index_key(subject), sink)

    def subscribe(self, subscription: Subscription) -> bool:
        """The same for a subscription, which may be one of a group. Returns whether there is room
        for it."""
        if not self.interest.take(subscription):
            return False
        self._count(1)
        subject, queue = subscription.subject, subscription.queue
        if not queue:
            self.add(subject, subscription)
            return True
        group = self._groups.get((subject, queue))
        if group is None:
            group = self._groups[subject, queue] = QueueGroup(self._dice, subject, queue)
            self.add(subject, group)
            self._joined.clear()
        group.add(subscription)  # It may be one that is empty, and not tidied away yet.
        return True

    def unsubscribe(self, subscription: Subscription) -> None:
        """No longer."""
        self._count(-1)
        self.interest.leave(subscription)
        self.interest.give(subscription)
        subject, queue = subscription.subject, subscription.queue
        if not queue:
            self.remove(subject, subscription)
            return
        group = self._groups[subject, queue]
        group.remove(subscription)
        if not group.members:
            self._forget(group)

    def _forget(self, group: QueueGroup) -> None:
        del self._groups[group.subject, group.queue]
        self.remove(group.subject, group)
        self._joined.clear()

    def abandon(self, subscription: Subscription) -> None:
        """No longer, and what it leaves behind is forgotten later: see `tidy`."""
        self._count(-1)
        self.interest.leave(subscription)
        subscription.is_over = True
        subject, queue = subscription.subject, subscription.queue
        if queue:
            group = self._groups[subject, queue]
            group.remove(subscription)
            if group.members:  # Which pay for it.
                self.interest.give(subscription)
                return
        self._abandoned.append(subscription)

    @property
    def has_abandoned(self) -> bool:
        """Whether there is something for `tidy` to do."""
        return bool(self._abandoned)

    def tidy(self) -> None:
        """Forget some of what was left behind."""
        for _ in range(min(TIDIED_AT_ONCE, len(self._abandoned))):
            subscription = self._abandoned.popleft()
            subject, queue = subscription.subject, subscription.queue
            group = self._groups.get((subject, queue)) if queue else None
            if not queue:
                self.remove(subject, subscription)
            elif group is not None and not group.members:
                self._forget(group)
            self.interest.give(subscription)

    def _count(self, more: int) -> None:
        before, self.subscriptions = self.subscriptions, self.subscriptions + more
        if not (before and self.subscriptions):
            self.heard(self.subscriptions > 0)

    def of(self, subject: bytes) -> Sinks:
        """Where a message on this subject goes."""
        sinks = self._sublist.match(subjects.index_key(subject))
        if self.has_twins:
            sinks = tuple(dict.fromkeys(sinks))
        if len(sinks) > 1 and len(self._groups) > 1:
            return self._join(sinks)
        return sinks

    def _join(self, sinks: Sinks) -> Sinks:
        """Groups with the same queue name count as one, whatever their members subscribed to."""
        groups = [sink for sink in sinks if isinstance(sink, QueueGroup)]
        names: dict[bytes, list[QueueGroup]] = {}
        for group in groups:
            names.setdefault(group.queue, []).append(group)
        if len(names) == len(groups):
            return sinks
        joined: list[Sink] = [sink for sink in sinks if not isinstance(sink, QueueGroup)]
        for those in names.values():
            key = tuple(those)
            if len(key) == 1:
                joined.append(key[0])
                continue
            found = self._joined.get(key)
            if found is None:
                if len(self._joined) >= JOINED_MAX:
                    self._joined.clear()
                    self._valid_for = _NEVER  # Results lead to them, too.
                found = self._joined[key] = JoinedGroup(self._dice, key)
            joined.append(found)
        return tuple(joined)

    def split(self, numbers: npt.NDArray[np.int32]) -> Iterator[tuple[Sinks, Indexes | None]]:
        """Where messages on the subjects with these numbers go: sinks, and the positions of the
        messages that are for them; None for all."""
        results = self._results_of(numbers)
        if (results == results[0]).all():
            yield self._sinks[results[0]], None
            return
        order = results.argsort(kind="stable")
        cuts = np.flatnonzero(np.diff(results[order])) + 1
        for rows in np.split(order, cuts):
            yield self._sinks[results[rows[0]]], rows

    def each(self, numbers: npt.NDArray[np.int32]) -> list[Sinks]:
        """Where messages on the subjects with these numbers go, one by one."""
        return [self._sinks[result] for result in self._results_of(numbers).tolist()]

    def is_scattered(self, numbers: npt.NDArray[np.int32]) -> bool:
        """Whether subjects with these numbers lead to so many different sinks that a message is
        better put to them by itself."""
        results = self._results_of(numbers)
        most = len(numbers) * SCATTERED_PART
        return bool((results != results[0]).any()) and len(np.unique(results)) > most

    def _results_of(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        valid_for = (self._sublist.generation, self.table.generation)
        if valid_for != self._valid_for:
            self._valid_for = valid_for
            self._results.clear()
            self._sinks.clear()
            self._result_of.fill(_UNKNOWN)
        results = self._result_of[numbers]
        unknown = results == _UNKNOWN
        if unknown.any():
            for number in np.unique(numbers[unknown]).tolist():
                self._result_of[number] = self._result(self.of(self.table.names[number]))
            results = self._result_of[numbers]
        return results

    def takers(self, messages: UniformBatch | MixedBatch) -> Iterator[tuple[Sink, Indexes | None]]:
        """Where messages go that come from elsewhere: a sink, and the positions of those that are
        for it; None for all. A mix has its own names."""
        if isinstance(messages, UniformBatch):
            yield from ((sink, None) for sink in self.of(messages.first_message.subject))
            return
        names, numbers = messages.subject_names or (), dict[Sink, list[int]]()
        for number, name in enumerate(names):
            for sink in self.of(name):
                numbers.setdefault(sink, []).append(number)
        for sink, those in numbers.items():
            everything = len(those) == len(names)
            yield sink, None if everything else np.flatnonzero(np.isin(messages.subject_numbers, those))

    def _result(self, sinks: Sinks) -> int:
        number = self._results.get(sinks)
        if number is None:
            number = self._results[sinks] = len(self._sinks)
            self._sinks.append(sinks)
        return number


class Listening:
    """Of one front. See `core.explaining_channels.Hearers`."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    def find_listeners(self, channel: str, max_count: int) -> tuple[list[Listener], int]:
        """Subscriptions and queue groups, up to so many, and how many were left out."""
        subject = channel.encode()
        found: list[Listener] = []
        left_out = 0
        for sink in self._routes.of(subject):
            queue, members = b"", 1
            if isinstance(sink, QueueGroup | JoinedGroup):
                there = sink.current()
                members = len(there)
                if not members:
                    continue
                one, queue = there[0], there[0].queue
            elif isinstance(sink, Subscription) and sink.takes(subject, None):
                one = sink
            else:
                continue  # A class that the subject is bound to, say.
            if len(found) >= max_count:
                left_out += 1
                continue
            found.append(
                Listener(
                    pattern=_text(one.subject),
                    queue=_text(queue),
                    members=members,
                    peer=one.session.peer[:EXPLAINED_CHARACTERS],
                )
            )
        return found, left_out


def _text(subject: bytes) -> str:
    return subject.decode("utf-8", "backslashreplace")[:EXPLAINED_CHARACTERS]
