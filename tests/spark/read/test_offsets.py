"""Offsets: as Spark keeps them, as a user writes them, and what is to be read of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.spark.read.offsets import (
    ClassExtent,
    BusExtent,
    OffsetError,
    Position,
    Query,
    Times,
    dump,
    load,
    load_query,
    merge,
    resolve,
)

MEMORIES = {
    "a:1": BusExtent("one", {"7": ClassExtent(10, 50), "orders": ClassExtent(0, 0)}),
    "b:2": BusExtent("two", {"7": ClassExtent(3, 4), "orders": ClassExtent(5, 9)}),
}

names = st.text(min_size=1, max_size=5)
servers = names.map(lambda name: f"{name}:1")
positions = st.builds(
    Position, st.text(max_size=4), st.dictionaries(names, st.integers(0, 2**63 - 1))
)


places = st.dictionaries(servers, positions)


@given(places, st.one_of(st.none(), st.builds(Query, names, st.text(max_size=5), places)))
def test_what_was_kept_is_read_again(offsets: dict[str, Position], query: Query | None) -> None:
    kept = json.loads(json.dumps(dump(offsets, query)))
    assert load(kept) == offsets
    assert load_query(kept) == query


@pytest.mark.parametrize(
    "bad", [7, {}, {"id": 5}, {"id": "a", "began": 4}, {"id": "a", "durable": 1}]
)
def test_a_query_that_says_nothing_sensible_of_itself_is_refused(bad: object) -> None:
    with pytest.raises(OffsetError, match="of its query, expected an id"):
        load_query({"query": bad})


def test_the_same_offsets_look_the_same() -> None:
    one = dump({"a": Position("x", {"1": 1, "2": 2}), "b": Position("", {})})
    other = dump({"b": Position("", {}), "a": Position("x", {"2": 2, "1": 1})})
    assert json.dumps(one) == json.dumps(other)


@pytest.mark.parametrize("bad", [{"a": 7}, {"a": {"7": -1}}, {"a": {"7": "x"}}, {"a": {"7": True}}])
def test_a_checkpoint_that_is_none_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(OffsetError):
        load(bad)


def test_words_and_special_numbers_become_sequences() -> None:
    earliest = resolve("earliest", MEMORIES, option="startingOffsets")
    assert earliest["a:1"] == Position("one", {"7": 10, "orders": 0})
    latest = resolve("latest", MEMORIES, option="startingOffsets")
    assert latest["b:2"] == Position("two", {"7": 4, "orders": 9})
    wanted = {"a:1": {"7": -1, "orders": -2}, "b:2": {"7": 3, "orders": 0}}
    mixed = resolve(wanted, MEMORIES, option="startingOffsets")
    assert mixed["a:1"].classes == {"7": 50, "orders": 0}
    assert mixed["b:2"].classes == {"7": 3, "orders": 0}  # Below the floor: the planner's business.


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"a:1": {"7": 1}}, "says nothing of class orders at a:1"),
        ({"c:3": {"7": 1}}, "speaks of c:3, which is not read; servers are a:1, b:2"),
        ({"a:1": {"8": 1}}, "class 8 at a:1, which is not subscribed to; subscribe is 7, orders"),
        (
            {"a:1": {"7": 51, "orders": 0}, "b:2": {"7": 3, "orders": 5}},
            "is 51 for class 7 at a:1, beyond its end: the next message there will be 50",
        ),
    ],
)
def test_offsets_that_cannot_be_are_told(wanted: dict[str, dict[str, int]], sentence: str) -> None:
    with pytest.raises(OffsetError, match=sentence):
        resolve(wanted, MEMORIES, option="startingOffsets")


def test_times_are_for_all_classes_or_for_each() -> None:
    assert Times("startingTimestamp", 5, True).of("a:1", "7") == 5
    some = Times("startingOffsetsByTimestamp", {"a:1": {"7": 5}}, True)
    assert some.of("a:1", "7") == 5
    with pytest.raises(
        OffsetError, match="ByTimestamp says nothing of class 8 at a:1; expected mil"
    ):
        some.of("a:1", "8")
    some.check(["a:1"], ["7", "8"])
    with pytest.raises(OffsetError, match="speaks of a:1, which is not read; servers are b:2"):
        some.check(["b:2"], ["7"])
    with pytest.raises(OffsetError, match="class 7 at a:1, which is not subscribed to"):
        some.check(["a:1"], ["8"])


def test_a_time_behind_the_last_message_is_an_error_or_the_end() -> None:
    with pytest.raises(OffsetError, match=r"startingTimestamp is 1000 \(1970-01-01T00:00:01.000"):
        Times("startingTimestamp", 1000, True).missed("a:1", "7")
    assert Times("startingTimestamp", 1000, False).missed("a:1", "7") == -1


def test_a_bus_and_a_class_that_were_added_begin_at_their_floor_and_what_went_is_left_out() -> None:
    before = {"a:1": Position("one", {"7": 20, "gone": 3}), "z:9": Position("nine", {"7": 1})}
    found = merge(before, MEMORIES)
    assert found == {
        "a:1": Position("one", {"7": 20, "orders": 0}),
        "b:2": Position("two", {"7": 3, "orders": 5}),
    }
