"""Filters reduce the messages that are read, and never exclude a matching message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.spark.read.filters import bounds_of_filters
from simplebus.spark.read.offsets import ServerOffsets

KINDS = {
    "EqualTo": lambda have, value: have == value,
    "EqualNullSafe": lambda have, value: have == value,
    "In": lambda have, value: have in value,
    "GreaterThan": lambda have, value: have > value,
    "GreaterThanOrEqual": lambda have, value: have >= value,
    "LessThan": lambda have, value: have < value,
    "LessThanOrEqual": lambda have, value: have <= value,
}


@dataclass
class _Filter:
    attribute: tuple[str, ...]
    value: Any = None


MADE = {name: type(name, (_Filter,), {}) for name in (*KINDS, "IsNotNull", "StringContains")}

START = {
    "a:1": ServerOffsets("m", {"7": 3, "orders": 0}),
    "b:2": ServerOffsets("n", {"7": 9, "orders": 5}),
}
END = {
    "a:1": ServerOffsets("m", {"7": 9, "orders": 4}),
    "b:2": ServerOffsets("n", {"7": 9, "orders": 30}),
}
ROWS = [
    {"server": server, "topic": name, "offset": n}
    for server, position in START.items()
    for name, first in position.classes.items()
    for n in range(first, END[server].classes[name])
]

offsets = st.integers(-5, 40)
texts = st.sampled_from(["7", "orders", "a:1", "b:2", "x"])
filters = st.one_of(
    st.tuples(st.sampled_from(sorted(set(KINDS) - {"In"})), st.just("offset"), offsets),
    st.tuples(st.just("In"), st.just("offset"), st.lists(offsets, min_size=1).map(tuple)),
    st.tuples(st.just("EqualTo"), st.sampled_from(["topic", "server"]), texts),
    st.tuples(st.just("In"), st.sampled_from(["topic", "server"]), st.lists(texts).map(tuple)),
)


@given(st.lists(filters, max_size=4))
def test_exact_filters_read_only_matching_messages(
    pushed_filters: list[tuple[str, str, Any]],
) -> None:
    found = bounds_of_filters(
        [MADE[kind]((column,), value) for kind, column, value in pushed_filters]
    )
    start, end = found.narrow(START, END)
    read = [
        row
        for row in ROWS
        if start[row["server"]].classes[row["topic"]]
        <= row["offset"]
        < end[row["server"]].classes[row["topic"]]
    ]
    expected_rows = [
        row
        for row in ROWS
        if all(KINDS[kind](row[column], value) for kind, column, value in pushed_filters)
    ]
    assert [row for row in expected_rows if row not in read] == []
    if not any(kind == "In" and column == "offset" for kind, column, _ in pushed_filters):
        assert read == expected_rows
    for server, position in START.items():
        for name, first in position.classes.items():
            begin, last = start[server].classes[name], end[server].classes[name]
            assert first <= begin <= last <= END[server].classes[name]
            assert start[server].memory_id == position.memory_id


@pytest.mark.parametrize(
    "unknown_filter",
    [
        MADE["StringContains"](("topic",), "7"),
        MADE["IsNotNull"](("offset",)),
        MADE["GreaterThan"](("timestamp",), 5),
        MADE["GreaterThan"](("offset",), None),
        object(),
    ],
)
def test_unknown_filters_select_everything(unknown_filter: object) -> None:
    assert bounds_of_filters([unknown_filter]).narrow(START, END) == (START, END)
