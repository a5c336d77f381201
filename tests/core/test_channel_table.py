"""Channels as numbers, and who wants which, against patterns matched one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.channel_oracle import is_match
from core.talk import batch_of
from core.talk2 import enveloped
from simplebus.core import channel_table
from simplebus.core.channel_table import ChannelTable, Wanted
from simplebus.core.columns import Rows
from simplebus.core.ring import MemoryBudget, Ring

NAMES = ["", "a", "b", "a.x", "a.y", "c", "d", "e", "f"]
PATTERNS = ["#", "a", "a.*", ">", "c", "*", "x.y"]


def ring() -> Ring:
    return Ring(class_id=1, messages_max=1 << 16, bytes_max=1 << 22, budget=MemoryBudget(1 << 22))


def store(table: ChannelTable, there: Ring, names: list[str]) -> None:
    """One message on each of these channels, as the store does it."""
    numbers = np.array(table.numbers(names), np.uint32)
    frames = [enveloped(1, 0, b"\0")] * len(names)
    assert there.append(batch_of(*frames), 0, Rows(len(names), numbers)) == len(names)


steps = st.one_of(
    st.tuples(st.just("store"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=5)),
    st.tuples(st.just("want"), st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("look"), st.integers(0, 5)),
)


@given(st.lists(steps, max_size=30), st.sampled_from([3, 5, 1000]))
def test_who_wants_what_is_what_the_patterns_say(
    script: list[tuple[str, list[str] | int]], most: int
) -> None:
    there = ring()
    stored: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_table, "CHANNEL_NAMES_MAX", most)
        table = ChannelTable(there)
        wanted: list[Wanted] = []
        for what, value in script:
            if isinstance(value, list):
                if what == "store":
                    store(table, there, value)
                    stored += value
                else:
                    wanted.append(table.add(value))
            elif what == "drop" and wanted:
                table.remove(wanted.pop(value % len(wanted)))
            elif what == "release":
                there.release(min(there.head, there.floor + value))
            elif wanted and len(there):
                look(wanted[value % len(wanted)], there, stored)
        for each in wanted:
            if len(there):
                look(each, there, stored)


def look(wanted: Wanted, there: Ring, stored: list[str]) -> None:
    channels = there.rows(there.floor, there.head).channels
    expected = [
        any(is_match(pattern, name) for pattern in wanted.patterns)
        for name in stored[there.floor : there.head]
    ]
    found = np.broadcast_to(wanted.of(channels), len(there))
    assert found.tolist() == expected


def test_names_that_nothing_stored_carries_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_table, "CHANNEL_NAMES_MAX", 10)
    there = ring()
    table = ChannelTable(there)
    for number in range(100):
        store(table, there, [f"n{number}"])
        there.release(max(0, there.head - 3))
    assert len(table) <= 10


def test_who_wants_many_new_channels_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    add = Wanted.add

    def counted(self: Wanted, numbers: list[int]) -> None:
        told.append(self)
        add(self, numbers)

    monkeypatch.setattr(Wanted, "add", counted)
    there = ring()
    table = ChannelTable(there)
    beginnings = [".".join(steps) for steps in product("a*", repeat=8)]
    wanted = [table.add([f"{begin}.{end}" for begin in beginnings]) for end in "#>*"]
    few = table.add(["a.#", "*.b"])
    names = [f"{'a.' * 8}{n}" for n in range(500)]
    store(table, there, [*names, *names, "", "x.b"])
    assert sorted(map(id, told)) == sorted(map(id, [*wanted, few, few]))
    for each in (*wanted, few):
        look(each, there, [*names, *names, "", "x.b"])
