"""Priority queue of delayed messages, compared with a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.nats.bus import delayed_ranges
from simplebus.nats.bus.delayed_ranges import DelayedRange, DelayedRanges
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import connect_version2, publish

MESSAGE_COUNT = 100
STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "pop", "pop a part", "release"]), st.integers(0, 9)),
    max_size=60,
)


def is_stored(entry: DelayedRange) -> bool:
    return entry.last > entry.cls.ring.floor


@given(steps=STEPS)
def test_entries_are_removed_in_order(steps: list[tuple[str, int]]) -> None:
    bus = BrokerHarness()
    connect_version2(bus, publish(1, 0, *[b"x"] * MESSAGE_COUNT), classes=[1])
    cls = bus.broker.classes[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delayed_ranges, "_EXAMINED_ENTRIES_MIN", 2)
        ranges = DelayedRanges()
        expected: list[DelayedRange] = []
        for order, (step, number) in enumerate(steps):
            if step == "push":
                ranges.push(float(number), cls, order, order + 10)
                expected.append(DelayedRange(float(number), order, cls, order, order + 10))
            elif step == "release":
                cls.ring.release(min(cls.ring.floor + number, cls.ring.head))
            elif len(ranges):
                expected.sort()
                entry = ranges.pop()
                # Entries of released messages may have been removed.
                while entry[2:] != expected[0][2:]:
                    assert not is_stored(expected.pop(0))
                assert expected.pop(0).due_at == entry.due_at
                if step == "pop a part":
                    ranges.put_back(entry, entry.first + 1)
                    expected.append(entry._replace(first=entry.first + 1))
        stored = [entry for entry in expected if is_stored(entry)]
        next_due_times = [ranges.pop().due_at for _ in range(len(ranges))]
    assert next_due_times == sorted(next_due_times)
    assert len(stored) <= len(next_due_times) <= len(expected)


def test_entries_of_released_messages_do_not_accumulate() -> None:
    bus = BrokerHarness()
    connect_version2(bus, publish(1, 0, *[b"x"] * MESSAGE_COUNT), classes=[1])
    cls = bus.broker.classes[1]
    cls.ring.release(MESSAGE_COUNT)
    ranges = DelayedRanges()
    for number in range(20_000):
        ranges.push(float(number), cls, number % MESSAGE_COUNT, number % MESSAGE_COUNT + 1)
    assert len(ranges) <= 3000
