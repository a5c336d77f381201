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

_VERDICTS_MIN = 16
_NO, _YES, _UNKNOWN = range(3)

Verdicts = npt.NDArray[np.uint8]
"""Shape (n,): by channel number, whether a channel is wanted."""


class Wanted:
    """What one subscription wants."""

    __slots__ = (
        "_count",
        "_names",
        "_numbers",
        "_sublist",
        "_verdicts",
        "patterns",
        "scope",
        "watched",
    )

    def __init__(
        self,
        patterns: Sequence[str],
        names: list[str],
        numbers: Mapping[str, int],
        scope: Scope | None = None,
    ) -> None:
        """`names` are the channels by number, and `numbers` those of the channels, of which it
        knows nothing yet; of those, it wants only what `scope` allows, and all of that where there
        are no patterns."""
        self.patterns = tuple(patterns)
        self.scope = scope
        self.watched = self.patterns or (REST,)
        """What new channels are looked up by."""
        self._sublist: Sublist[None] = Sublist(cache_names=0, cache_values=0)
        for pattern in self.watched:
            self._sublist.insert(pattern, None)
        self._names, self._numbers = names, numbers
        self._count = 0
        """How many it is known to want, with 1 for messages without a channel."""
        self._verdicts: Verdicts = np.full(max(_VERDICTS_MIN, len(names)), _UNKNOWN, np.uint8)
        self._verdicts[len(names) :] = _NO
        self._judge(0)

    @property
    def is_all(self) -> bool:
        """Whether every message is wanted that has one of the channels there are, or none."""
        return self._count == len(self._numbers)

    def add(self, numbers: npt.NDArray[np.intp]) -> None:
        """It wants these channels, which are new and whose greatest number is the last one."""
        self._reach(int(numbers[-1]))
        if self.scope is None:
            self._verdicts[numbers] = _YES
            self._count += numbers.size
            return
        for number in numbers.tolist():
            is_wanted = self.scope.allows(self._names[number])
            self._verdicts[number] = _YES if is_wanted else _NO
            self._count += is_wanted

    def forget(self, numbers: npt.NDArray[np.intp]) -> None:
        """These numbers, which ascend, stand for no channel any more."""
        numbers = numbers[: numbers.searchsorted(self._verdicts.size)]
        self._count -= int(np.count_nonzero(self._verdicts[numbers] == _YES))
        self._verdicts[numbers] = _NO

    def rest(self) -> None:
        """No number stands for a channel any more."""
        self._verdicts = np.full(_VERDICTS_MIN, _NO, np.uint8)
        self._count = 0
        self._judge(0)

    def of(self, numbers: npt.NDArray[np.uint32] | int) -> Flags:
        """Which of these channels are wanted."""
        if isinstance(numbers, int):
            return np.full(1, self.wants(numbers))
        self._reach(len(self._names) - 1)
        found = self._verdicts.take(numbers)
        wanted: Flags = found == _YES
        if np.count_nonzero(wanted) == wanted.size:
            return wanted
        unknown = np.unique(numbers[found == _UNKNOWN])
        if unknown.size:
            for number in unknown.tolist():
                self._judge(number)
            wanted = self._verdicts.take(numbers) == _YES
        return wanted

    def wants(self, number: int) -> bool:
        """Whether this channel is wanted."""
        self._reach(number)
        if self._verdicts[number] == _UNKNOWN:
            self._judge(number)
        return bool(self._verdicts[number] == _YES)

    def _judge(self, number: int) -> None:
        name = self._names[number]
        is_wanted = self._sublist.matches(name)
        is_wanted = is_wanted and (self.scope is None or self.scope.allows(name))
        self._verdicts[number] = _YES if is_wanted else _NO
        self._count += is_wanted

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        wanted = set(np.flatnonzero(self._verdicts == _YES).tolist())
        assert wanted <= set(self._numbers.values())
        assert len(wanted) == self._count

    def _reach(self, number: int) -> None:
        size = self._verdicts.size
        if number >= size:
            more = np.full(max(number + 1, 2 * size) - size, _NO, np.uint8)
            self._verdicts = np.concatenate([self._verdicts, more])


class ChannelTable:
    """Of one class."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._columns = ring.columns
        self.lends: dict[Columns, None] = {}
        """Those of other rings whose messages carry its channels."""
        self._names = [""]
        """By number; "" for one that is free."""
        self._numbers: dict[str, int] = {"": 0}
        self._free: list[int] = []
        self._is_named = np.zeros(0, np.bool_)
        """By number, up to the capacity: whether it stands for a channel."""
        self._capacity = 0
        """Numbers up to this one are paid for, whoever keeps something for each of them."""
        self._sublist: Sublist[Wanted] = Sublist()
        self._wanted: dict[Wanted, None] = {}
        self._names_max = CHANNEL_NAMES_MAX
        self._all_used_at = -1
        """With this floor, and the same channels, there is none to be forgotten."""
        self.memory_bytes = 0
        """Taken from the budget."""
        self.generation = 0
        """Grows whenever numbers stand for channels no longer."""

    def __len__(self) -> int:
        """How many channels have numbers."""
        return len(self._numbers) - 1

    def all_allowed(self, scope: Scope, names: Sequence[str]) -> bool:
        """Whether a scope allows messages of all of these channels, which have numbers."""
        numbers = list(map(self._numbers.__getitem__, names))
        return scope.allows_all(self._names, self.generation, numbers)

    def allowed(self, scope: Scope, numbers: npt.NDArray[np.uint32] | int) -> Flags:
        """Of which of these channels a scope allows messages; shape (1,) for a single number."""
        return scope.of(self._names, self.generation, numbers)

    def name(self, number: int) -> str:
        """The channel with this number; "" for none."""
        return self._names[number]

    def stored(self, name: str) -> int:
        """How many stored messages carry this channel."""
        number = self._numbers.get(name, 0)
        return int(self._columns.uses[number]) if 0 < number < self._columns.uses.size else 0

    def wanting(self, name: str) -> tuple[Wanted, ...]:
        """Who has a pattern that matches this channel."""
        return self._sublist.match(name)

    def numbers(self, names: Sequence[str]) -> list[int] | None:
        """The numbers of these channels, "" being none. They hold until the next call, and as long
        as stored messages carry them. None when there is no memory for those that are new."""
        known = self._numbers
        new = [name for name in dict.fromkeys(names) if name not in known]
        if new:
            if len(known) + len(new) > self._names_max or not self._pay_for(new):
                self.forget(max(CHANNELS_FORGOTTEN, 2 * len(new)))
                self._names_max = max(CHANNEL_NAMES_MAX, len(known) + CHANNELS_FORGOTTEN)
                new = [name for name in dict.fromkeys(names) if name not in known]
                if not self._pay_for(new):
                    return None
            self._add(new)
        return [known[name] for name in names]

    def add(self, patterns: Sequence[str], scope: Scope | None = None) -> Wanted | None:
        """Somebody wants what one of these patterns matches, and the scope allows. None when there
        is no memory."""
        wanted = Wanted(tuple(dict.fromkeys(patterns)), self._names, self._numbers, scope)
        if not self._take(_size_of(wanted.watched) + self._capacity):
            return None
        self._wanted[wanted] = None
        for pattern in wanted.watched:
            self._sublist.insert(pattern, wanted)
        return wanted

    def remove(self, wanted: Wanted) -> None:
        """Somebody is gone."""
        del self._wanted[wanted]
        for pattern in wanted.watched:
            self._sublist.remove(pattern, wanted)
        self._give(_size_of(wanted.watched) + self._capacity)

    def forget(self, most: int) -> int:
        """Forget up to so many channels that no stored message carries. Returns how many."""
        if self._ring.floor == self._all_used_at:
            return 0
        is_idle = self._is_named.copy()
        for columns in (self._columns, *self.lends):
            is_idle[np.flatnonzero(columns.uses[: is_idle.size])] = False
        idle = np.flatnonzero(is_idle)
        if idle.size <= most:
            self._all_used_at = self._ring.floor
        idle, names = idle[:most], self._names
        self.generation += idle.size > 0
        self._is_named[idle] = False
        self._give(sum(_size_of_name(names[number]) for number in idle.tolist()))
        for number in idle.tolist():
            del self._numbers[names[number]]
            names[number] = ""
        for wanted in self._wanted:
            wanted.forget(idle)
        self._free += idle[::-1].tolist()
        return idle.size

    def rest(self, most: int) -> int:
        """Nothing has been stored for long: forget up to so many channels, and behind the last one
        give back what is kept for each. Returns how many."""
        forgotten = self.forget(most) if len(self) and most else 0
        if len(self) or not self._capacity:
            return forgotten
        del self._names[1:]  # Others look into this list.
        self._free.clear()
        self._is_named = self._is_named[:0]
        self._give(self._capacity * self._column_bytes)
        self._capacity = 0
        self._names_max = CHANNEL_NAMES_MAX
        self._columns.rest()
        self._sublist.forget_matches()
        for wanted in self._wanted:
            wanted.rest()
        self.generation += 1
        return forgotten

    def _pay_for(self, names: list[str]) -> bool:
        """Take the memory that these new channels need, if there is so much."""
        capacity = self._capacity
        top = len(self._names) + max(0, len(names) - len(self._free))
        while capacity < top:
            capacity = max(_VERDICTS_MIN, 2 * capacity)
        more = (capacity - self._capacity) * self._column_bytes
        if not self._take(more + sum(map(_size_of_name, names))):
            return False
        unnamed = np.zeros(capacity - self._capacity, np.bool_)
        self._is_named = np.concatenate([self._is_named, unnamed])
        self._capacity = capacity
        return True

    @property
    def _column_bytes(self) -> int:
        """What is kept for each number, beside its name."""
        return 2 * self._columns.uses.itemsize + self._is_named.itemsize + len(self._wanted)

    def _take(self, size: int) -> bool:
        if not self._ring.budget.take(size):
            return False
        self.memory_bytes += size
        return True

    def _give(self, size: int) -> None:
        self.memory_bytes -= size
        self._ring.budget.give(size)

    def _add(self, names: list[str]) -> None:
        """Give channels numbers, and have who wants them know; once for all that the same want."""
        found: dict[int, tuple[tuple[Wanted, ...], list[int]]] = {}
        self._all_used_at = -1
        for name in names:
            if self._free:
                number = self._free.pop()
                self._names[number] = name
            else:
                number = len(self._names)
                self._names.append(name)
            self._numbers[name] = number
            self._is_named[number] = True
            who = self._sublist.match(name)
            if who:
                found.setdefault(id(who), (who, []))[1].append(number)
        for who, numbers in found.values():
            new = np.array(sorted(numbers), np.intp)  # Once: writing them is quick then.
            for wanted in dict.fromkeys(who):
                wanted.add(new)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        named = {name: number for number, name in enumerate(self._names) if name}
        assert self._numbers == {"": 0} | named
        assert np.flatnonzero(self._is_named).tolist() == sorted(named.values())
        assert len(self._free) + len(named) + 1 == len(self._names)
        assert not any(self._names[number] for number in self._free)
        assert all(self._names[number] for number in np.flatnonzero(self._columns.uses[1:]) + 1)
        for wanted in self._wanted:
            wanted.check()
        assert self.memory_bytes == (
            sum(map(_size_of_name, named))
            + sum(_size_of(wanted.watched) for wanted in self._wanted)
            + self._capacity * self._column_bytes
        )


def _size_of_name(name: str) -> int:
    """About what a channel takes."""
    return CHANNEL_BYTES + _size_of_text(name)


def _size_of(patterns: Sequence[str]) -> int:
    """About what somebody's patterns take, here and in a table of its own."""
    return sum(map(_size_of_pattern, patterns))


def _size_of_pattern(pattern: str) -> int:
    segments = 0 if is_literal(pattern) else pattern.count(".") + 1
    return PATTERN_BYTES + segments * PATTERN_SEGMENT_BYTES + _size_of_text(pattern)


def _size_of_text(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
