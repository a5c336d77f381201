"""Lag of a query, computed from its progress report.

A report is a mapping or JSON, as Spark shows it. Sources other than simplebus are ignored.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from simplebus.spark.read.offsets import OffsetError, ServerOffsets, load_offsets

_SOURCES = ("PythonMicroBatchStream", "SimplebusMicroBatchStream")
"""Names in a progress report: Spark's for a source in Python, and the name of the connector."""


def lag(progress: Any) -> dict[str, dict[str, int]]:
    """Return how many messages a query has not read yet, by server and class.

    Args:
        progress: A StreamingQueryProgress (`query.lastProgress`, or a listener's argument), or the
            same as a mapping or as JSON.

    Returns:
        Message counts. Empty if the progress has no offsets, as before a query's first batch.

    Raises:
        ValueError: `progress` is not a progress report.

    >>> lag({"sources": [{"description": "PythonMicroBatchStream@1",
    ...                   "endOffset": {"10.0.0.1:8888": {"orders": 7}},
    ...                   "latestOffset": {"10.0.0.1:8888": {"orders": 9}}}]})
    {'10.0.0.1:8888': {'orders': 2}}
    """
    found: dict[str, dict[str, int]] = {}
    for source in _sources(progress):
        if not any(name in str(source.get("description", "")) for name in _SOURCES):
            continue
        end, heads = _offsets(source.get("endOffset")), _offsets(source.get("latestOffset"))
        for server, position in heads.items():
            waiting = found.setdefault(server, {})
            for name, head in position.classes.items():
                more = head - _sequence_read(end.get(server), position, name)
                waiting[name] = max(waiting.get(name, 0), more)
    return found


def _sources(progress: Any) -> list[Mapping[str, Any]]:
    if progress is None:  # `lastProgress` before the first report.
        return []
    report_or_json = progress
    if not isinstance(report_or_json, (str, bytes, Mapping)):
        report_or_json = getattr(report_or_json, "json", None)
    try:
        report = (
            report_or_json if isinstance(report_or_json, Mapping) else json.loads(report_or_json)
        )
        sources = report["sources"]
    except (TypeError, ValueError, KeyError):
        raise ValueError(
            "expected the progress of a streaming query, as Spark shows it, as a mapping or as "
            f"JSON; got {progress!r}"
        ) from None
    return [
        source if isinstance(source, Mapping) else json.loads(source.json) for source in sources
    ]


def _offsets(offsets: Any) -> dict[str, ServerOffsets]:
    """Return the offsets in a progress report; empty for another source."""
    try:
        found = _parse(offsets) if isinstance(offsets, str) else offsets
        return load_offsets(found) if isinstance(found, Mapping) else {}
    except (ValueError, SyntaxError, OffsetError):
        return {}


def _parse(text: str) -> Any:
    """Parse JSON, or the text of a Python dict, which PySpark 4.1 has in place of the dict."""
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


def _sequence_read(end: ServerOffsets | None, heads: ServerOffsets, name: str) -> int:
    """Return the next sequence to read; 0 if the offsets belong to another memory."""
    if end is None or (end.memory_id and heads.memory_id and end.memory_id != heads.memory_id):
        return 0
    return min(end.classes.get(name, 0), heads.classes[name])
