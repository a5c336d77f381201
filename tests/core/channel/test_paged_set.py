"""PagedSet behaves as a set, has no large page, and changes no shared page."""

from __future__ import annotations

from itertools import chain

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
        shared = [(tested.share_pages(), set(expected))]
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
            if value % 3 == 0:
                shared.append((tested.share_pages(), set(expected)))
        for pages, values in shared:
            assert set(chain(*pages)) == values
            assert sum(map(len, pages)) == len(values)
