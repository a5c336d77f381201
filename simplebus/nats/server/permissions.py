"""Subject permissions of a user.

Deny wins over allow; an empty allow list allows everything. A subscription is allowed if every
subject that it matches is allowed. Denied subjects within it are filtered at delivery. Decisions
are cached by subject, and by subject number for batches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from simplebus.core.channel.pattern import matches, overlaps
from simplebus.core.channel.subscription_index import SubscriptionIndex
from simplebus.core.users.subject_permissions import ResponsePermission, SubjectPermissions
from simplebus.nats import subjects
from simplebus.nats.class_requests import REQUEST_PREFIX, ClassRequest, normalize_pattern, prefixes
from simplebus.nats.limits import (
    CACHED_PERMISSIONS_MAX,
    DECISION_COST_BYTES,
    DECISION_RULE_COST_BYTES,
    DECISION_STEP_COST_BYTES,
    OPEN_REPLIES_MAX,
)
from simplebus.nats.protocol.events import MixedBatch, Pub, UniformBatch
from simplebus.nats.protocol.subject_table import SubjectTable, count_until

_YES, _NO, _UNKNOWN = 1, 0, -1


def ignore_cost(cost_bytes: int) -> None:
    """Do not count the cost of decisions."""


class PermissionCache:
    """Cached decisions about subjects."""

    def __init__(
        self,
        table: SubjectTable,
        decide: Callable[[str], bool],
        add_cost: Callable[[int], None] = ignore_cost,
        *,
        rule_count: int = 0,
    ) -> None:
        """Create an empty cache.

        Args:
            table: The numbers of subjects.
            decide: Returns the decision about the index key of a subject.
            add_cost: Called with the cost of each decision that is not cached, in bytes of output.
            rule_count: Rules that `decide` compares a subject with, one after the other.
        """
        self.decision_cost_bytes = DECISION_COST_BYTES + rule_count * DECISION_RULE_COST_BYTES
        """Cost of a decision that is not cached."""
        self._add_cost = add_cost
        self._table = table
        self._decide = decide
        self._by_name: dict[bytes, bool] = {}
        self._by_number = np.empty(0, np.int8)
        self._valid_for = -1
        self._latest_names: tuple[bytes, ...] = ()
        self._latest_decisions = np.empty(0, np.bool_)
        """Decisions about `_latest_names`: many subscriptions ask about the same batch."""

    def clear(self) -> None:
        """Forget all decisions."""
        self._by_name.clear()
        self._valid_for = -1
        self._latest_names, self._latest_decisions = (), np.empty(0, np.bool_)

    def get(self, subject: bytes) -> bool:
        """Return the decision about a subject."""
        decision = self._by_name.get(subject)
        if decision is None:
            if len(self._by_name) >= CACHED_PERMISSIONS_MAX:
                self._by_name.clear()
            self._add_cost(self.decision_cost_bytes)
            decision = self._by_name[subject] = self._decide(subjects.index_key(subject))
        return decision

    def decide(self, subject: bytes) -> bool:
        """Return the decision about a subject without caching it.

        Hundreds of caches that all get the same subjects would grow, and be cleared, at once.
        """
        decision = self._by_name.get(subject)
        if decision is None:
            self._add_cost(self.decision_cost_bytes)
            decision = self._decide(subjects.index_key(subject))
        return decision

    def get_many(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return the decisions about subject numbers, shape (n,)."""
        by_number = self._current_decisions()
        row_decisions = by_number[numbers]
        is_unknown = row_decisions == _UNKNOWN
        if is_unknown.any():
            for number in np.unique(numbers[is_unknown]).tolist():
                by_number[number] = _YES if self.get(self._table.names[number]) else _NO
            row_decisions = by_number[numbers]
        decisions: npt.NDArray[np.bool_] = row_decisions == _YES
        return decisions

    def get_all(self, names: tuple[bytes, ...]) -> npt.NDArray[np.bool_]:
        """Return the decisions about subjects, shape (n,)."""
        if self._latest_names is not names:
            decisions = [self.get(name) for name in names]
            self._latest_names, self._latest_decisions = names, np.array(decisions, np.bool_)
        return self._latest_decisions

    def get_rows(
        self, batch: MixedBatch, rows: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[np.bool_]:
        """Return the decisions about the messages in `rows` of a batch, or about all messages for
        None. Shape (n,).
        """
        numbers = batch.subject_numbers if rows is None else batch.subject_numbers[rows]
        if batch.subject_names is None:
            return self.get_many(numbers)
        return self.get_all(batch.subject_names)[numbers]

    def decide_in_steps(self, batch: MixedBatch) -> Iterator[None]:
        """Decide about the subjects of a batch that has `subject_names`, so that `get_all` returns
        the decisions at once.

        Yields after decisions that cost DECISION_STEP_COST_BYTES: the caller checks if the turn is
        over. Decisions of before a change of bindings stay valid for the batch, which is older.
        """
        by_number, names = self._decisions_by_table_number(batch), batch.subject_names
        assert names is not None
        if self._latest_names is names:
            return
        decisions = np.full(len(names), _UNKNOWN, np.int8)
        if by_number is not None:
            decisions = by_number[batch.table_numbers]
        undecided = np.flatnonzero(decisions == _UNKNOWN)
        step_size = max(1, DECISION_STEP_COST_BYTES // self.decision_cost_bytes)
        for start in range(0, undecided.size, step_size):
            indexes = undecided[start : start + step_size]
            decisions[indexes] = [self.get(names[index]) for index in indexes.tolist()]
            by_number = self._decisions_by_table_number(batch)
            if by_number is not None and batch.table_numbers is not None:
                by_number[batch.table_numbers[indexes]] = decisions[indexes]
            yield
        self._current_decisions()  # Forgets what has changed since; else `get_all` would do so.
        self._latest_names, self._latest_decisions = names, decisions == _YES

    def count_until_decided(self, numbers: npt.NDArray[np.int32], limit: int) -> int:
        """Return the number of leading messages of which at most `limit` need a new decision.

        Args:
            numbers: Subject numbers of the messages, shape (n,).
        """
        return count_until(self._current_decisions()[numbers] == _UNKNOWN, limit)

    def estimate_cost(self, messages: Pub | UniformBatch | MixedBatch) -> int:
        """Return an estimate of the cost of the decisions about these messages that are not cached,
        in bytes of output.
        """
        decisions = self._current_decisions()  # Forgets outdated decisions, also those by name.
        if isinstance(messages, UniformBatch):
            messages = messages.first_message
        if isinstance(messages, Pub):
            count = int(not self._is_cached(messages.subject))
        elif (names := messages.subject_names) is None:
            count = int(np.count_nonzero(decisions[messages.subject_numbers] == _UNKNOWN))
        elif self._latest_names is names:
            count = 0
        else:
            count = sum([not self._is_cached(name) for name in names])
        return count * self.decision_cost_bytes

    def _is_cached(self, subject: bytes) -> bool:
        """Return True if the decision is cached. The caller has forgotten outdated decisions."""
        return subject in self._by_name

    def _decisions_by_table_number(self, batch: MixedBatch) -> npt.NDArray[np.int8] | None:
        """Return the cached decisions by subject number. None if the batch has no valid numbers."""
        decisions = self._current_decisions()  # Forgets outdated decisions, also those by name.
        is_valid = batch.table_generation == self._table.generation
        return decisions if batch.table_numbers is not None and is_valid else None

    def _current_decisions(self) -> npt.NDArray[np.int8]:
        """Return the cached decisions by subject number, which are forgotten with the subjects."""
        if self._valid_for != self._table.generation:
            self._valid_for = self._table.generation
            self._by_number.fill(_UNKNOWN)
        missing_count = len(self._table.names) - self._by_number.size
        if missing_count > 0:
            added = np.full(missing_count + self._by_number.size, _UNKNOWN, np.int8)
            self._by_number = np.concatenate((self._by_number, added))
        return self._by_number


class SubjectGrants:
    """Subject permissions with cached decisions, shared by all clients of a user."""

    def __init__(
        self,
        permissions: SubjectPermissions,
        table: SubjectTable,
        add_cost: Callable[[int], None] = ignore_cost,
    ) -> None:
        """Create grants. `add_cost` is called with the cost of each new decision."""
        self.responses = permissions.responses
        self._table = table
        self._add_cost = add_cost
        allow = _PatternList(permissions.publish_allow or ())
        deny = _PatternList(permissions.publish_deny)
        allows_all = permissions.publish_allow is None and permissions.responses is None
        self.publish_cache = PermissionCache(
            table,
            lambda name: (allows_all or allow.matches(name)) and not deny.matches(name),
            add_cost,
        )
        """Decides if a subject may be published on, without response permissions."""
        subscribe_allow = tuple(map(normalize_pattern, permissions.subscribe_allow or ()))
        self._can_subscribe_all = permissions.subscribe_allow is None
        self._allow = _PatternList(subscribe_allow)
        self._is_subscribe_restricted = not self._can_subscribe_all or bool(
            permissions.subscribe_deny
        )
        self._allow_requests = _PatternList(
            tuple(p for p in subscribe_allow if p.startswith(REQUEST_PREFIX))
        )
        self._deny = _PatternList(tuple(map(normalize_pattern, permissions.subscribe_deny)))
        self._filters: dict[tuple[str, ...], PermissionCache] = {}

    def can_subscribe(self, subject: bytes, queue: bytes) -> bool:
        """Return True if the subject may be subscribed to. `queue` is empty for no group."""
        name, key = subjects.index_key(subject), subjects.index_key(queue)
        if not (self._can_subscribe_all or self._allow.allows_subscription(name, key)):
            return False
        return not self._is_denied(name, key)

    def can_request_class(self, request: ClassRequest, queue: bytes) -> bool:
        """Return True if the class may be requested. A restricted user needs an allow pattern
        below `$SB.`.
        """
        key = subjects.index_key(queue)
        names = [subjects.index_key(name.encode()) for name in request.names]
        if self._is_subscribe_restricted and not any(
            self._allow_requests.allows_subscription(name, key)
            and self._allow.allows_subscription(name, key)
            for name in names
        ):
            return False
        return not self.is_request_denied(request, queue)

    def is_request_denied(self, request: ClassRequest, queue: bytes = b"") -> bool:
        """Return True if a deny pattern matches the request in this queue group; empty for no
        group.
        """
        key = subjects.index_key(queue)
        return any(
            self._is_denied(subjects.index_key(name.encode()), key)
            for subject in (*request.names, *request.related)
            for name in prefixes(subject)
        )

    def _is_denied(self, name: str, queue: str) -> bool:
        if queue and any(matches(pattern, queue) for pattern in self._deny.queue_patterns(name)):
            return True
        return self._deny.matches(name)

    def denied_patterns(self, subject: bytes, queue: bytes) -> tuple[str, ...]:
        """Return the deny patterns that overlap a subscription."""
        name = subjects.index_key(subject)
        denied = {pattern for pattern in self._deny.plain if overlaps(pattern, name)}
        if queue:
            key = subjects.index_key(queue)
            denied |= {
                pattern
                for pattern, group in self._deny.queue_entries
                if overlaps(pattern, name) and matches(group, key)
            }
        return tuple(sorted(denied))

    def delivery_filter(self, subject: bytes, queue: bytes) -> PermissionCache | None:
        """Return the cache that is True for subjects that are not delivered; None if there are
        none.
        """
        return self._filter_for_patterns(self.denied_patterns(subject, queue))

    def _filter_for_patterns(self, patterns: tuple[str, ...]) -> PermissionCache | None:
        if not patterns:
            return None
        cache = self._filters.get(patterns)
        if cache is None:
            if len(self._filters) >= CACHED_PERMISSIONS_MAX:
                self._filters.clear()
            denied = _build_index(list(patterns))
            cache = self._filters[patterns] = PermissionCache(
                self._table, denied.has_match, self._add_cost
            )
        return cache


class OpenReplies:
    """Reply subjects that one client may respond to, with the responses so far."""

    def __init__(self, responses: ResponsePermission, now: Callable[[], float]) -> None:
        self._responses = responses
        self._now = now
        # Finding the first key of a plain dict skips all removed entries; OrderedDict does not.
        self._open: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """Reply subject to (time of delivery, responses), oldest first."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, reply: bytes) -> None:
        """Allow responses to a delivered message."""
        now = self._now()
        self._open.pop(reply, None)
        while self._open:
            oldest = next(iter(self._open))
            if len(self._open) < OPEN_REPLIES_MAX and not self._is_expired(
                self._open[oldest][0], now
            ):
                break
            del self._open[oldest]
        self._open[reply] = (now, 0)

    def use_reply(self, subject: bytes) -> bool:
        """Return True and count a response if the subject may be responded to."""
        delivered_at, response_count = self._open.get(subject, (0.0, -1))
        if response_count < 0:
            return False
        if (
            self._is_expired(delivered_at, self._now())
            or 0 <= self._responses.max_responses <= response_count
        ):
            del self._open[subject]
            return False
        self._open[subject] = (delivered_at, response_count + 1)
        return True

    def _is_expired(self, since: float, now: float) -> bool:
        return 0 <= self._responses.expires_seconds < now - since


class _PatternList:
    """List of patterns, some of which apply to queue groups only."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.plain: list[str] = []
        self.queue_entries: list[tuple[str, str]] = []
        """Pairs of subject pattern and queue pattern."""
        for pattern in patterns:
            subject, *queue = (subjects.index_key(part.encode()) for part in pattern.split())
            if queue:
                self.queue_entries.append((subject, queue[0]))
            else:
                self.plain.append(subject)
        self._all = _build_index(self.plain)
        self._open = _build_index([pattern for pattern in self.plain if _ends_with_rest(pattern)])

    def matches(self, name: str) -> bool:
        """Return True if a pattern matches the name. Wildcards in the name are literal."""
        return self._all.has_match(name)

    def covers(self, name: str) -> bool:
        """Return True if a pattern matches everything that the name matches."""
        return (self._open if _ends_with_rest(name) else self._all).has_match(name)

    def allows_subscription(self, name: str, queue: str) -> bool:
        """Return True if an allow list permits the subscription. Queue patterns decide for group
        members, if there are any.
        """
        queues = self.queue_patterns(name, covering=True) if queue else []
        if queues:
            return any(matches(pattern, queue) for pattern in queues)
        return self.covers(name)

    def queue_patterns(self, name: str, *, covering: bool = False) -> list[str]:
        """Return the queue patterns that apply to this name."""
        is_open = covering and _ends_with_rest(name)
        return [
            queue
            for pattern, queue in self.queue_entries
            if matches(pattern, name) and (_ends_with_rest(pattern) or not is_open)
        ]


def _build_index(patterns: list[str]) -> SubscriptionIndex[int]:
    index: SubscriptionIndex[int] = SubscriptionIndex(cache_names=0, check=lambda pattern: pattern)
    for pattern in patterns:
        index.insert(pattern, 0)
    return index


def _ends_with_rest(name: str) -> bool:
    return name == ">" or name.endswith(".>")
