"""ShardedDict behaves as a dict, and no part of it becomes large."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from simplebus.core.channel.sharded_dict import ShardedDict

KEYS = st.integers(0, 12)


class DictComparison(RuleBasedStateMachine):
    """A ShardedDict, and a dict with the same entries."""

    @initialize(entry_count=st.sampled_from([0, 1021, 3000]))
    def fill(self, entry_count: int) -> None:
        self.tested: ShardedDict[int, object] = ShardedDict()
        self.expected: dict[int, object] = {}
        for key in range(entry_count):
            self.tested[-key - 1] = self.expected[-key - 1] = str(key)

    @rule(key=KEYS, value=st.integers())
    def set(self, key: int, value: int) -> None:
        self.tested[key] = self.expected[key] = value

    @rule(key=KEYS)
    def delete(self, key: int) -> None:
        if key in self.expected:
            del self.tested[key], self.expected[key]
        else:
            with pytest.raises(KeyError):
                del self.tested[key]

    @rule(key=KEYS, value=st.integers())
    def get(self, key: int, value: int) -> None:
        assert (key in self.tested) == (key in self.expected)
        assert self.tested.get(key) == self.expected.get(key)
        assert self.tested.get(key, value) == self.expected.get(key, value)
        assert self.tested.pop(key, value) == self.expected.pop(key, value)
        assert self.tested.setdefault(key, value) == self.expected.setdefault(key, value)

    @rule()
    def pop_item(self) -> None:
        if self.expected:
            key, value = self.tested.popitem()
            assert self.expected.pop(key) == value
        else:
            with pytest.raises(KeyError):
                self.tested.popitem()

    @invariant()
    def has_equal_entries(self) -> None:
        assert dict(self.tested.items()) == self.expected
        assert len(self.tested) == len(self.expected) == sum(self.tested.part_sizes)


TestDictComparison = DictComparison.TestCase
TestDictComparison.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("make_key", ["site.{}".format, int, lambda number: object()])
def test_growing_copies_few_entries(make_key: Callable[[int], Hashable]) -> None:
    tested: ShardedDict[Hashable, int] = ShardedDict()
    for number in range(100_000):
        tested[make_key(number)] = number
    assert max(tested.part_sizes) < 3 * 100_000 / len(tested.part_sizes)
