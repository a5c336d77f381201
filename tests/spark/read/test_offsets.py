"""Offsets in Spark's checkpoints and in options, and the ranges that they select."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.spark.read.offsets import (
    BusExtent,
    ClassExtent,
    OffsetError,
    QueryIdentity,
    ServerOffsets,
    TimestampSpec,
    dump_offsets,
    load_offsets,
    load_query,
    merge_offsets,
    resolve_offsets,
)

MEMORIES = {
    "a:1": BusExtent("one", {"7": ClassExtent(10, 50), "orders": ClassExtent(0, 0)}),
    "b:2": BusExtent("two", {"7": ClassExtent(3, 4), "orders": ClassExtent(5, 9)}),
}

names = st.text(min_size=1, max_size=5)
servers = names.map(lambda name: f"{name}:1")
positions = st.builds(
    ServerOffsets, st.text(max_size=4), st.dictionaries(names, st.integers(0, 2**63 - 1))
)


places = st.dictionaries(servers, positions)


@given(places, st.one_of(st.none(), st.builds(QueryIdentity, names, st.text(max_size=5), places)))
def test_offsets_round_trip(offsets: dict[str, ServerOffsets], query: QueryIdentity | None) -> None:
    decoded = json.loads(json.dumps(dump_offsets(offsets, query)))
    assert load_offsets(decoded) == offsets
    assert load_query(decoded) == query


@pytest.mark.parametrize(
    "bad", [7, {}, {"id": 5}, {"id": "a", "began": 4}, {"id": "a", "durable": 1}]
)
def test_invalid_query_identity_is_rejected(bad: object) -> None:
    with pytest.raises(OffsetError, match=r"has the query .*, expected an id"):
        load_query({"query": bad})


def test_equal_offsets_are_encoded_equally() -> None:
    first = dump_offsets({"a": ServerOffsets("x", {"1": 1, "2": 2}), "b": ServerOffsets("", {})})
    second = dump_offsets({"b": ServerOffsets("", {}), "a": ServerOffsets("x", {"2": 2, "1": 1})})
    assert json.dumps(first) == json.dumps(second)


@pytest.mark.parametrize("bad", [{"a": 7}, {"a": {"7": -1}}, {"a": {"7": "x"}}, {"a": {"7": True}}])
def test_invalid_checkpoint_is_rejected(bad: dict[str, object]) -> None:
    with pytest.raises(OffsetError):
        load_offsets(bad)


def test_keywords_and_special_numbers_become_sequences() -> None:
    earliest = resolve_offsets("earliest", MEMORIES, option="startingOffsets")
    assert earliest["a:1"] == ServerOffsets("one", {"7": 10, "orders": 0})
    latest = resolve_offsets("latest", MEMORIES, option="startingOffsets")
    assert latest["b:2"] == ServerOffsets("two", {"7": 4, "orders": 9})
    requested = {"a:1": {"7": -1, "orders": -2}, "b:2": {"7": 3, "orders": 0}}
    mixed = resolve_offsets(requested, MEMORIES, option="startingOffsets")
    assert mixed["a:1"].classes == {"7": 50, "orders": 0}
    assert mixed["b:2"].classes == {"7": 3, "orders": 0}  # Below the floor: the planner's business.


@pytest.mark.parametrize(
    ("requested", "sentence"),
    [
        ({"a:1": {"7": 1}}, "has no entry for class orders at a:1"),
        (
            {"c:3": {"7": 1}},
            r"names the server c:3, which is not read; expected one of a:1, b:2 and its classes, "
            r'as in \{"a:1": \{"7": 1\}\}',
        ),
        ({"a:1": {"8": 1}}, "class 8 at a:1, which is not subscribed to; subscribe is 7, orders"),
        (
            {"a:1": {"7": 51, "orders": 0}, "b:2": {"7": 3, "orders": 5}},
            "is 51 for class 7 at a:1, beyond its end: the next message there will be 50",
        ),
    ],
)
def test_invalid_offsets_are_rejected(requested: dict[str, dict[str, int]], sentence: str) -> None:
    with pytest.raises(OffsetError, match=sentence):
        resolve_offsets(requested, MEMORIES, option="startingOffsets")


def test_times_are_for_all_classes_or_per_class() -> None:
    assert TimestampSpec("startingTimestamp", 5, True).time_for("a:1", "7") == 5
    spec = TimestampSpec("startingOffsetsByTimestamp", {"a:1": {"7": 5}}, True)
    assert spec.time_for("a:1", "7") == 5
    with pytest.raises(
        OffsetError, match="ByTimestamp has no entry for class 8 at a:1; expected mil"
    ):
        spec.time_for("a:1", "8")
    spec.check_names(["a:1"], ["7", "8"])
    with pytest.raises(
        OffsetError, match="names the server a:1, which is not read; expected one of b:2"
    ):
        spec.check_names(["b:2"], ["7"])
    with pytest.raises(OffsetError, match="class 7 at a:1, which is not subscribed to"):
        spec.check_names(["a:1"], ["8"])


def test_time_after_last_message_is_error_or_end() -> None:
    with pytest.raises(OffsetError, match=r"startingTimestamp is 1000 \(1970-01-01T00:00:01.000"):
        TimestampSpec("startingTimestamp", 1000, True).offset_past_end("a:1", "7")
    with pytest.raises(OffsetError, match=r"\(5138-11-16T09:46:39.999\+00:00\)"):
        TimestampSpec("startingTimestamp", 99_999_999_999_999, True).offset_past_end("a:1", "7")
    assert TimestampSpec("startingTimestamp", 1000, False).offset_past_end("a:1", "7") == -1


def test_added_classes_begin_at_their_first_stored_message() -> None:
    before = {
        "a:1": ServerOffsets("one", {"7": 20, "gone": 3}),
        "z:9": ServerOffsets("nine", {"7": 1}),
    }
    found = merge_offsets(before, MEMORIES)
    assert found == {
        "a:1": ServerOffsets("one", {"7": 20, "orders": 0}),
        "b:2": ServerOffsets("two", {"7": 3, "orders": 5}),
    }
