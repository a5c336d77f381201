"""Conversion of rows to messages: the sink's columns and their checks.

Columns are checked before any row is read. Consecutive rows with equal metadata (all columns but
value) form one run, which is published in one piece.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from simplebus.client.message_builder import header_pairs, to_milliseconds
from simplebus.core.channel.pattern import check_name
from simplebus.core.errors import BusError
from simplebus.core.limits import CLASS_ID_MAX
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.spark.json_payloads.encoder import encode_json

_TEXT = ("string",)
_BYTES = ("binary", "string")
_HEADERS = (
    "array<struct<key:string,value:binary>>",
    "array<struct<key:string,value:string>>",
    "map<string,string>",
)
SINK_COLUMNS: dict[str, tuple[str, ...]] = {
    "value": _BYTES,
    "class": ("string", "int", "bigint", "smallint"),
    "topic": _TEXT,
    "channel": _TEXT,
    "key": _BYTES,
    "headers": _HEADERS,
    "expiry": ("double", "float", "int", "bigint"),
}
"""Columns of the sink with their allowed Spark types. `topic` is an alias of class."""


class RowError(ValueError):
    """Rows that cannot be published. The text names the column or row and the expected value."""


def check_columns(types: Mapping[str, str], *, has_class: bool, is_json: bool = False) -> None:
    """Raise RowError if rows with these columns cannot be messages.

    Args:
        types: Spark type by column name.
        has_class: True if the option class names the class of all rows.
        is_json: True if values are encoded as JSON, so their type does not matter here.
    """
    for name, kind in types.items():
        expected = SINK_COLUMNS.get(name)
        if expected is None:
            similar = difflib.get_close_matches(name, SINK_COLUMNS, n=1, cutoff=0.6)
            hint = (
                f"did you mean {similar[0]}?" if similar else f"expected {', '.join(SINK_COLUMNS)}"
            )
            raise RowError(f"unknown column {name}; {hint}")
        if kind not in expected and not (is_json and name == "value"):
            raise RowError(
                f"the column {name} is {kind}, expected {' or '.join(expected)}"
                + _conversion_hint(name, kind, expected)
            )
    if "value" not in types:
        raise RowError(f"the column value is missing; there are {', '.join(types)}")
    if "class" in types and "topic" in types:
        raise RowError("class and topic are two names of one column; drop one of them")
    if not has_class and "class" not in types and "topic" not in types:
        raise RowError("rows have no class; expected a column class or topic, or the option class")


def _conversion_hint(name: str, kind: str, expected: Sequence[str]) -> str:
    if "string" not in expected:
        return ""
    is_nested = "<" in kind
    hint = f"; convert it by {f'to_json({name})' if is_nested else f'cast({name} as string)'}"
    return f"{hint}, or set the option valueFormat to json" if name == "value" else hint


@dataclass(frozen=True, slots=True)
class RowRun:
    """Consecutive messages with equal class and metadata."""

    class_: str
    payloads: list[bytes]
    envelope: Envelope | None


def message_runs(
    batch: pa.RecordBatch, first: int, *, class_: str, channel: str, is_json: bool = False
) -> Iterator[RowRun]:
    """Yield the rows of a batch as runs of messages, in order.

    Args:
        batch: Rows with the sink's columns.
        first: Index within the task of the batch's first row, for error messages.
        class_: Class of rows without one.
        channel: Channel of rows without one.
        is_json: True to encode values as JSON.

    Raises:
        RowError: A row has no value or class, or its metadata is invalid.
    """
    values = batch.column("value")
    if values.null_count:
        index = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise RowError(f"row {first + index} has no value, expected bytes")
    payloads = encode_json(values) if is_json else values.cast(pa.binary()).to_pylist()
    metadata = {
        name: batch.column(name)
        for name in batch.schema.names
        if name != "value" and batch.column(name).null_count < batch.num_rows
    }
    starts = _run_starts(metadata, batch.num_rows)
    for begin, end in pairwise([*starts, batch.num_rows]):
        row = {name: column[begin].as_py() for name, column in metadata.items()}
        named = row.get("class", row.get("topic"))
        if isinstance(named, int) and not 0 <= named <= CLASS_ID_MAX:
            raise RowError(
                f"row {first + begin} has the class {named}, expected an id from 0 to "
                f"{CLASS_ID_MAX}, or a name"
            )
        named = class_ if named is None else str(named)
        if not named:
            raise RowError(f"row {first + begin} has no class, and the option class is not set")
        try:
            envelope = _envelope(row, channel)
        except (ValueError, TypeError, BusError) as error:
            raise RowError(f"row {first + begin}: {error}") from None
        yield RowRun(named, payloads[begin:end], envelope)


def _run_starts(metadata: Mapping[str, pa.Array], count: int) -> list[int]:
    """Return the indexes of rows whose metadata differs from the row before, including row 0."""
    changes = np.zeros(count, np.bool_)
    changes[:1] = True
    for column in metadata.values():
        if pa.types.is_nested(column.type):  # Headers are not compared: each row is a run.
            changes[:] = True
            break
        codes = column.dictionary_encode(null_encoding="encode").indices.to_numpy()
        changes[1:] |= codes[1:] != codes[:-1]
    found: list[int] = np.flatnonzero(changes).tolist()
    return found


def _envelope(row: Mapping[str, Any], default_channel: str) -> Envelope | None:
    """Return the envelope of a row; None if it has no metadata."""
    channel = default_channel if row.get("channel") is None else row["channel"]
    key, headers, expiry = (row.get(name) for name in ("key", "headers", "expiry"))
    if not channel and not key and not headers and expiry is None:
        return None
    pairs = [
        (header["key"], header["value"]) if isinstance(header, dict) else header
        for header in headers or ()
    ]
    texts = [(name, _decode_text(value)) for name, value in pairs]
    return Envelope(
        channel=check_name(channel) if channel else "",
        key=key.encode() if isinstance(key, str) else key or b"",
        headers=header_pairs(texts),
        expires_ms=None if expiry is None else to_milliseconds("expiry", expiry),
    )


def _decode_text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
