"""Conversion of rows to messages, and the errors for rows that cannot be published."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.spark.rows import RowError, RowRun, check_columns, message_runs


def row_runs(**columns: Any) -> list[RowRun]:
    batch = pa.RecordBatch.from_pydict(columns)
    return list(message_runs(batch, 100, class_="7", channel=""))


def test_plain_rows_form_one_batch() -> None:
    assert row_runs(value=[b"a", b"b", b""]) == [RowRun("7", [b"a", b"b", b""], None)]
    assert row_runs(value=["a", "é"]) == [RowRun("7", [b"a", "é".encode()], None)]


def test_rows_with_equal_fields_form_one_batch_in_order() -> None:
    found = row_runs(
        value=[b"a", b"b", b"c", b"d"],
        channel=["x.y", "x.y", None, "x.y"],
        **{"class": [1, 1, 1, 2]},
    )
    on_channel = Envelope(channel="x.y")
    assert found == [
        RowRun("1", [b"a", b"b"], on_channel),
        RowRun("1", [b"c"], None),
        RowRun("2", [b"d"], on_channel),
    ]


def test_all_fields_are_published() -> None:
    found = row_runs(
        value=[b"a"],
        topic=["orders"],
        key=["k"],
        headers=[[{"key": "h", "value": b"v"}]],
        expiry=[1.5],
    )
    envelope = Envelope(key=b"k", headers=(("h", "v"),), expires_ms=1500)
    assert found == [RowRun("orders", [b"a"], envelope)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "1", "2"]),
            st.sampled_from([None, "x", "y.z"]),
            st.sampled_from([None, b"", b"k"]),
            st.sampled_from([None, 0.5]),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_rows_keep_content_and_order(rows: list[Any], with_headers: bool) -> None:
    columns = list(zip(*rows, strict=True)) if rows else [[]] * 4
    kinds = [pa.string(), pa.string(), pa.binary(), pa.float64()]
    names = ["class", "channel", "key", "expiry"]
    beside = {n: pa.array(c, k) for n, c, k in zip(names, columns, kinds, strict=True)}
    if with_headers:
        beside["headers"] = pa.array([None, []] * len(rows), pa.map_(pa.string(), pa.string()))
        beside["headers"] = beside["headers"][: len(rows)]
    found = row_runs(value=pa.array([b"%d" % n for n in range(len(rows))], pa.binary()), **beside)
    each = [(run.class_, payload, run.envelope) for run in found for payload in run.payloads]
    expected = []
    for n, (class_, channel, key, expiry) in enumerate(rows):
        envelope = Envelope(
            channel=channel or "", key=key or b"", expires_ms=None if expiry is None else 500
        )
        expected.append((class_ or "7", b"%d" % n, None if envelope == Envelope() else envelope))
    assert each == expected


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"value": [b"a", None]}, "row 101 has no value"),
        ({"value": [b"a", b"b"], "channel": ["a", "a..b"]}, "row 101: .*a..b"),
        ({"value": [b"a"], "expiry": [-1.0]}, "row 100: expiry must be seconds from 0 on"),
        ({"value": [b"a"], "headers": [[{"key": "h", "value": b"\xff"}]]}, "row 100.*utf-8"),
        ({"value": [b"a", b"b"], "class": ["1", ""]}, "row 101 has no class"),
        ({"value": [b"a", b"b"], "class": [1, -1]}, "row 101 has the class -1, expected an id"),
        ({"value": [b"a"], "class": [65_536]}, "row 100 has the class 65536, expected an id"),
    ],
)
def test_unpublishable_row_is_reported(columns: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RowError, match=sentence):
        row_runs(**columns)


@pytest.mark.parametrize(
    ("types", "sentence"),
    [
        ({"valeu": "binary"}, "unknown column valeu; did you mean value?"),
        ({"value": "binary", "offset": "bigint"}, "column offset; expected value, class"),
        (
            {"value": "int"},
            r"value is int, expected binary or string; convert it by cast\(value as string\)",
        ),
        ({"value": "struct<a:int>"}, r"or string; convert it by to_json\(value\)"),
        ({"value": "binary", "headers": "string"}, "headers is string, expected array<"),
        ({"key": "binary"}, "the column value is missing; there are key"),
        ({"value": "binary", "class": "int", "topic": "string"}, "class and topic are two names"),
    ],
)
def test_unknown_columns_are_reported(types: dict[str, str], sentence: str) -> None:
    with pytest.raises(RowError, match=sentence):
        check_columns(types, has_class=True)


def test_class_is_required() -> None:
    check_columns({"value": "string", "topic": "string"}, has_class=False)
    with pytest.raises(RowError, match="rows have no class; expected"):
        check_columns({"value": "string"}, has_class=False)
