"""Tests of the lag of a query, computed from Spark's progress reports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simplebus.spark import lag
from simplebus.spark.read.offsets import QueryIdentity, ServerOffsets, dump_offsets

SOURCE = "org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStream@174dec93"
END = {"a:1": ServerOffsets("m", {"7": 5, "orders": 9}), "b:2": ServerOffsets("old", {"7": 100})}
HEADS = {
    "a:1": ServerOffsets("m", {"7": 8, "orders": 9, "new": 4}),
    "b:2": ServerOffsets("anew", {"7": 3}),
}
WAITING = {"a:1": {"7": 3, "orders": 0, "new": 4}, "b:2": {"7": 3}}


def progress(end: Any, heads: Any, description: str = SOURCE) -> dict[str, Any]:
    return {"sources": [{"description": description, "endOffset": end, "latestOffset": heads}]}


class Shown:
    """Stand-in for Spark's progress class."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.json = json.dumps(fields)


@pytest.mark.parametrize("convert", [dict, json.dumps, Shown])
@pytest.mark.parametrize("offsets", [dict, json.dumps, str])
def test_lag_accepts_all_progress_formats(convert: Any, offsets: Any) -> None:
    fields = progress(
        offsets(dump_offsets(END, QueryIdentity("q", "d", END))), offsets(dump_offsets(HEADS))
    )
    assert lag(convert(fields)) == WAITING


def test_missing_progress_fields_are_omitted() -> None:
    assert lag(None) == {}
    assert lag(progress(dump_offsets(END), None)) == {}
    assert lag(progress(None, dump_offsets(HEADS)))["a:1"] == {"7": 8, "orders": 9, "new": 4}
    assert lag(progress({"topic": {"0": 4}}, {"topic": {"0": 9}}, "KafkaV2[Subscribe[x]]")) == {}
    assert lag(progress({"logOffset": 3}, "3")) == lag(progress("{", "{7")) == {}


def test_class_progress_is_that_of_the_slower_source() -> None:
    slower, faster = (dump_offsets({"a:1": ServerOffsets("m", {"7": n})}) for n in (3, 6))
    heads = dump_offsets({"a:1": ServerOffsets("m", {"7": 8})})
    sources = progress(slower, heads)["sources"] + progress(faster, heads)["sources"]
    assert lag({"sources": sources}) == lag({"sources": sources[::-1]}) == {"a:1": {"7": 5}}


@pytest.mark.parametrize("bad", [7, "x", {}, "[]"])
def test_invalid_progress_is_rejected(bad: object) -> None:
    with pytest.raises(ValueError, match="expected the progress of a streaming query"):
        lag(bad)
