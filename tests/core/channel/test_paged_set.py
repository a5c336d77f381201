"""PagedSet behaves as a set, and has no large page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.channel import paged_set
from simplebus.core.channel.paged_set import PagedSet


@given(st.sets(st.integers(0, 20)), st.lists(st.integers(0, 20), max_size=60))
def test_changes_like_a_set(initial: set[int], toggled: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_set, "PAGE_SIZE", 3)
        tested, expected = PagedSet(initial), set(initial)
        for value in toggled:
            assert (value in tested) == (value in expected)
            if value in expected:
                tested.remove(value)
            else:
                tested.add(value)
            expected ^= {value}
            tested.check()
            assert set(tested) == expected
            assert len(tested) == len(expected)
