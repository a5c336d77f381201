"""What one user may publish and subscribe to.

Rule 1: what is denied is denied, whatever is allowed; a list of what is allowed that is empty
allows everything.
Rule 2: patterns are NATS's. A subscription is allowed when all that it matches is allowed; what it
matches beside that is denied is filtered at delivery.
Rule 3: what was judged of a subject is remembered, by its number for batches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simplebus.core.channel.pattern import matches, overlaps
from simplebus.core.channel.subscription_index import Sublist
from simplebus.nats import subjects
from simplebus.nats.bus.subjects import CLASSES, Asked, beginnings, spelled
from simplebus.nats.limits import REPLIES_MAX, SUBJECTS_MAX, VERDICTS_MAX
from simplebus.nats.server.subject_table import SubjectTable

_YES, _NO, _UNKNOWN = 1, 0, -1


@dataclass(frozen=True, slots=True)
class Responses:
    """Leave to answer: on the reply subject of a message that was delivered."""

    most: int = 1
    """Answers to one message; below 0 for any number."""
    seconds: float = 120.0
    """How long one may answer; below 0 for ever."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one user may do. Patterns of subjects; for subscriptions a blank and a pattern of queue
    names may follow, which then is about members of these queue groups alone.

    Raises ValueError, naming the pattern, when one is not legal.
    """

    publish_allow: tuple[str, ...] = ()
    publish_deny: tuple[str, ...] = ()
    subscribe_allow: tuple[str, ...] = ()
    subscribe_deny: tuple[str, ...] = ()
    responses: Responses | None = None
    """With it, what is not allowed to be published is denied, but for answers."""

    def __post_init__(self) -> None:
        for name, words in (
            ("publish_allow", 1),
            ("publish_deny", 1),
            ("subscribe_allow", 2),
            ("subscribe_deny", 2),
        ):
            for pattern in getattr(self, name):
                parts = pattern.split()
                legal = all(subjects.is_legal(part.encode()) for part in parts)
                if not (1 <= len(parts) <= words and legal):
                    expected = "a subject" if words == 1 else "a subject, or one and a queue name"
                    raise ValueError(f"{name}: {pattern!r} is no pattern, expected {expected}")


class Verdicts:
    """What was judged of subjects."""

    def __init__(self, table: SubjectTable, judge: Callable[[str], bool]) -> None:
        """`judge` is given what stands for a subject in a sublist."""
        self._table = table
        self._judge = judge
        self._by_name: dict[bytes, bool] = {}
        self._by_number: npt.NDArray[np.int8] | None = None
        self._valid_for = -1

    def forget(self) -> None:
        """What was judged may be wrong now."""
        self._by_name.clear()
        self._valid_for = -1

    def one(self, subject: bytes) -> bool:
        """Of this subject."""
        verdict = self._by_name.get(subject)
        if verdict is None:
            if len(self._by_name) >= VERDICTS_MAX:
                self._by_name.clear()
            verdict = self._by_name[subject] = self._judge(subjects.index_key(subject))
        return verdict

    def of(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Of the subjects with these numbers."""
        if self._by_number is None:
            self._by_number = np.empty(SUBJECTS_MAX, np.int8)
        if self._valid_for != self._table.generation:
            self._valid_for = self._table.generation
            self._by_number.fill(_UNKNOWN)
        verdicts = self._by_number[numbers]
        unknown = verdicts == _UNKNOWN
        if unknown.any():
            for number in np.unique(numbers[unknown]).tolist():
                self._by_number[number] = _YES if self.one(self._table.names[number]) else _NO
            verdicts = self._by_number[numbers]
        said: npt.NDArray[np.bool_] = verdicts == _YES
        return said


class Grants:
    """Permissions, as they are asked. One for all clients of a user."""

    def __init__(self, permissions: Permissions, table: SubjectTable) -> None:
        self.responses = permissions.responses
        self._table = table
        allow = _Patterns(permissions.publish_allow)
        deny = _Patterns(permissions.publish_deny)
        everything = not permissions.publish_allow and permissions.responses is None
        self.publishing = Verdicts(
            table,
            lambda name: (everything or allow.match(name)) and not deny.match(name),
        )
        """Whether one may publish on a subject, answers aside."""
        hears = tuple(map(spelled, permissions.subscribe_allow))
        self._subscribes_all = not hears
        self._allow = _Patterns(hears)
        self._takes_some = bool(permissions.subscribe_allow or permissions.subscribe_deny)
        self._allow_classes = _Patterns(tuple(p for p in hears if p.startswith(CLASSES)))
        self._deny = _Patterns(tuple(map(spelled, permissions.subscribe_deny)))
        self._filters: dict[tuple[str, ...], Verdicts] = {}

    def may_subscribe(self, subject: bytes, queue: bytes) -> bool:
        """Whether one may subscribe to it, as a member of this queue group (empty: of none)."""
        name, key = subjects.index_key(subject), subjects.index_key(queue)
        if not (self._subscribes_all or self._allow.allow(name, key)):
            return False
        return not self._is_denied(name, key)

    def may_ask(self, asked: Asked, queue: bytes) -> bool:
        """Whether one may ask for a class, whose messages have subjects of their own. Who may not
        have everything needs leave for that by a pattern that says so."""
        key = subjects.index_key(queue)
        names = [subjects.index_key(each.encode()) for each in asked.own]
        if self._takes_some and not any(
            self._allow_classes.allow(name, key) and self._allow.allow(name, key) for name in names
        ):
            return False
        return not self.is_denied(asked, queue)

    def is_denied(self, asked: Asked, queue: bytes = b"") -> bool:
        """Whether asking for a class is, as a member of this queue group (empty: of none)."""
        key = subjects.index_key(queue)
        return any(
            self._is_denied(subjects.index_key(name.encode()), key)
            for each in (*asked.own, *asked.others)
            for name in beginnings(each)
        )

    def _is_denied(self, name: str, queue: str) -> bool:
        if queue and any(matches(pattern, queue) for pattern in self._deny.queues(name)):
            return True
        return self._deny.match(name)

    def denied(self, subject: bytes, queue: bytes) -> tuple[str, ...]:
        """Patterns of what is not to be delivered of it, to members of this queue group."""
        name = subjects.index_key(subject)
        denied = {pattern for pattern in self._deny.plain if overlaps(pattern, name)}
        if queue:
            key = subjects.index_key(queue)
            denied |= {
                pattern
                for pattern, group in self._deny.queued
                if overlaps(pattern, name) and matches(group, key)
            }
        return tuple(sorted(denied))

    def filter(self, subject: bytes, queue: bytes) -> Verdicts | None:
        """What of it is not to be delivered; None if there is nothing."""
        return self._filter_of(self.denied(subject, queue))

    def _filter_of(self, patterns: tuple[str, ...]) -> Verdicts | None:
        if not patterns:
            return None
        found = self._filters.get(patterns)
        if found is None:
            if len(self._filters) >= VERDICTS_MAX:
                self._filters.clear()
            found = self._filters[patterns] = Verdicts(self._table, _any_of(patterns))
        return found


class Replies:
    """Where one client may answer, and how often still."""

    def __init__(self, responses: Responses, now: Callable[[], float]) -> None:
        self._responses = responses
        self._now = now
        # The first of a plain dict is looked for behind all that were taken from its front.
        self._open: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """By reply subject, the oldest first: since when, and how many answers came."""

    def __len__(self) -> int:
        return len(self._open)

    def heard(self, reply: bytes) -> None:
        """A message with this reply subject is delivered."""
        now = self._now()
        self._open.pop(reply, None)
        while self._open:
            oldest = next(iter(self._open))
            if len(self._open) < REPLIES_MAX and not self._is_over(self._open[oldest][0], now):
                break
            del self._open[oldest]
        self._open[reply] = (now, 0)

    def may_answer(self, subject: bytes) -> bool:
        """Whether one more answer is allowed there; it counts."""
        since, answers = self._open.get(subject, (0.0, -1))
        if answers < 0:
            return False
        if self._is_over(since, self._now()) or 0 <= self._responses.most <= answers:
            del self._open[subject]
            return False
        self._open[subject] = (since, answers + 1)
        return True

    def _is_over(self, since: float, now: float) -> bool:
        return 0 <= self._responses.seconds < now - since


class _Patterns:
    """A list of patterns, some of them about members of queue groups alone."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.plain: list[str] = []
        self.queued: list[tuple[str, str]] = []
        """With the pattern of the queue's name."""
        for pattern in patterns:
            subject, *queue = (subjects.index_key(part.encode()) for part in pattern.split())
            if queue:
                self.queued.append((subject, queue[0]))
            else:
                self.plain.append(subject)
        self._all = _sublist(self.plain)
        self._open = _sublist([pattern for pattern in self.plain if _is_open(pattern)])

    def match(self, name: str) -> bool:
        """Whether one matches this name, whose wildcards are letters."""
        return self._all.matches(name)

    def covers(self, name: str) -> bool:
        """Whether one matches all that this one does."""
        return (self._open if _is_open(name) else self._all).matches(name)

    def allow(self, name: str, queue: str) -> bool:
        """Whether one may subscribe to this, if these are all that is allowed. What is said of
        queues decides for their members, where it says anything."""
        queues = self.queues(name, covering=True) if queue else []
        if queues:
            return any(matches(pattern, queue) for pattern in queues)
        return self.covers(name)

    def queues(self, name: str, *, covering: bool = False) -> list[str]:
        """Patterns of the queue names that something is said about for this name."""
        is_open = covering and _is_open(name)
        return [
            queue
            for pattern, queue in self.queued
            if matches(pattern, name) and (_is_open(pattern) or not is_open)
        ]


def _sublist(patterns: list[str]) -> Sublist[int]:
    found: Sublist[int] = Sublist(cache_names=0, check=lambda pattern: pattern)
    for pattern in patterns:
        found.insert(pattern, 0)
    return found


def _any_of(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: any(matches(pattern, name) for pattern in patterns)


def _is_open(name: str) -> bool:
    return name == ">" or name.endswith(".>")
