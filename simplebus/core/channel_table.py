"""The channels of one class's messages, as numbers, and who wants which of them.

Rule 1: a channel is matched against a subscription's patterns once: against all there are when its
first message comes, against those of a later one when that looks at such a message. From then on a
run of messages is a look into a table by channel number.
Rule 2: names that no stored message carries are forgotten when there are too many.

    names    0: ""   1: "orders.eu"   2: "orders.us" …        numbers in the ring's column
    wanted   [ no        yes              ?     … ]           one row of verdicts a subscription
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simplebus.core.frames import Flags
from simplebus.core.limits import CHANNEL_NAMES_MAX
from simplebus.core.ring import Ring
from simplebus.core.sublist import Sublist

_VERDICTS_MIN = 16
_NO, _YES, _UNKNOWN = range(3)

Verdicts = npt.NDArray[np.uint8]
"""Shape (n,): by channel number, whether a channel is wanted."""


class Wanted:
    """What one subscription wants."""

    __slots__ = ("_names", "_sublist", "_verdicts", "patterns")

    def __init__(self, patterns: Sequence[str], names: list[str]) -> None:
        """`names` are the channels by number, of which it knows nothing yet."""
        self.patterns = tuple(dict.fromkeys(patterns))
        self._sublist: Sublist[None] = Sublist(cache_names=0, cache_values=0)
        for pattern in self.patterns:
            self._sublist.insert(pattern, None)
        self.forget(names)

    def forget(self, names: list[str]) -> None:
        """These are the channels now, and nothing is known of them."""
        self._names = names
        self._verdicts: Verdicts = np.full(max(_VERDICTS_MIN, len(names)), _UNKNOWN, np.uint8)
        self._verdicts[len(names) :] = _NO

    def add(self, numbers: list[int]) -> None:
        """It wants these channels, which are new and ascend."""
        self._reach(numbers[-1])
        self._verdicts[numbers] = _YES

    def of(self, numbers: npt.NDArray[np.uint32] | int) -> Flags:
        """Which of these channels are wanted."""
        numbers = np.atleast_1d(np.asarray(numbers, np.uint32))
        self._reach(int(numbers.max(initial=0)))
        found = self._verdicts[numbers]
        unknown = found == _UNKNOWN
        if unknown.any():
            for number in np.unique(numbers[unknown]).tolist():
                is_wanted = self._sublist.matches(self._names[number])
                self._verdicts[number] = _YES if is_wanted else _NO
            found = self._verdicts[numbers]
        wanted: Flags = found == _YES
        return wanted

    def wants(self, number: int) -> bool:
        """Whether this channel is wanted."""
        self._reach(number)
        verdict = self._verdicts[number]
        return bool(self.of(number)[0]) if verdict == _UNKNOWN else bool(verdict == _YES)

    def _reach(self, number: int) -> None:
        size = self._verdicts.size
        if number >= size:
            more = np.full(max(number + 1, 2 * size) - size, _NO, np.uint8)
            self._verdicts = np.concatenate([self._verdicts, more])


class ChannelTable:
    """Of one class."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._names = [""]
        self._numbers: dict[str, int] = {"": 0}
        self._sublist: Sublist[Wanted] = Sublist()
        self._wanted: dict[Wanted, None] = {}
        self._names_max = CHANNEL_NAMES_MAX

    def __len__(self) -> int:
        """How many channels have numbers."""
        return len(self._names) - 1

    def numbers(self, names: Sequence[str]) -> list[int]:
        """The numbers of these channels, "" being none. They hold until the next call."""
        if len(self._names) + len(names) > self._names_max:
            self._forget()
        known = self._numbers
        new = [name for name in dict.fromkeys(names) if name not in known]
        if new:
            self._add(new)
        return [known[name] for name in names]

    def add(self, patterns: Sequence[str]) -> Wanted:
        """Somebody wants what one of these patterns matches."""
        wanted = Wanted(patterns, self._names)
        self._wanted[wanted] = None
        for pattern in wanted.patterns:
            self._sublist.insert(pattern, wanted)
        return wanted

    def remove(self, wanted: Wanted) -> None:
        """Somebody is gone."""
        del self._wanted[wanted]
        for pattern in wanted.patterns:
            self._sublist.remove(pattern, wanted)

    def _add(self, names: list[str]) -> None:
        """Give channels numbers, and have who wants them know; once for all that the same want."""
        found: dict[int, tuple[tuple[Wanted, ...], list[int]]] = {}
        for name in names:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
            who = self._sublist.match(name)
            if who:
                found.setdefault(id(who), (who, []))[1].append(number)
        for who, numbers in found.values():
            for wanted in dict.fromkeys(who):
                wanted.add(numbers)

    def _forget(self) -> None:
        """Number anew, and only the channels that stored messages carry."""
        ring, column = self._ring, self._ring.columns.channels
        stored = np.zeros(len(self._names), np.bool_)
        if column is not None and len(ring):
            stored[ring.rows(ring.floor, ring.head).channels] = True
        stored[0] = True
        kept = np.flatnonzero(stored)
        if column is not None:
            renumbered = np.zeros(stored.size, np.uint32)
            renumbered[kept] = np.arange(kept.size)
            column[:] = renumbered[column]
        self._names = [self._names[number] for number in kept.tolist()]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        for wanted in self._wanted:
            wanted.forget(self._names)
        self._names_max = max(CHANNEL_NAMES_MAX, 2 * len(self._names))
