"""Who has not said who they are, at one door: they make room for others where it is full.

Rule 1: who is inside never makes room. As long as there are strangers, whoever comes is let in.
Rule 2: of the place with most of them, the one that has been there longest goes. One who comes from
a place that has as many takes the room of its own.
Rule 3: where nobody is asked who it is, nobody is a stranger.
"""

from __future__ import annotations

from collections.abc import Callable

from simplebus.core.errors import RemoteProtocolError

Cut = Callable[[RemoteProtocolError], object]
"""Ends a connection for a reason."""


class Strangers:
    """Of one door."""

    def __init__(self) -> None:
        self._places: dict[str, dict[Cut, None]] = {}
        """Who has been there longest comes first. No place is empty."""

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def come(self, place: str, cut: Cut) -> None:
        """One more, of a `place_of` an address. `go` when it has said who it is, or is gone."""
        self._places.setdefault(place, {})[cut] = None

    def go(self, place: str, cut: Cut) -> None:
        """It is none any more. One that has made room is none either."""
        there = self._places.get(place, {})
        there.pop(cut, None)
        if not there:
            self._places.pop(place, None)

    def make_room(self, place: str, error: RemoteProtocolError) -> bool:
        """Cut one off for one that comes from this place. Returns whether there was any. The one
        that goes may be there a moment longer."""
        if not self._places:
            return False
        fullest = max(self._places, key=lambda each: len(self._places[each]))
        if len(self._places.get(place, ())) == len(self._places[fullest]):
            fullest = place
        cut = next(iter(self._places[fullest]))
        self.go(fullest, cut)
        cut(error)
        return True
