"""Channels of one class as numbers, and the channels that each subscription receives.

- A channel is matched against a subscription's patterns once. From then on, filtering a run of
  messages is a table lookup by channel number.
- A filter that matches all known channels, and messages without a channel, skips the lookup.
- Channels that no stored message carries are forgotten when there are too many or memory is short,
  about as many at a time as new ones arrive. An idle class forgets all and releases the tables.
- Names, match states and patterns are charged to the memory budget before they are created.

    names     0: ""   1: "orders.eu"   2: "orders.us" …        numbers in the ring's column
    uses      3           1                0     …             stored messages that carry them
    states    [ no        yes              ?     … ]           one row per subscription
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simplebus.core.channel.matches import Matches
from simplebus.core.channel.pattern import ZERO_OR_MORE, is_literal, matches
from simplebus.core.channel.pattern_index import PatternSet
from simplebus.core.channel.subscription_index import SubscriptionIndex
from simplebus.core.limits import (
    CHANNEL_BYTES,
    CHANNEL_NAMES_MAX,
    COMPARED_CHANNELS_MAX,
    FORGET_CHANNELS_MIN,
    PATTERN_BYTES,
    PATTERN_SEGMENT_BYTES,
    PATTERNS_INDEXED_AT_ONCE,
    PATTERNS_PER_TURN,
    PATTERNS_REMOVED_AT_ONCE,
)
from simplebus.core.protocol.envelope_batch import EnvelopeColumns
from simplebus.core.protocol.frames import Flags
from simplebus.core.ring.columns import NO_DELAY, ChannelCounts, Channels, MessageRows, Times
from simplebus.core.ring.ring import Ring
from simplebus.core.users.permissions import ClassPermissions

_TABLE_SIZE_MIN = 16
_FEW_PATTERNS_MAX = 16
"""Patterns that are indexed in a short time."""
_CHANNELS_PER_PATTERN = 2
"""Indexing one pattern costs as much as comparing this many channels with the patterns."""
_RULES_PER_CHANNEL = 6
"""Comparing a channel with this many rules of a scope costs as much as with all patterns."""
_NOT_MATCHED, _MATCHED, _UNKNOWN = range(3)

MatchStates = npt.NDArray[np.uint8]
"""Match state by channel number, shape (n,)."""


class ChannelFilter:
    """Channels that one subscription receives."""

    __slots__ = (
        "_indexed_count",
        "_match_states",
        "_matched_count",
        "_name_by_number",
        "_number_by_name",
        "_pattern_set",
        "_uncounted_cost",
        "patterns",
        "scope",
        "watched_patterns",
    )

    def __init__(
        self,
        patterns: Sequence[str],
        name_by_number: list[str],
        number_by_name: Mapping[str, int],
        scope: ClassPermissions | None = None,
    ) -> None:
        """Create a filter.

        Args:
            patterns: Channel patterns; empty for all channels that `scope` allows.
            name_by_number: Channel names by number, shared with the table.
            number_by_name: Channel numbers by name, shared with the table.
            scope: Permissions that restrict the filter; None for no restriction.
        """
        self.patterns = tuple(patterns)
        self.scope = scope
        self.watched_patterns = self.patterns or (ZERO_OR_MORE,)
        """Patterns by which new channels are looked up."""
        self._indexed_count = 0
        """Number of leading patterns in `_pattern_set`."""
        self._pattern_set = PatternSet()
        """The patterns that are indexed; empty until a channel is matched against them."""
        self._uncounted_cost = 0
        """Cost of patterns that were indexed since the last call of `find_known_end`."""
        self._name_by_number, self._number_by_name = name_by_number, number_by_name
        self._matched_count = 0
        """Number of known matching channels, plus 1 if messages without a channel match."""
        self._match_states: MatchStates = np.full(
            max(_TABLE_SIZE_MIN, len(name_by_number)), _UNKNOWN, np.uint8
        )
        self._match_states[len(name_by_number) :] = _NOT_MATCHED
        self._evaluate_channel(0)

    @property
    def is_match_all(self) -> bool:
        """True if all known channels match, and messages without a channel."""
        return self._matched_count == len(self._number_by_name)

    def add_channels(self, numbers: npt.NDArray[np.intp]) -> None:
        """Add new channels that match the patterns; the last number is the greatest.

        They are compared with the rules of a scope later, in turns: there may be many filters.
        """
        if self.scope is not None:
            self.add_unknown_channels(numbers)
            return
        self._grow_to(int(numbers[-1]))
        self._match_states[numbers] = _MATCHED
        self._matched_count += numbers.size

    def add_unknown_channels(self, numbers: npt.NDArray[np.intp]) -> None:
        """Add new channels that are compared with the patterns and the scope later; the last number
        is the greatest.
        """
        self._grow_to(int(numbers[-1]))
        self._match_states[numbers] = _UNKNOWN

    def remove_channels(self, numbers: npt.NDArray[np.intp]) -> None:
        """Remove ascending numbers that are no longer in use."""
        numbers = numbers[: numbers.searchsorted(self._match_states.size)]
        self._matched_count -= int(np.count_nonzero(self._match_states[numbers] == _MATCHED))
        self._match_states[numbers] = _NOT_MATCHED

    def reset(self) -> None:
        """Remove all channels."""
        self._match_states = np.full(_TABLE_SIZE_MIN, _NOT_MATCHED, np.uint8)
        self._matched_count = 0
        self._evaluate_channel(0)

    def match_numbers(self, numbers: npt.NDArray[np.uint32] | int) -> Flags:
        """Return which of these channels match."""
        if isinstance(numbers, int):
            return np.full(1, self.is_match(numbers))
        self._grow_to(len(self._name_by_number) - 1)
        states = self._match_states.take(numbers)
        matched: Flags = states == _MATCHED
        if np.count_nonzero(matched) == matched.size:
            return matched
        unevaluated_numbers = np.unique(numbers[states == _UNKNOWN])
        if unevaluated_numbers.size:
            for number in unevaluated_numbers.tolist():
                self._evaluate_channel(number)
            matched = self._match_states.take(numbers) == _MATCHED
        return matched

    def find_known_end(self, numbers: npt.NDArray[np.uint32]) -> tuple[int, int]:
        """Return how many leading `numbers` can be matched at a limited cost, and the cost.

        The cost is a number of comparisons of a channel with the patterns, at most
        COMPARED_CHANNELS_MAX. Indexing many patterns, or a scope with many rules, counts as more
        comparisons. Until all patterns are indexed, each call lets one channel be compared with all
        of them.
        """
        self._grow_to(len(self._name_by_number) - 1)
        unevaluated_indexes = np.flatnonzero(self._match_states.take(numbers) == _UNKNOWN)
        is_indexed = not unevaluated_indexes.size or self._index_some_patterns()
        indexing_cost, self._uncounted_cost = self._uncounted_cost, 0
        channel_cost = 1
        if self.scope is not None:
            channel_cost += self.scope.rule_count // _RULES_PER_CHANNEL
        unevaluated_max = 1
        if is_indexed:
            unevaluated_max = max((COMPARED_CHANNELS_MAX - indexing_cost) // channel_cost, 1)
        if unevaluated_indexes.size > unevaluated_max:
            return int(unevaluated_indexes[unevaluated_max]), COMPARED_CHANNELS_MAX
        cost = unevaluated_indexes.size * channel_cost + indexing_cost
        return numbers.size, min(cost, COMPARED_CHANNELS_MAX)

    def is_match(self, number: int) -> bool:
        """Return True if this channel matches."""
        self._grow_to(number)
        if self._match_states[number] == _UNKNOWN:
            self._evaluate_channel(number)
        return bool(self._match_states[number] == _MATCHED)

    def _evaluate_channel(self, number: int) -> None:
        name = self._name_by_number[number]
        if not self.patterns:
            is_match = True  # Only the scope restricts the filter: no pattern needs to be indexed.
        else:
            is_match = self.has_pattern(name) if name else ZERO_OR_MORE in self.patterns
        is_match = is_match and (self.scope is None or self.scope.is_allowed(name))
        self._match_states[number] = _MATCHED if is_match else _NOT_MATCHED
        self._matched_count += is_match

    def has_pattern(self, name: str) -> bool:
        """Return True if a pattern matches the channel."""
        if self._indexed_count == len(self.watched_patterns) or self._index_some_patterns():
            return self._pattern_set.has_match(name)
        return any(matches(pattern, name) for pattern in self.watched_patterns)

    def _index_some_patterns(self) -> bool:
        """Index as many patterns as one turn should. Returns True if all are indexed."""
        first = self._indexed_count
        added = self.watched_patterns[first : first + PATTERNS_PER_TURN]
        self._pattern_set.update(added)
        self._indexed_count += len(added)
        if len(self.patterns) > _FEW_PATTERNS_MAX:
            self._uncounted_cost += _CHANNELS_PER_PATTERN * len(added)
        return self._indexed_count == len(self.watched_patterns)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        matched = set(np.flatnonzero(self._match_states == _MATCHED).tolist())
        assert matched <= set(self._number_by_name.values())
        assert len(matched) == self._matched_count

    def _grow_to(self, number: int) -> None:
        size = self._match_states.size
        if number >= size:
            added = np.full(max(number + 1, 2 * size) - size, _NOT_MATCHED, np.uint8)
            self._match_states = np.concatenate([self._match_states, added])


class _RemovedFilter(NamedTuple):
    """A removed filter whose patterns are not removed yet."""

    channel_filter: ChannelFilter
    patterns: list[str]
    """Patterns that are still charged to the memory budget."""
    indexed_count: int
    """Number of leading `patterns` that were in the index when the filter was removed."""


class ChannelTable:
    """Channels of one class and the filters of its subscriptions."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._channel_counts = ring.channel_counts
        self.borrowing_counts: dict[ChannelCounts, None] = {}
        """Channel counts of other rings whose messages carry channels of this table."""
        self._name_by_number = [""]
        """Channel name by number; "" for a free number."""
        self._number_by_name: dict[str, int] = {"": 0}
        self._free_numbers: list[int] = []
        self._is_number_used = np.zeros(0, np.bool_)
        """True at each number that stands for a channel. Shape (capacity,)."""
        self._capacity = 0
        """Numbers that are charged to the memory budget. Each has an entry in several tables."""
        self._filter_index: SubscriptionIndex[ChannelFilter] = SubscriptionIndex()
        self._filters: dict[ChannelFilter, None] = {}
        self._unindexed_patterns: dict[ChannelFilter, list[str]] = {}
        """Patterns that are not in the index yet, by filter. Until they are, a new channel is
        compared with the patterns of the filter when a message with this channel is delivered.
        """
        self._removed_filters: deque[_RemovedFilter] = deque()
        """Removed filters with patterns that are still in the index or in the budget."""
        self._name_count_max = CHANNEL_NAMES_MAX
        self._fully_used_floor = -1
        """Floor of the ring at which all channels were found to be in use."""
        self.memory_bytes = 0
        """Bytes taken from the budget."""
        self.generation = 0
        """Incremented whenever numbers are released."""

    def __len__(self) -> int:
        """Return the number of known channels."""
        return len(self._number_by_name) - 1

    def are_all_allowed(self, scope: ClassPermissions, names: Sequence[str]) -> bool:
        """Return True if `scope` allows messages of all of these known channels."""
        numbers = list(map(self._number_by_name.__getitem__, names))
        return scope.is_all_allowed(self._name_by_number, self.generation, numbers)

    def allowed_flags(
        self, scope: ClassPermissions, numbers: npt.NDArray[np.uint32] | int
    ) -> Flags:
        """Return for which channel numbers `scope` allows messages. One number gives shape (1,)."""
        return scope.allowed_flags(self._name_by_number, self.generation, numbers)

    def name_of(self, number: int) -> str:
        """Return the channel with this number; "" for none."""
        return self._name_by_number[number]

    def count_stored(self, name: str) -> int:
        """Return how many stored messages carry this channel."""
        number = self._number_by_name.get(name, 0)
        return (
            int(self._channel_counts.by_number[number])
            if 0 < number < self._channel_counts.by_number.size
            else 0
        )

    def find_filters(self, name: str) -> tuple[ChannelFilter, ...]:
        """Return the filters with a pattern that matches this channel."""
        unindexed = [each for each in self._unindexed_patterns if each.has_pattern(name)]
        indexed = self._filter_index.match(name)
        return (*filter(self._is_indexed, indexed), *unindexed)

    def _is_indexed(self, channel_filter: ChannelFilter) -> bool:
        """Return True if the index has all patterns of a filter that was not removed."""
        return channel_filter in self._filters and channel_filter not in self._unindexed_patterns

    def intern_names(self, names: Sequence[str]) -> list[int] | None:
        """Return the numbers of these channels; the name "" stands for no channel.

        A number is valid until the next call, and as long as a stored message carries it.

        Returns:
            None if there is no memory for new channels.
        """
        numbers = self._number_by_name
        try:
            return list(map(numbers.__getitem__, names))
        except KeyError:
            pass  # Some are new.
        new_names = [name for name in dict.fromkeys(names) if name not in numbers]
        if new_names:
            if len(numbers) + len(new_names) > self._name_count_max or not self._reserve_memory(
                new_names
            ):
                self.forget_unused(max(FORGET_CHANNELS_MIN, 2 * len(new_names)))
                self._name_count_max = max(CHANNEL_NAMES_MAX, len(numbers) + FORGET_CHANNELS_MIN)
                new_names = [name for name in dict.fromkeys(names) if name not in numbers]
                if not self._reserve_memory(new_names):
                    return None
            self._add_names(new_names)
        return list(map(numbers.__getitem__, names))

    def intern_name(self, name: str) -> int | None:
        """Return the number of a channel like `intern_names`; None if there is no memory for it."""
        number = self._number_by_name.get(name)
        if number is None:
            numbers = self.intern_names((name,))
            return None if numbers is None else numbers[0]
        return number

    def add_filter(
        self, patterns: Sequence[str], scope: ClassPermissions | None = None
    ) -> ChannelFilter | None:
        """Add a filter for these patterns and this scope. Returns None if there is no memory.

        Many patterns are indexed by later calls of `update_some_patterns`.
        """
        channel_filter = ChannelFilter(
            tuple(dict.fromkeys(patterns)), self._name_by_number, self._number_by_name, scope
        )
        needed_bytes = _patterns_bytes(channel_filter.watched_patterns) + self._capacity
        while not self._take_budget(needed_bytes):
            if not self._removed_filters:
                return None
            self._remove_some_patterns(PATTERNS_PER_TURN)
        self._filters[channel_filter] = None
        patterns = channel_filter.watched_patterns
        if len(patterns) <= PATTERNS_INDEXED_AT_ONCE:
            self._filter_index.insert_all(patterns, channel_filter)
        else:
            self._unindexed_patterns[channel_filter] = list(patterns)
        return channel_filter

    def remove_filter(self, channel_filter: ChannelFilter) -> None:
        """Remove a filter.

        Its patterns are removed at once if they are few, otherwise by later calls of
        `update_some_patterns`, because many filters may end at the same time.
        """
        del self._filters[channel_filter]
        self._return_budget(self._capacity)
        patterns = list(channel_filter.watched_patterns)
        indexed_count = len(patterns) - len(self._unindexed_patterns.pop(channel_filter, ()))
        removed = _RemovedFilter(channel_filter, patterns, indexed_count)
        if len(patterns) <= PATTERNS_REMOVED_AT_ONCE:
            self._remove_last_patterns(removed, len(patterns))
        else:
            self._removed_filters.append(removed)

    @property
    def has_unindexed_patterns(self) -> bool:
        """True if `update_some_patterns` has patterns to index. `find_filters` takes long then."""
        return bool(self._unindexed_patterns)

    @property
    def has_pattern_changes(self) -> bool:
        """True if `update_some_patterns` has work to do."""
        return bool(self._unindexed_patterns or self._removed_filters)

    def update_some_patterns(self) -> None:
        """Index patterns of new filters, then remove patterns of removed filters.

        Handles up to PATTERNS_PER_TURN patterns in total.
        """
        count = PATTERNS_PER_TURN - self._index_some_patterns(PATTERNS_PER_TURN)
        self._remove_some_patterns(count)

    def _index_some_patterns(self, max_count: int) -> int:
        """Index up to `max_count` patterns, in their order. Returns how many."""
        remaining_count = max_count
        while self._unindexed_patterns and remaining_count:
            channel_filter, patterns = next(iter(self._unindexed_patterns.items()))
            indexed = patterns[:remaining_count]
            self._filter_index.insert_all(indexed, channel_filter)
            del patterns[:remaining_count]
            remaining_count -= len(indexed)
            if not patterns:
                del self._unindexed_patterns[channel_filter]
        return max_count - remaining_count

    def _remove_some_patterns(self, count: int) -> None:
        """Remove up to `count` patterns of removed filters."""
        while self._removed_filters and count:
            removed = self._removed_filters[0]
            removed_count = min(count, len(removed.patterns))
            self._remove_last_patterns(removed, removed_count)
            count -= removed_count
            if not removed.patterns:
                self._removed_filters.popleft()

    def _remove_last_patterns(self, removed: _RemovedFilter, count: int) -> None:
        """Remove the last `count` patterns of a removed filter, and return their memory."""
        begin = len(removed.patterns) - count
        for pattern in removed.patterns[begin : removed.indexed_count]:
            self._filter_index.remove(pattern, removed.channel_filter)
        self._return_budget(_patterns_bytes(removed.patterns[begin:]))
        del removed.patterns[begin:]

    def forget_unused(self, max_count: int) -> int:
        """Forget up to `max_count` channels that no stored message carries. Returns how many."""
        if self._ring.floor == self._fully_used_floor:
            return 0
        is_idle = self._is_number_used.copy()
        for counts in (self._channel_counts, *self.borrowing_counts):
            is_idle[np.flatnonzero(counts.by_number[: is_idle.size])] = False
        idle_numbers = np.flatnonzero(is_idle)
        if idle_numbers.size <= max_count:
            self._fully_used_floor = self._ring.floor
        idle_numbers, names = idle_numbers[:max_count], self._name_by_number
        self.generation += idle_numbers.size > 0
        self._is_number_used[idle_numbers] = False
        self._return_budget(_names_bytes([names[number] for number in idle_numbers.tolist()]))
        for number in idle_numbers.tolist():
            del self._number_by_name[names[number]]
            names[number] = ""
        for channel_filter in self._filters:
            channel_filter.remove_channels(idle_numbers)
        self._free_numbers += idle_numbers[::-1].tolist()
        return idle_numbers.size

    def shrink_idle(self, max_count: int) -> int:
        """Forget up to `max_count` channels of an idle class, and release its tables at the end.

        Returns:
            The number of forgotten channels.
        """
        forgotten = self.forget_unused(max_count) if len(self) and max_count else 0
        if len(self) or not self._capacity:
            return forgotten
        del self._name_by_number[1:]  # The filters share this list.
        self._free_numbers.clear()
        self._is_number_used = self._is_number_used[:0]
        self._return_budget(self._capacity * self._bytes_per_number)
        self._capacity = 0
        self._name_count_max = CHANNEL_NAMES_MAX
        self._channel_counts.reset()
        self._filter_index.clear_cache()
        for channel_filter in self._filters:
            channel_filter.reset()
        self.generation += 1
        return forgotten

    def _reserve_memory(self, names: list[str]) -> bool:
        """Charge new channels to the budget. Returns False if there is not enough memory."""
        capacity = self._capacity
        needed = len(self._name_by_number) + max(0, len(names) - len(self._free_numbers))
        while capacity < needed:
            capacity = max(_TABLE_SIZE_MIN, 2 * capacity)
        added_bytes = (capacity - self._capacity) * self._bytes_per_number
        if not self._take_budget(added_bytes + _names_bytes(names)):
            return False
        unnamed = np.zeros(capacity - self._capacity, np.bool_)
        self._is_number_used = np.concatenate([self._is_number_used, unnamed])
        self._capacity = capacity
        return True

    @property
    def _bytes_per_number(self) -> int:
        """Bytes per channel number, without its name."""
        return (
            2 * self._channel_counts.by_number.itemsize
            + self._is_number_used.itemsize
            + len(self._filters)
        )

    def _take_budget(self, size: int) -> bool:
        if not self._ring.budget.acquire(size):
            return False
        self.memory_bytes += size
        return True

    def _return_budget(self, size: int) -> None:
        self.memory_bytes -= size
        self._ring.budget.release(size)

    def _add_names(self, names: list[str]) -> None:
        """Assign numbers to channels and add them to the filters that match."""
        self._fully_used_floor = -1
        free_count = min(len(self._free_numbers), len(names))
        first = len(self._name_by_number)
        numbers = [
            *reversed(self._free_numbers[len(self._free_numbers) - free_count :]),
            *range(first, first + len(names) - free_count),
        ]
        del self._free_numbers[len(self._free_numbers) - free_count :]
        for number, name in zip(numbers[:free_count], names, strict=False):
            self._name_by_number[number] = name
        self._name_by_number += names[free_count:]
        self._number_by_name.update(zip(names, numbers, strict=True))
        self._is_number_used[numbers] = True
        if self._filter_index:
            self._add_to_filters(names, numbers)
        if self._unindexed_patterns:
            added = np.array(sorted(numbers), np.intp)
            for channel_filter in self._unindexed_patterns:
                channel_filter.add_unknown_channels(added)

    def _add_to_filters(self, names: list[str], numbers: list[int]) -> None:
        """Add new channels to the filters that match."""
        numbers_by_filters: dict[int, tuple[Matches[ChannelFilter], list[int]]] = {}
        for name, number in zip(names, numbers, strict=True):
            if filters := self._filter_index.match(name):
                numbers_by_filters.setdefault(id(filters), (filters, []))[1].append(number)
        for filters, matched in numbers_by_filters.values():
            added = np.array(sorted(matched), np.intp)  # Sorted once for all equal filters.
            for channel_filter in dict.fromkeys(filters):
                if self._is_indexed(channel_filter):
                    channel_filter.add_channels(added)

    def build_rows(
        self, columns: EnvelopeColumns, accepted_times: float | Times
    ) -> MessageRows | None:
        """Return the ring columns of scanned envelopes; None if there is no memory for channels.

        Args:
            columns: The scanned envelopes.
            accepted_times: Time of acceptance, in seconds since 1970: of all messages, or one per
                message.
        """
        numbers = self.intern_names(columns.names)
        if numbers is None:
            return None
        if isinstance(columns.channels, int):
            channels: int | Channels = numbers[columns.channels] if numbers else 0
        else:
            channels = np.array(numbers, np.uint32)[columns.channels]
        return MessageRows(
            columns.count,
            channels,
            None if columns.expires is None else columns.expires + accepted_times,
            # A delay of 0 stays "at once", even if the clock is set back later.
            None
            if columns.not_before is None
            else np.where(columns.not_before > 0, columns.not_before + accepted_times, NO_DELAY),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        named = {name: number for number, name in enumerate(self._name_by_number) if name}
        assert self._number_by_name == {"": 0} | named
        assert np.flatnonzero(self._is_number_used).tolist() == sorted(named.values())
        assert len(self._free_numbers) + len(named) + 1 == len(self._name_by_number)
        assert not any(self._name_by_number[number] for number in self._free_numbers)
        assert all(
            self._name_by_number[number]
            for number in np.flatnonzero(self._channel_counts.by_number[1:]) + 1
        )
        for channel_filter in self._filters:
            channel_filter.check_invariants()
        assert self.memory_bytes == (
            _names_bytes(list(named))
            + sum(
                _patterns_bytes(channel_filter.watched_patterns) for channel_filter in self._filters
            )
            + sum(_patterns_bytes(removed.patterns) for removed in self._removed_filters)
            + self._capacity * self._bytes_per_number
        )


def _names_bytes(names: list[str]) -> int:
    """Return the approximate memory of channels."""
    return CHANNEL_BYTES * len(names) + _text_bytes(names)


def _patterns_bytes(patterns: Sequence[str]) -> int:
    """Return the approximate memory of a filter's patterns, here and in its own matcher."""
    segments = sum(pattern.count(".") + 1 for pattern in patterns if not is_literal(pattern))
    return PATTERN_BYTES * len(patterns) + PATTERN_SEGMENT_BYTES * segments + _text_bytes(patterns)


def _text_bytes(texts: Sequence[str]) -> int:
    joined = "".join(texts)
    if joined.isascii():
        return len(joined)
    return sum(len(text) if text.isascii() else 4 * len(text) for text in texts)
