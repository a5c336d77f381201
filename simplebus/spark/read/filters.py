"""Pushed-down filters as bounds of offsets, classes and servers.

Filters are known by class name, so that Spark need not be imported; unknown ones are ignored.
Spark applies all filters again, so too wide bounds are slow but correct. Timestamps set no bounds:
they come from publishers' clocks and may be out of order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from simplebus.spark.read.offsets import SEQUENCE_MAX, Offsets, ServerOffsets


@dataclass(frozen=True, slots=True)
class FilterBounds:
    """Messages that filters select."""

    first: int = 0
    last: int = SEQUENCE_MAX
    """Messages first..last-1 of each class are selected."""
    classes: frozenset[str] | None = None
    """Classes, as the query names them; None for all."""
    servers: frozenset[str] | None = None

    def narrow(self, start: Offsets, end: Offsets) -> tuple[Offsets, Offsets]:
        """Narrow the range from `start` to `end` to these bounds. Return its new start and end."""
        begins, ends = {}, {}
        for server, position in end.items():
            before = start[server]
            firsts, lasts = {}, {}
            for name, last in position.classes.items():
                first = before.classes[name]
                is_selected = (self.classes is None or name in self.classes) and (
                    self.servers is None or server in self.servers
                )
                firsts[name] = (
                    min(max(first, self.first), max(first, last)) if is_selected else first
                )
                lasts[name] = max(firsts[name], min(last, self.last)) if is_selected else first
            begins[server] = ServerOffsets(before.memory_id, firsts)
            ends[server] = ServerOffsets(position.memory_id, lasts)
        return begins, ends


def bounds_of_filters(filters: Iterable[Any]) -> FilterBounds:
    """Return the bounds of all these filters together.

    A filter has `attribute`, the path of a column, and `value`.
    """
    found = FilterBounds()
    for filter_ in filters:
        kind = type(filter_).__name__
        column: tuple[str, ...] = getattr(filter_, "attribute", ())
        value: Any = getattr(filter_, "value", None)
        if column == ("offset",):
            found = _narrow_by_offset(found, kind, value)
        elif column in (("topic",), ("server",)) and kind in (*_EQUAL, "In"):
            values = frozenset([value] if kind in _EQUAL else value)
            if column == ("topic",):
                found = replace(found, classes=_intersect(found.classes, values))
            else:
                found = replace(found, servers=_intersect(found.servers, values))
    return found


_EQUAL = ("EqualTo", "EqualNullSafe")


def _intersect(current: frozenset[str] | None, added: frozenset[str]) -> frozenset[str]:
    return added if current is None else current & added


def _narrow_by_offset(found: FilterBounds, kind: str, value: Any) -> FilterBounds:
    values = [number for number in (value if kind == "In" else (value,)) if type(number) is int]
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
