"""What a query's progress says of the buses.

Rule 1: nothing of Spark and no I/O here: a progress is what Spark shows, as a mapping or as JSON.
Rule 2: a query may have other sources, too. What is not of a bus is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from simplebus.spark.read.offsets import OffsetError, Position, load

_SOURCE = "PythonMicroBatchStream"
"""What Spark calls a source that is written in Python."""


def lag(progress: Any) -> dict[str, dict[str, int]]:
    """Messages that wait behind what a query has read, by server and class.

    `progress` is a StreamingQueryProgress (`query.lastProgress`, what a listener is given), or the
    same as a mapping or as JSON. Empty when it does not say: before a query's first batch. Raises
    ValueError for what is no progress.

    >>> lag({"sources": [{"description": "PythonMicroBatchStream@1",
    ...                   "endOffset": {"10.0.0.1:8888": {"orders": 7}},
    ...                   "latestOffset": {"10.0.0.1:8888": {"orders": 9}}}]})
    {'10.0.0.1:8888': {'orders': 2}}
    """
    found: dict[str, dict[str, int]] = {}
    for source in _sources(progress):
        if _SOURCE not in str(source.get("description", "")):
            continue
        end, heads = _offsets(source.get("endOffset")), _offsets(source.get("latestOffset"))
        for server, position in heads.items():
            waiting = found.setdefault(server, {})
            for name, head in position.classes.items():
                more = head - _read(end.get(server), position, name)
                waiting[name] = max(waiting.get(name, 0), more)
    return found


def _sources(progress: Any) -> list[Mapping[str, Any]]:
    if progress is None:  # What `lastProgress` is before the first one.
        return []
    given = progress
    if not isinstance(given, (str, bytes, Mapping)):
        given = getattr(given, "json", None)
    try:
        said = given if isinstance(given, Mapping) else json.loads(given)
        sources = said["sources"]
    except (TypeError, ValueError, KeyError):
        raise ValueError(
            "expected the progress of a streaming query, as Spark shows it, as a mapping or as "
            f"JSON; got {progress!r}"
        ) from None
    return [one if isinstance(one, Mapping) else json.loads(one.json) for one in sources]


def _offsets(given: Any) -> dict[str, Position]:
    """Offsets as a progress shows them; empty of what is of another source, or not said."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
        return load(found) if isinstance(found, Mapping) else {}
    except (ValueError, OffsetError):
        return {}


def _read(end: Position | None, heads: Position, name: str) -> int:
    """How far a class is read, in the sequences of its head: not at all of another memory."""
    if end is None or (end.bus and heads.bus and end.bus != heads.bus):
        return 0
    return min(end.classes.get(name, 0), heads.classes[name])
