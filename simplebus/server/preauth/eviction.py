"""Who has not said who they are, at one door: they make room for others where it is full.

Rule 1: who is inside never makes room. As long as there are strangers, whoever comes is let in.
Rule 2: of a place that has a good part of them, the one that has been there longest goes; where no
place has so many, the one that has been there longest of all: who says who it is does so soon.
Rule 3: it costs the same however many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from simplebus.core.errors import RemoteProtocolError

Cut = Callable[[RemoteProtocolError], object]
"""Ends a connection for a reason."""
PART = 4
"""Such a part of all is a good part."""


class Strangers:
    """Of one door."""

    def __init__(self) -> None:
        self._all: OrderedDict[Cut, str] = OrderedDict()
        """With their places. Who has been there longest comes first."""
        self._places: dict[str, OrderedDict[Cut, None]] = {}
        """Likewise. No place is empty."""
        self._sizes: dict[int, dict[str, None]] = {}
        """Places by how many they have. None is empty."""
        self._most = 0
        """How many the fullest has."""

    def __len__(self) -> int:
        return len(self._all)

    def come(self, place: str, cut: Cut) -> None:
        """One more, of a `place_of` an address. `go` when it has said who it is, or is gone."""
        self._all[cut] = place
        there = self._places.setdefault(place, OrderedDict())
        there[cut] = None
        self._resize(place, len(there) - 1, len(there))

    def go(self, cut: Cut) -> None:
        """It is none any more. One that has made room is none either."""
        if (place := self._all.pop(cut, None)) is None:
            return
        there = self._places[place]
        del there[cut]
        if not there:
            del self._places[place]
        self._resize(place, len(there) + 1, len(there))

    def _resize(self, place: str, before: int, now: int) -> None:
        if before:
            del self._sizes[before][place]
            if not self._sizes[before]:
                del self._sizes[before]
        if now:
            self._sizes.setdefault(now, {})[place] = None
        if now > self._most or self._most not in self._sizes:
            self._most = now  # It has changed by one.

    def make_room(self, error: RemoteProtocolError) -> bool:
        """Cut one off for one that comes. Returns whether there was any. The one that goes may be
        there a moment longer."""
        if not self._all:
            return False
        cut = next(iter(self._all))
        if self._most * PART > len(self._all):
            cut = next(iter(self._places[next(iter(self._sizes[self._most]))]))
        self.go(cut)
        cut(error)
        return True
