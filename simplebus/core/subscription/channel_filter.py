"""The channels of one class's messages, as numbers, and who wants which of them.

Rule 1: a channel is matched against a subscription's patterns once: against all there are when its
first message comes, against those of a later one when that looks at such a message. From then on a
run of messages is a look into a table by channel number.
Rule 2: who wants every channel that there is, and messages without one, is known without a look at
any message.
Rule 3: names that no stored message carries are forgotten when there are too many, or no memory for
others: about as many at a time as new ones come, so that nobody waits for it. Of a class in which
nothing has been stored for long all are, and what was kept for each number is given back.
Rule 4: names, verdicts and patterns are paid for from the memory of all classes, before they are
there.

    names    0: ""   1: "orders.eu"   2: "orders.us" …        numbers in the ring's column
    uses     3           1                0     …             stored messages that carry them
    wanted   [ no        yes              ?     … ]           one row of verdicts a subscription
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from simplebus.core.channel.pattern import REST, is_literal
from simplebus.core.channel.subscription_index import Sublist
from simplebus.core.limits import (
    CHANNEL_BYTES,
    CHANNEL_NAMES_MAX,
    CHANNELS_FORGOTTEN,
    PATTERN_BYTES,
    PATTERN_SEGMENT_BYTES,
)
from simplebus.core.protocol.frames import Flags
from simplebus.core.ring.columns import Columns
from simplebus.core.ring.ring import Ring
from simplebus.core.users.permissions import Scope

_TABLE_SIZE_MIN = 16
_NOT_MATCHED, _MATCHED, _UNKNOWN = range(3)

MatchStates = npt.NDArray[np.uint8]
"""Shape (n,): by channel number, whether a channel is wanted."""


class ChannelFilter:
    """What one subscription wants."""

    __slots__ = (
        "_match_states",
        "_matched_count",
        "_name_by_number",
        "_number_by_name",
        "_pattern_matcher",
        "patterns",
        "scope",
        "watched_patterns",
    )

    def __init__(
        self,
        patterns: Sequence[str],
        name_by_number: list[str],
        number_by_name: Mapping[str, int],
        scope: Scope | None = None,
    ) -> None:
        """`names` are the channels by number, and `numbers` those of the channels, of which it
        knows nothing yet; of those, it wants only what `scope` allows, and all of that where there
        are no patterns."""
        self.patterns = tuple(patterns)
        self.scope = scope
        self.watched_patterns = self.patterns or (REST,)
        """What new channels are looked up by."""
        self._pattern_matcher: Sublist[None] = Sublist(cache_names=0, cache_values=0)
        for pattern in self.watched_patterns:
            self._pattern_matcher.insert(pattern, None)
        self._name_by_number, self._number_by_name = name_by_number, number_by_name
        self._matched_count = 0
        """How many it is known to want, with 1 for messages without a channel."""
        self._match_states: MatchStates = np.full(
            max(_TABLE_SIZE_MIN, len(name_by_number)), _UNKNOWN, np.uint8
        )
        self._match_states[len(name_by_number) :] = _NOT_MATCHED
        self._evaluate_channel(0)

    @property
    def is_match_all(self) -> bool:
        """Whether every message is wanted that has one of the channels there are, or none."""
        return self._matched_count == len(self._number_by_name)

    def add_channels(self, numbers: npt.NDArray[np.intp]) -> None:
        """It wants these channels, which are new and whose greatest number is the last one."""
        self._grow_to(int(numbers[-1]))
        if self.scope is None:
            self._match_states[numbers] = _MATCHED
            self._matched_count += numbers.size
            return
        for number in numbers.tolist():
            is_wanted = self.scope.allows(self._name_by_number[number])
            self._match_states[number] = _MATCHED if is_wanted else _NOT_MATCHED
            self._matched_count += is_wanted

    def remove_channels(self, numbers: npt.NDArray[np.intp]) -> None:
        """These numbers, which ascend, stand for no channel any more."""
        numbers = numbers[: numbers.searchsorted(self._match_states.size)]
        self._matched_count -= int(np.count_nonzero(self._match_states[numbers] == _MATCHED))
        self._match_states[numbers] = _NOT_MATCHED

    def reset(self) -> None:
        """No number stands for a channel any more."""
        self._match_states = np.full(_TABLE_SIZE_MIN, _NOT_MATCHED, np.uint8)
        self._matched_count = 0
        self._evaluate_channel(0)

    def match_numbers(self, numbers: npt.NDArray[np.uint32] | int) -> Flags:
        """Which of these channels are wanted."""
        if isinstance(numbers, int):
            return np.full(1, self.is_match(numbers))
        self._grow_to(len(self._name_by_number) - 1)
        found = self._match_states.take(numbers)
        wanted: Flags = found == _MATCHED
        if np.count_nonzero(wanted) == wanted.size:
            return wanted
        unknown = np.unique(numbers[found == _UNKNOWN])
        if unknown.size:
            for number in unknown.tolist():
                self._evaluate_channel(number)
            wanted = self._match_states.take(numbers) == _MATCHED
        return wanted

    def is_match(self, number: int) -> bool:
        """Whether this channel is wanted."""
        self._grow_to(number)
        if self._match_states[number] == _UNKNOWN:
            self._evaluate_channel(number)
        return bool(self._match_states[number] == _MATCHED)

    def _evaluate_channel(self, number: int) -> None:
        name = self._name_by_number[number]
        is_wanted = self._pattern_matcher.matches(name)
        is_wanted = is_wanted and (self.scope is None or self.scope.allows(name))
        self._match_states[number] = _MATCHED if is_wanted else _NOT_MATCHED
        self._matched_count += is_wanted

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        wanted = set(np.flatnonzero(self._match_states == _MATCHED).tolist())
        assert wanted <= set(self._number_by_name.values())
        assert len(wanted) == self._matched_count

    def _grow_to(self, number: int) -> None:
        size = self._match_states.size
        if number >= size:
            more = np.full(max(number + 1, 2 * size) - size, _NOT_MATCHED, np.uint8)
            self._match_states = np.concatenate([self._match_states, more])


class ChannelTable:
    """Of one class."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._columns = ring.columns
        self.borrowing_columns: dict[Columns, None] = {}
        """Those of other rings whose messages carry its channels."""
        self._name_by_number = [""]
        """By number; "" for one that is free."""
        self._number_by_name: dict[str, int] = {"": 0}
        self._free_numbers: list[int] = []
        self._is_number_used = np.zeros(0, np.bool_)
        """By number, up to the capacity: whether it stands for a channel."""
        self._capacity = 0
        """Numbers up to this one are paid for, whoever keeps something for each of them."""
        self._filter_index: Sublist[ChannelFilter] = Sublist()
        self._filters: dict[ChannelFilter, None] = {}
        self._name_count_max = CHANNEL_NAMES_MAX
        self._fully_used_floor = -1
        """With this floor, and the same channels, there is none to be forgotten."""
        self.memory_bytes = 0
        """Taken from the budget."""
        self.generation = 0
        """Grows whenever numbers stand for channels no longer."""

    def __len__(self) -> int:
        """How many channels have numbers."""
        return len(self._number_by_name) - 1

    def are_all_allowed(self, scope: Scope, names: Sequence[str]) -> bool:
        """Whether a scope allows messages of all of these channels, which have numbers."""
        numbers = list(map(self._number_by_name.__getitem__, names))
        return scope.allows_all(self._name_by_number, self.generation, numbers)

    def allowed_flags(self, scope: Scope, numbers: npt.NDArray[np.uint32] | int) -> Flags:
        """Of which of these channels a scope allows messages; shape (1,) for a single number."""
        return scope.of(self._name_by_number, self.generation, numbers)

    def name_of(self, number: int) -> str:
        """The channel with this number; "" for none."""
        return self._name_by_number[number]

    def count_stored(self, name: str) -> int:
        """How many stored messages carry this channel."""
        number = self._number_by_name.get(name, 0)
        return int(self._columns.uses[number]) if 0 < number < self._columns.uses.size else 0

    def find_filters(self, name: str) -> tuple[ChannelFilter, ...]:
        """Who has a pattern that matches this channel."""
        return self._filter_index.match(name)

    def intern_names(self, names: Sequence[str]) -> list[int] | None:
        """The numbers of these channels, "" being none. They hold until the next call, and as long
        as stored messages carry them. None when there is no memory for those that are new."""
        known = self._number_by_name
        new = [name for name in dict.fromkeys(names) if name not in known]
        if new:
            if len(known) + len(new) > self._name_count_max or not self._reserve_memory(new):
                self.forget_unused(max(CHANNELS_FORGOTTEN, 2 * len(new)))
                self._name_count_max = max(CHANNEL_NAMES_MAX, len(known) + CHANNELS_FORGOTTEN)
                new = [name for name in dict.fromkeys(names) if name not in known]
                if not self._reserve_memory(new):
                    return None
            self._add_names(new)
        return [known[name] for name in names]

    def add_filter(
        self, patterns: Sequence[str], scope: Scope | None = None
    ) -> ChannelFilter | None:
        """Somebody wants what one of these patterns matches, and the scope allows. None when there
        is no memory."""
        wanted = ChannelFilter(
            tuple(dict.fromkeys(patterns)), self._name_by_number, self._number_by_name, scope
        )
        if not self._take_budget(_patterns_bytes(wanted.watched_patterns) + self._capacity):
            return None
        self._filters[wanted] = None
        for pattern in wanted.watched_patterns:
            self._filter_index.insert(pattern, wanted)
        return wanted

    def remove_filter(self, channel_filter: ChannelFilter) -> None:
        """Somebody is gone."""
        del self._filters[channel_filter]
        for pattern in channel_filter.watched_patterns:
            self._filter_index.remove(pattern, channel_filter)
        self._return_budget(_patterns_bytes(channel_filter.watched_patterns) + self._capacity)

    def forget_unused(self, max_count: int) -> int:
        """Forget up to so many channels that no stored message carries. Returns how many."""
        if self._ring.floor == self._fully_used_floor:
            return 0
        is_idle = self._is_number_used.copy()
        for columns in (self._columns, *self.borrowing_columns):
            is_idle[np.flatnonzero(columns.uses[: is_idle.size])] = False
        idle = np.flatnonzero(is_idle)
        if idle.size <= max_count:
            self._fully_used_floor = self._ring.floor
        idle, names = idle[:max_count], self._name_by_number
        self.generation += idle.size > 0
        self._is_number_used[idle] = False
        self._return_budget(sum(_name_bytes(names[number]) for number in idle.tolist()))
        for number in idle.tolist():
            del self._number_by_name[names[number]]
            names[number] = ""
        for wanted in self._filters:
            wanted.remove_channels(idle)
        self._free_numbers += idle[::-1].tolist()
        return idle.size

    def shrink_idle(self, max_count: int) -> int:
        """Nothing has been stored for long: forget up to so many channels, and behind the last one
        give back what is kept for each. Returns how many."""
        forgotten = self.forget_unused(max_count) if len(self) and max_count else 0
        if len(self) or not self._capacity:
            return forgotten
        del self._name_by_number[1:]  # Others look into this list.
        self._free_numbers.clear()
        self._is_number_used = self._is_number_used[:0]
        self._return_budget(self._capacity * self._bytes_per_number)
        self._capacity = 0
        self._name_count_max = CHANNEL_NAMES_MAX
        self._columns.rest()
        self._filter_index.forget_matches()
        for wanted in self._filters:
            wanted.reset()
        self.generation += 1
        return forgotten

    def _reserve_memory(self, names: list[str]) -> bool:
        """Take the memory that these new channels need, if there is so much."""
        capacity = self._capacity
        top = len(self._name_by_number) + max(0, len(names) - len(self._free_numbers))
        while capacity < top:
            capacity = max(_TABLE_SIZE_MIN, 2 * capacity)
        more = (capacity - self._capacity) * self._bytes_per_number
        if not self._take_budget(more + sum(map(_name_bytes, names))):
            return False
        unnamed = np.zeros(capacity - self._capacity, np.bool_)
        self._is_number_used = np.concatenate([self._is_number_used, unnamed])
        self._capacity = capacity
        return True

    @property
    def _bytes_per_number(self) -> int:
        """What is kept for each number, beside its name."""
        return 2 * self._columns.uses.itemsize + self._is_number_used.itemsize + len(self._filters)

    def _take_budget(self, size: int) -> bool:
        if not self._ring.budget.take(size):
            return False
        self.memory_bytes += size
        return True

    def _return_budget(self, size: int) -> None:
        self.memory_bytes -= size
        self._ring.budget.give(size)

    def _add_names(self, names: list[str]) -> None:
        """Give channels numbers, and have who wants them know; once for all that the same want."""
        found: dict[int, tuple[tuple[ChannelFilter, ...], list[int]]] = {}
        self._fully_used_floor = -1
        for name in names:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._name_by_number[number] = name
            else:
                number = len(self._name_by_number)
                self._name_by_number.append(name)
            self._number_by_name[name] = number
            self._is_number_used[number] = True
            who = self._filter_index.match(name)
            if who:
                found.setdefault(id(who), (who, []))[1].append(number)
        for who, numbers in found.values():
            new = np.array(sorted(numbers), np.intp)  # Once: writing them is quick then.
            for wanted in dict.fromkeys(who):
                wanted.add_channels(new)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        named = {name: number for number, name in enumerate(self._name_by_number) if name}
        assert self._number_by_name == {"": 0} | named
        assert np.flatnonzero(self._is_number_used).tolist() == sorted(named.values())
        assert len(self._free_numbers) + len(named) + 1 == len(self._name_by_number)
        assert not any(self._name_by_number[number] for number in self._free_numbers)
        assert all(
            self._name_by_number[number] for number in np.flatnonzero(self._columns.uses[1:]) + 1
        )
        for wanted in self._filters:
            wanted.check_invariants()
        assert self.memory_bytes == (
            sum(map(_name_bytes, named))
            + sum(_patterns_bytes(wanted.watched_patterns) for wanted in self._filters)
            + self._capacity * self._bytes_per_number
        )


def _name_bytes(name: str) -> int:
    """About what a channel takes."""
    return CHANNEL_BYTES + _text_bytes(name)


def _patterns_bytes(patterns: Sequence[str]) -> int:
    """About what somebody's patterns take, here and in a table of its own."""
    return sum(map(_pattern_bytes, patterns))


def _pattern_bytes(pattern: str) -> int:
    segments = 0 if is_literal(pattern) else pattern.count(".") + 1
    return PATTERN_BYTES + segments * PATTERN_SEGMENT_BYTES + _text_bytes(pattern)


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
