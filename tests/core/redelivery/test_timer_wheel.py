"""Timer wheel and sequence sets against plain dicts and sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from simplebus.core.protocol.frames import flags_to_ranges
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.redelivery.timer_wheel import Span, TimerWheel

bounds = st.tuples(st.integers(0, 60), st.integers(0, 60))


class SequenceSetMachine(RuleBasedStateMachine):
    """A sequence set against a set of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.set, self.model = SequenceSet(), set[int]()

    @rule(pair=bounds)
    def add(self, pair: tuple[int, int]) -> None:
        self.set.add(*pair)
        self.model |= set(range(*pair))

    @rule(pair=bounds)
    def remove(self, pair: tuple[int, int]) -> None:
        self.set.remove(*pair)
        self.model -= set(range(*pair))

    @rule(pair=bounds)
    def check_missing_ranges(self, pair: tuple[int, int]) -> None:
        outside = [s for a, b in self.set.missing_ranges(*pair) for s in range(a, b)]
        assert outside == sorted(set(range(*pair)) - self.model)
        complement = self.set.complement(*pair)
        complement.check()
        assert list(complement) == self.set.missing_ranges(*pair)

    @rule(pair=bounds)
    def take(self, pair: tuple[int, int]) -> None:
        taken = self.set.pop_ranges(*pair)
        assert all(a < b for a, b in taken)
        assert [s for a, b in taken for s in range(a, b)] == sorted(set(range(*pair)) & self.model)
        self.model -= set(range(*pair))

    @rule(pair=bounds)
    def pop(self, pair: tuple[int, int]) -> None:
        selected = set(range(*pair))
        assert self.set.is_within(*pair) == (self.model <= selected)
        popped = self.set.pop(*pair)
        popped.check()
        assert [s for a, b in popped for s in range(a, b)] == sorted(selected & self.model)
        self.model -= selected

    @rule(numbers=st.sets(st.integers(0, 60)))
    def update(self, numbers: set[int]) -> None:
        self.set.update(flags_to_ranges(np.isin(np.arange(61), list(numbers))))
        self.model |= numbers

    @rule(numbers=st.sets(st.integers(0, 60)) | st.just(set(range(0, 60, 3))))
    def unite(self, numbers: set[int]) -> None:
        added = SequenceSet()
        added.update(flags_to_ranges(np.isin(np.arange(61), list(numbers))))
        self.set.unite(added)
        self.model |= numbers

    @rule()
    def clear(self) -> None:
        self.set.clear()
        self.model.clear()

    @invariant()
    def set_equals_model(self) -> None:
        self.set.check()
        assert len(self.set) == len(self.model)
        assert [s for a, b in self.set for s in range(a, b)] == sorted(self.model)


TestSequenceSet = SequenceSetMachine.TestCase


def schedule_runs(
    runs: list[tuple[int, int, int]],
) -> tuple[TimerWheel, dict[int, tuple[int, int]]]:
    """Schedule consecutive runs (tick, message count, attempts).

    Returns:
        The wheel, and the tick and attempts of each sequence.
    """
    wheel, model = TimerWheel(), dict[int, tuple[int, int]]()
    first = 0
    for due, count, attempts in runs:
        wheel.schedule(due, first, first + count, attempts)
        model |= dict.fromkeys(range(first, first + count), (due, attempts))
        first += count
    return wheel, model


@given(
    puts=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 2)), max_size=12),
    cuts=st.lists(st.tuples(bounds, st.integers(0, 2)), max_size=5),
    tick=st.integers(1, 4),
)
def test_removed_spans_are_not_due(
    puts: list[tuple[int, int, int]], cuts: list[tuple[tuple[int, int], int]], tick: int
) -> None:
    wheel, model = schedule_runs(puts)
    for (begin, end), only in cuts:
        expected = {
            s: attempts
            for s, (_, attempts) in model.items()
            if begin <= s < end and only in (0, attempts)
        }
        assert wheel.overlaps(begin, end, only) == bool(expected)
        spans = wheel.remove(begin, end, only)
        out = {s: span.attempts for span in spans for s in range(span.first, span.last)}
        assert out == expected
        model = {s: due_and_attempts for s, due_and_attempts in model.items() if s not in out}
    popped = {
        s: span.attempts for span in wheel.pop_due(tick) for s in range(span.first, span.last)
    }
    assert popped == {s: attempts for s, (due, attempts) in model.items() if due == tick}
    remaining = [s for _, span in wheel.pop_all() for s in range(span.first, span.last)]
    assert sorted(remaining) == sorted(set(model) - set(popped))
    assert len(wheel) == 0


@given(
    puts=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 2)), max_size=12),
    moves=st.lists(st.tuples(bounds, st.integers(0, 3)), max_size=5),
)
def test_reschedule_moves_only_the_given_messages(
    puts: list[tuple[int, int, int]], moves: list[tuple[tuple[int, int], int]]
) -> None:
    wheel, model = schedule_runs(puts)
    for (begin, end), now in moves:
        wheel.reschedule(begin, end, lambda attempts, now=now: now + attempts)  # type: ignore[misc]
        model |= {s: (now + n, n) for s, (_, n) in model.items() if begin <= s < end}
    for tick in range(10):
        due_now = {
            s: span.attempts for span in wheel.pop_due(tick) for s in range(span.first, span.last)
        }
        assert due_now == {s: n for s, (due, n) in model.items() if due == tick}
    assert len(wheel) == 0


@given(
    puts=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 2)), max_size=12),
    ticks=st.integers(1, 5),
)
def test_postpone_moves_everything(puts: list[tuple[int, int, int]], ticks: int) -> None:
    wheel, model = schedule_runs(puts)
    wheel.postpone(ticks)
    for tick in range(10):
        due_now = {
            s: span.attempts for span in wheel.pop_due(tick) for s in range(span.first, span.last)
        }
        assert due_now == {s: n for s, (due, n) in model.items() if due + ticks == tick}
    assert len(wheel) == 0


def test_rescheduled_messages_merge_into_one_span() -> None:
    wheel = TimerWheel()
    for n in range(20_000):
        wheel.schedule(1 + n % 2, n, n + 1, 1)
    assert len(wheel) == 20_000
    wheel.reschedule(0, 20_000, lambda attempts: 9)
    assert [(span.first, span.last) for span in wheel] == [(0, 20_000)]


def test_repeated_reschedule_moves_each_message_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel = TimerWheel()
    for n in range(1000):  # Attempts alternate, so that ranges cannot merge.
        wheel.schedule(1, n, n + 1, 1 + n % 2)
    wheel.reschedule(0, 1000, lambda attempts: 9 + attempts)
    monkeypatch.setattr(
        SequenceSet, "pop_ranges", lambda *_: pytest.fail("something is moved again")
    )
    for _ in range(1000):
        wheel.reschedule(0, 1000, lambda attempts: 9 + attempts)
    assert len(wheel) == 1000


def test_adjacent_spans_merge() -> None:
    wheel = TimerWheel()
    wheel.schedule(3, 0, 5, 1)
    wheel.schedule(3, 5, 9, 1)
    wheel.schedule(3, 9, 12, 2)
    assert len(wheel) == 2


def test_spans_with_equal_first_sequence_may_be_due_together() -> None:
    put_off = [(1.0, 4, Span(4, 9, 1)), (1.0, 4, Span(4, 5, 2)), (1.0, 3, Span(3, 4, 1))]
    assert [span.first for _, _, span in sorted(put_off)] == [3, 4, 4]
