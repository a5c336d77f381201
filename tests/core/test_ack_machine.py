"""The ack window against a set of ints that is assumed to be perfect."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles import ID_COUNT, AckOracle

from simplebus.core.acks import AckWindow

# A window near the wrap, near a power of two, and at the beginning.
FLOORS = [0, 1, 1020, ID_COUNT - 700, 3 * ID_COUNT - 5]

spans = st.tuples(st.integers(-30, 2500), st.integers(1, 400))
"""Where a range begins, relative to the floor, and how long it is."""


class AckMachine(RuleBasedStateMachine):
    @initialize(floor=st.sampled_from(FLOORS))
    def start(self, floor: int) -> None:
        self.window = AckWindow(floor=floor)
        self.model = AckOracle(floor=floor)

    @rule(count=st.integers(1, 900))
    def send(self, count: int) -> None:
        self.window.cursor += count
        self.model.cursor += count

    @rule(span=spans)
    def ack_a_range(self, span: tuple[int, int]) -> None:
        [(first, last)] = self.sent([span])
        self.window.ack_range(first, last)
        self.model.acked.update(range(first, last))

    # Up to 50 ranges take the plain loop, more the arrays: ranges and single messages differ there.

    @rule(some=st.lists(spans, min_size=1, max_size=5), times=st.sampled_from([1, 60]))
    def ack_ranges(self, some: list[tuple[int, int]], times: int) -> None:
        self.ack_all(self.sent([(at + i, count) for i in range(times) for at, count in some]))

    @rule(
        first=st.integers(-10, 300),
        count=st.integers(1, 200),
        random=st.randoms(use_true_random=False),
    )
    def ack_single_messages_in_any_order(self, first: int, count: int, random) -> None:
        singles = [(first + i, 1) for i in range(count)]
        random.shuffle(singles)
        self.ack_all(self.sent(singles))

    @rule(first=st.integers(-10, 10), lengths=st.lists(st.integers(1, 4), min_size=51, max_size=99))
    def ack_ranges_that_touch(self, first: int, lengths: list[int]) -> None:
        starts = np.cumsum([first, *lengths[:-1]]).tolist()
        self.ack_all(self.sent(list(zip(starts, lengths, strict=True))))

    @rule(count=st.integers(-5, 1500))
    def skip(self, count: int) -> None:
        floor = self.model.floor + count
        lost = [s for s in range(self.model.floor, floor) if s not in self.model.acked]
        assert self.window.skip_to(floor) == len(lost)
        self.model.acked.update(range(self.model.start, floor))
        self.model.cursor = max(self.model.cursor, floor)

    @rule()
    def release_memory(self) -> None:
        self.window.release_memory()
        if not any(sequence > self.model.floor for sequence in self.model.acked):
            assert self.window.marks_bytes == 0

    @rule(first=st.integers(-50, 1500), count=st.integers(0, 2500))
    def unacked_is_the_same_in_any_part(self, first: int, count: int) -> None:
        first += self.model.floor
        assert self.window.unacked(first, first + count) == self.model.unacked(first, first + count)

    @precondition(lambda self: hasattr(self, "window"))
    @invariant()
    def the_window_is_the_model(self) -> None:
        window, model = self.window, self.model
        window.check()
        assert (window.floor, window.cursor) == (model.floor, model.cursor)
        unacked = model.unacked(model.floor, model.cursor)
        assert window.in_flight == sum(last - first for first, last in unacked)
        assert window.unacked(model.floor, model.cursor) == unacked

    def sent(self, some: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """These spans as ranges of sequences, as far as they were sent."""
        floor, cursor = self.model.floor, self.model.cursor
        return [
            (min(floor + at, cursor), min(floor + at + count, cursor)) for at, count in some
        ]

    def ack_all(self, ranges: list[tuple[int, int]]) -> None:
        before = self.model.floor
        pairs = np.array(ranges, np.int64)
        moved = self.window.ack(pairs[:, 0], pairs[:, 1])
        for first, last in ranges:
            self.model.acked.update(range(max(first, self.model.start), last))
        assert moved == (self.model.floor != before)


TestAckMachine = AckMachine.TestCase
TestAckMachine.settings = settings(stateful_step_count=40)
