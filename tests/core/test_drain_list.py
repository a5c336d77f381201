"""drain_list yields what a list contains, and keeps no item that it has yielded."""

from __future__ import annotations

import weakref

from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.drain_list import drain_list


class Item:
    """Object that can be referenced weakly."""


@given(st.lists(st.integers()))
def test_yields_the_items_in_order(items: list[int]) -> None:
    assert list(drain_list(items.copy())) == items


def test_keeps_only_the_items_that_follow() -> None:
    items = [Item() for _ in range(3)]
    references = [weakref.ref(each) for each in items]
    iterator = drain_list(items)
    next(iterator)
    next(iterator)
    assert [reference() is None for reference in references] == [True, True, False]
