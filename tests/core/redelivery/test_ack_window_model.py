"""Ack window against a set of integers."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.sequence_set import SequenceSet
from tests.support.oracles import ID_COUNT, group_ids

Ranges = list[tuple[int, int]]

# Near the wrap of ids, near the marks' first size, and at the beginning.
FLOORS = [0, 1, 1020, ID_COUNT - 700, 3 * ID_COUNT - 5]

spans = st.tuples(st.integers(-30, 2500), st.integers(1, 400))
"""Where a range begins, relative to the floor, and how long it is."""


class AckWindowMachine(RuleBasedStateMachine):
    @initialize(floor=st.sampled_from(FLOORS))
    def start(self, floor: int) -> None:
        self.window = AckWindow(floor=floor)
        self.cursor = floor
        self.unacked: set[int] = set()
        """Sent and not acknowledged."""

    @property
    def floor(self) -> int:
        return min(self.unacked, default=self.cursor)

    @rule(count=st.integers(1, 900))
    def send(self, count: int) -> None:
        self.unacked.update(range(self.cursor, self.cursor + count))
        self.cursor += count
        self.window.cursor += count

    @rule(span=spans)
    def ack_a_range(self, span: tuple[int, int]) -> None:
        for first, last in self.sent([span]):
            if first < last:
                self.window.ack_range(first, last)
                self.unacked.difference_update(range(first, last))

    # Up to 50 ranges take the plain loop; more take the arrays, in one of three ways: ranges that
    # touch and begin at the floor, single messages, and anything else.

    @rule(spans=st.lists(spans, min_size=1, max_size=5), times=st.sampled_from([1, 60]))
    def ack_ranges(self, spans: Ranges, times: int) -> None:
        self.ack_all(self.sent([(at + i, count) for i in range(times) for at, count in spans]))

    @rule(at=st.integers(-10, 300), count=st.integers(1, 200), random=st.randoms())
    def ack_single_messages_in_any_order(self, at: int, count: int, random: Random) -> None:
        singles = [(at + i, 1) for i in range(count)]
        random.shuffle(singles)
        self.ack_all(self.sent(singles))

    @rule(at=st.integers(-10, 10), lengths=st.lists(st.integers(1, 4), min_size=51, max_size=99))
    def ack_ranges_that_touch(self, at: int, lengths: list[int]) -> None:
        starts = np.cumsum([at, *lengths[:-1]]).tolist()
        self.ack_all(self.sent(list(zip(starts, lengths, strict=True))))

    @rule(count=st.integers(-5, 1500))
    def skip(self, count: int) -> None:
        floor = self.floor + count
        lost = {sequence for sequence in self.unacked if sequence < floor}
        never_sent = max(0, floor - self.cursor)
        assert self.window.skip_to(floor) == len(lost) + never_sent
        self.unacked -= lost
        self.cursor = max(self.cursor, floor)

    @rule(spans=st.lists(spans, max_size=40))
    def find_unacked_of_a_set(self, spans: Ranges) -> None:
        sequences, numbers = SequenceSet(), set[int]()
        for at, count in spans:
            first = max(0, self.floor + at)
            sequences.add(first, first + count)
            numbers |= set(range(first, first + count))
        found = self.window.unacked_set(sequences)
        found.check()
        assert {s for a, b in found for s in range(a, b)} == self.unacked & numbers
        assert self.window.count_unacked_set(sequences) == len(found)

    @rule()
    def release_memory(self) -> None:
        self.window.release_memory()
        if len(self.unacked) == self.cursor - self.floor:
            assert self.window.flags_bytes == 0

    @rule(at=st.integers(-50, 1500), count=st.integers(0, 2500))
    def check_unacked_part(self, at: int, count: int) -> None:
        first = self.floor + at
        part = sorted(self.unacked.intersection(range(first, first + count)))
        assert self.window.unacked_ranges(first, first + count) == group_ids(part)
        assert self.window.find_first_unacked(first, first + count) == next(iter(part), None)

    @rule(offsets=st.lists(st.integers(-50, 1500), min_size=1, max_size=5))
    def check_some_sequences(self, offsets: list[int]) -> None:
        sequences = np.array(offsets) + self.floor
        expected = [sequence in self.unacked for sequence in sequences.tolist()]
        assert self.window.are_unacked(sequences).tolist() == expected

    @invariant()
    def window_equals_model(self) -> None:
        self.window.check()
        assert (self.window.floor, self.window.cursor) == (self.floor, self.cursor)
        assert self.window.in_flight_count == len(self.unacked)
        assert self.window.unacked_ranges(0, self.cursor) == group_ids(sorted(self.unacked))

    def sent(self, spans: Ranges) -> Ranges:
        """Convert spans to ranges of sequences, cut at the cursor; some may be empty."""
        floor, cursor = self.floor, self.cursor
        return [(min(floor + at, cursor), min(floor + at + count, cursor)) for at, count in spans]

    def ack_all(self, ranges: Ranges) -> None:
        before = self.floor
        pairs = np.array(ranges, np.int64)
        moved = self.window.ack_ranges(pairs[:, 0], pairs[:, 1])
        for first, last in ranges:
            self.unacked.difference_update(range(first, last))
        assert moved == (self.floor != before)


AckWindowMachine.TestCase.settings = settings(stateful_step_count=30)
TestAckWindowModel = AckWindowMachine.TestCase
