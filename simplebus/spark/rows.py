"""Rows as messages: which columns a sink takes, and what becomes of them.

Rule 1: nothing of Spark and no I/O here. Columns are checked before the first row is looked at: an
error names the column, what it is and what was expected.
Rule 2: rows are told apart by what is beside the value. Those that follow one another and have the
same are handed over in one piece, in their order.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from simplebus.client.message_builder import to_milliseconds, header_pairs
from simplebus.core.channel.pattern import check_name
from simplebus.core.errors import BusError
from simplebus.core.limits import CLASS_ID_MAX
from simplebus.core.protocol.envelope_batch import Envelope

_TEXT = ("string",)
_BYTES = ("binary", "string")
_HEADERS = (
    "array<struct<key:string,value:binary>>",
    "array<struct<key:string,value:string>>",
    "map<string,string>",
)
COLUMNS: dict[str, tuple[str, ...]] = {
    "value": _BYTES,
    "class": ("string", "int", "bigint", "smallint"),
    "topic": _TEXT,
    "channel": _TEXT,
    "key": _BYTES,
    "headers": _HEADERS,
    "expiry": ("double", "float", "int", "bigint"),
}
"""What a sink takes, by column: Spark's names of types. `topic` is another word for class."""


class RowError(ValueError):
    """Rows that cannot be published. Says which column or row, what came and what was expected."""


def check_columns(types: Mapping[str, str], *, has_class: bool) -> None:
    """Whether rows with these columns can be messages. Raises RowError."""
    for name, kind in types.items():
        expected = COLUMNS.get(name)
        if expected is None:
            near = difflib.get_close_matches(name, COLUMNS, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COLUMNS)}"
            raise RowError(f"a message has nothing for the column {name}; {hint}")
        if kind not in expected:
            raise RowError(f"the column {name} is {kind}, expected {' or '.join(expected)}")
    if "value" not in types:
        raise RowError(f"the column value is missing; there are {', '.join(types)}")
    if "class" in types and "topic" in types:
        raise RowError("class and topic are the same, and there is a column for each; drop one")
    if not has_class and "class" not in types and "topic" not in types:
        raise RowError("nothing says which class rows are of: neither a column nor the option")


@dataclass(frozen=True, slots=True)
class Some:
    """Messages that follow one another and have the same beside them."""

    class_: str
    payloads: list[bytes]
    envelope: Envelope | None


def messages(batch: pa.RecordBatch, first: int, *, class_: str, channel: str) -> Iterator[Some]:
    """A batch's rows, the first of which is row `first` of its task. Class and channel are those of
    rows that do not say.

    Raises RowError.
    """
    values = batch.column("value")
    if values.null_count:
        at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise RowError(f"row {first + at} has no value, expected bytes")
    payloads = values.cast(pa.binary()).to_pylist()
    beside = {
        name: batch.column(name)
        for name in batch.schema.names
        if name != "value" and batch.column(name).null_count < batch.num_rows
    }
    starts = _starts(beside, batch.num_rows)
    for begin, end in pairwise([*starts, batch.num_rows]):
        about = {name: column[begin].as_py() for name, column in beside.items()}
        named = about.get("class", about.get("topic"))
        if isinstance(named, int) and not 0 <= named <= CLASS_ID_MAX:
            raise RowError(
                f"row {first + begin} has the class {named}, expected an id from 0 to "
                f"{CLASS_ID_MAX}, or a name"
            )
        named = class_ if named is None else str(named)
        if not named:
            raise RowError(f"row {first + begin} has no class, and the option class says none")
        try:
            envelope = _envelope(about, channel)
        except (ValueError, TypeError, BusError) as error:
            raise RowError(f"row {first + begin}: {error}") from None
        yield Some(named, payloads[begin:end], envelope)


def _starts(beside: Mapping[str, pa.Array], count: int) -> list[int]:
    """Rows that have something else beside them than the row before; the first one, too."""
    changes = np.zeros(count, np.bool_)
    changes[:1] = True
    for column in beside.values():
        if pa.types.is_nested(column.type):  # Headers are not compared.
            changes[:] = True
            break
        codes = column.dictionary_encode(null_encoding="encode").indices.to_numpy()
        changes[1:] |= codes[1:] != codes[:-1]
    found: list[int] = np.flatnonzero(changes).tolist()
    return found


def _envelope(about: Mapping[str, Any], otherwise: str) -> Envelope | None:
    """What goes with a message; None for nothing."""
    channel = otherwise if about.get("channel") is None else about["channel"]
    key, headers, expiry = (about.get(name) for name in ("key", "headers", "expiry"))
    if not channel and not key and not headers and expiry is None:
        return None
    given = [(one["key"], one["value"]) if isinstance(one, dict) else one for one in headers or ()]
    texts = [(name, _text(value)) for name, value in given]
    return Envelope(
        channel=check_name(channel) if channel else "",
        key=key.encode() if isinstance(key, str) else key or b"",
        headers=header_pairs(texts),
        expires_ms=None if expiry is None else to_milliseconds("expiry", expiry),
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
