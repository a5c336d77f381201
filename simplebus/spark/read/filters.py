"""What a job's filters say of offsets, classes and servers: less is read then.

Rule 1: nothing of Spark here: a filter is known by its name, and what is not known narrows nothing.
Rule 2: filters only leave out what Spark would throw away. It filters what is read once more, so
whoever narrows too little is slow, and not wrong.
Rule 3: times narrow nothing: a publisher's clock says nothing of the order of messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from simplebus.spark.read.offsets import SEQUENCE_MAX, Offsets, Position


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is wanted."""

    first: int = 0
    last: int = SEQUENCE_MAX
    """Messages first..last-1 of each class."""
    names: frozenset[str] | None = None
    """Classes, as the query names them; None for all."""
    servers: frozenset[str] | None = None

    def narrowed(self, start: Offsets, end: Offsets) -> tuple[Offsets, Offsets]:
        """Where to begin to read what lies from start to end and is wanted, and where to end."""
        begins, ends = {}, {}
        for server, position in end.items():
            before = start[server]
            firsts, lasts = {}, {}
            for name, last in position.classes.items():
                first = before.classes[name]
                wanted = (self.names is None or name in self.names) and (
                    self.servers is None or server in self.servers
                )
                firsts[name] = min(max(first, self.first), max(first, last)) if wanted else first
                lasts[name] = max(firsts[name], min(last, self.last)) if wanted else first
            begins[server] = Position(before.bus, firsts)
            ends[server] = Position(position.bus, lasts)
        return begins, ends


def bounds(filters: Iterable[Any]) -> Bounds:
    """What all of these want. A filter has `attribute`, the column's path, and `value`."""
    found = Bounds()
    for one in filters:
        kind = type(one).__name__
        column: tuple[str, ...] = getattr(one, "attribute", ())
        value: Any = getattr(one, "value", None)
        if column == ("offset",):
            found = _offset(found, kind, value)
        elif column in (("topic",), ("server",)) and kind in (*_EQUAL, "In"):
            values = frozenset([value] if kind in _EQUAL else value)
            if column == ("topic",):
                found = replace(found, names=_both(found.names, values))
            else:
                found = replace(found, servers=_both(found.servers, values))
    return found


_EQUAL = ("EqualTo", "EqualNullSafe")


def _both(one: frozenset[str] | None, other: frozenset[str]) -> frozenset[str]:
    return other if one is None else one & other


def _offset(found: Bounds, kind: str, value: Any) -> Bounds:
    values = [one for one in (value if kind == "In" else (value,)) if type(one) is int]
    if not values:
        return found
    low, high = min(values), max(values)
    first, last = {
        "GreaterThan": (low + 1, SEQUENCE_MAX),
        "GreaterThanOrEqual": (low, SEQUENCE_MAX),
        "LessThan": (0, high),
        "LessThanOrEqual": (0, high + 1),
        "EqualTo": (low, high + 1),
        "EqualNullSafe": (low, high + 1),
        "In": (low, high + 1),
    }.get(kind, (0, SEQUENCE_MAX))
    return replace(found, first=max(found.first, first), last=max(0, min(found.last, last)))
