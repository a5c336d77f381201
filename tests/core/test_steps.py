"""Tests of the helpers for work in steps."""

from __future__ import annotations

import weakref

from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.steps import drain_list


class Item:
    """Object that can be referenced weakly."""


@given(st.lists(st.integers()))
def test_drain_list_yields_the_items_in_order(items: list[int]) -> None:
    assert list(drain_list(items.copy())) == items


def test_drain_list_keeps_only_the_items_that_follow() -> None:
    items = [Item() for _ in range(3)]
    references = [weakref.ref(item) for item in items]
    iterator = drain_list(items)
    next(iterator)
    next(iterator)
    assert [reference() is None for reference in references] == [True, True, False]
