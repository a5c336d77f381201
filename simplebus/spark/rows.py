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
from itertools import groupby
from typing import Any

import pyarrow as pa

from simplebus.client.outbound import milliseconds, pairs
from simplebus.core.channels import check_name
from simplebus.core.envelope import Envelope

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
    "expires": ("double", "float", "int", "bigint"),
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
    names = batch.schema.names
    payloads = _bytes(batch, "value")
    if None in payloads:
        raise RowError(f"row {first + payloads.index(None)} has no value, expected bytes")
    of_class = "class" if "class" in names else "topic"
    beside = zip(
        _texts(batch, of_class, class_),
        _texts(batch, "channel", channel),
        _bytes(batch, "key"),
        _headers(batch),
        _column(batch, "expires"),
        strict=True,
    )
    at = 0
    for about, rows in groupby(beside):
        count = sum(1 for _ in rows)
        if not about[0]:
            raise RowError(f"row {first + at} has no class, and the option class says none")
        try:
            envelope = _envelope(*about[1:])
        except (ValueError, TypeError) as error:
            raise RowError(f"row {first + at}: {error}") from None
        yield Some(about[0], payloads[at : at + count], envelope)
        at += count


def _column(batch: pa.RecordBatch, name: str) -> list[Any]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    found: list[Any] = batch.column(name).to_pylist()
    return found


def _texts(batch: pa.RecordBatch, name: str, otherwise: str) -> list[str]:
    """Texts, with something for those that are not there."""
    if name not in batch.schema.names:
        return [otherwise] * batch.num_rows
    found: list[str] = batch.column(name).cast(pa.string()).fill_null(otherwise).to_pylist()
    return found


def _bytes(batch: pa.RecordBatch, name: str) -> list[Any]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    found: list[Any] = batch.column(name).cast(pa.binary()).to_pylist()
    return found


def _headers(batch: pa.RecordBatch) -> list[Any]:
    """As tuples of pairs, which can be compared."""
    return [_pairs(one) for one in _column(batch, "headers")]


def _pairs(given: list[Any] | None) -> tuple[tuple[str, bytes | str], ...] | None:
    if not given:
        return None
    return tuple((one["key"], one["value"]) if isinstance(one, dict) else one for one in given)


def _envelope(
    channel: str,
    key: bytes | None,
    headers: tuple[tuple[str, bytes | str], ...] | None,
    expires: float | None,
) -> Envelope | None:
    if not channel and not key and not headers and expires is None:
        return None
    texts = [
        (name, value.decode() if isinstance(value, bytes) else value)
        for name, value in headers or ()
    ]
    return Envelope(
        channel=check_name(channel) if channel else "",
        key=key or b"",
        headers=pairs(texts),
        expires_ms=None if expires is None else milliseconds("expires", expires),
    )
