"""Redelivery queue against a list of spans."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from simplebus.core.redelivery.redelivery_queue import RedeliveryQueue, SpanSet
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.core.redelivery.timer_wheel import Span
from tests.support.call_counter import count_calls

MESSAGES = st.dictionaries(st.integers(0, 40), st.integers(1, 3), max_size=20)
"""Attempts by message."""


def build_sets(attempts_by_message: dict[int, int]) -> list[SpanSet]:
    sets: dict[int, SequenceSet] = {}
    for message, attempts in attempts_by_message.items():
        sets.setdefault(attempts, SequenceSet()).add(message, message + 1)
    return list(sets.items())


def spans_of(sets: list[SpanSet]) -> list[Span]:
    return sorted(
        [Span(a, b, attempts) for attempts, sequences in sets for a, b in sequences],
        key=lambda span: span.first,
    )


def span_start(span: Span) -> int:
    return span.first


def span_attempts(span: Span) -> tuple[int, int]:
    return -span.attempts, span.first


class RedeliveryQueueMachine(RuleBasedStateMachine):
    """A redelivery queue against a list. New messages have sequences that are not used yet."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.model = RedeliveryQueue(), list[Span]()
        self.next_sequence = 100
        self.extendable_count = 0
        """Number of last spans that are sorted together with the next sets."""

    def new_messages(self, attempts_by_message: dict[int, int]) -> dict[int, int]:
        """Return the messages with unused sequences, above or below the ones in use."""
        first, self.next_sequence = self.next_sequence, self.next_sequence + 50
        return {first + number: attempts for number, attempts in attempts_by_message.items()}

    def new_spans(self, attempts: list[int]) -> list[Span]:
        first, self.next_sequence = self.next_sequence, self.next_sequence + 50
        return [Span(first + 3 * n, first + 3 * n + 2, each) for n, each in enumerate(attempts)]

    @rule(attempts=st.integers(0, 3), is_low=st.booleans())
    def append(self, attempts: int, is_low: bool) -> None:
        (span,) = self.new_spans([attempts])
        if is_low:
            span = Span(-span.last, -span.first, attempts)
        self.queue.append(span)
        self.model.append(span)
        self.extendable_count = 0

    @rule(attempts=st.lists(st.integers(0, 3), max_size=4), is_front=st.booleans())
    def extend(self, attempts: list[int], is_front: bool) -> None:
        spans = self.new_spans(attempts)
        if is_front:
            self.queue.extend_front(spans)
            self.model[:0] = spans
        else:
            self.queue.extend(spans)
            self.model += spans
            if spans:
                self.extendable_count = 0

    @rule(messages=MESSAGES, more=MESSAGES)
    def append_sets(self, messages: dict[int, int], more: dict[int, int]) -> None:
        low, high = build_sets(self.new_messages(messages)), build_sets(self.new_messages(more))
        for sets in (high, low):
            self.queue.append_sets(sets)
            spans = spans_of(sets)
            begin = len(self.model) - self.extendable_count
            self.model[begin:] = sorted([*self.model[begin:], *spans], key=span_start)
            self.extendable_count += len(spans)
            if self.extendable_count == len(self.model):
                self.extendable_count = 0

    @rule(messages=MESSAGES, attempts=st.lists(st.integers(0, 3), max_size=4))
    def sort_with(self, messages: dict[int, int], attempts: list[int]) -> None:
        sets, spans = build_sets(self.new_messages(messages)), self.new_spans(attempts)
        self.model = sorted([*self.model, *spans_of(sets), *spans], key=lambda span: span.first)
        self.queue.sort_with(sets, spans)
        self.extendable_count = 0

    @rule(key=st.sampled_from([span_start, span_attempts]))
    def sort(self, key: Callable[[Span], object]) -> None:
        self.queue.sort(key)
        self.model.sort(key=key)
        self.extendable_count = 0

    @precondition(lambda self: self.model)
    @rule(is_cut=st.booleans())
    def take_first(self, is_cut: bool) -> None:
        expected = self.model[0]
        assert self.queue.first == expected
        if is_cut and expected.first + 1 < expected.last:
            first = self.queue.first
            self.model[0] = Span(first.first + 1, first.last, first.attempts)
            first.first += 1
        else:
            assert self.queue.pop_first() == self.model.pop(0)
            if self.extendable_count == len(self.model):
                self.extendable_count = 0

    @rule()
    def pop_all(self) -> None:
        assert self.queue.pop_all() == self.model
        self.model = []
        self.extendable_count = 0

    @invariant()
    def queue_equals_model(self) -> None:
        assert list(self.queue) == self.model
        assert bool(self.queue) == bool(self.model)


TestRedeliveryQueue = RedeliveryQueueMachine.TestCase


def test_many_small_sets_are_sent_in_order() -> None:
    set_count = 1500
    queue = RedeliveryQueue()
    queue.append(Span(0, 1, 1))
    for number in range(set_count):
        first = 1 + 3 * number
        step = 3 * set_count
        attempts = {first + n * step: 1 + number % 2 for n in range(3)}
        queue.append_sets(build_sets(attempts))
    spans = [queue.pop_first() for _ in range(1 + 3 * set_count)]
    assert not queue
    assert spans[1:] == [
        Span(first, first + 1, 1 + first // 3 % set_count % 2)
        for first in range(1, 1 + 9 * set_count, 3)
    ]


def test_sorting_many_small_sets_costs_little() -> None:
    def count(set_count: int) -> int:
        queue = RedeliveryQueue()
        queue.append(Span(0, 1, 1))
        for number in range(set_count):
            queue.append_sets(build_sets({1 + 2 * number: 1}))
        return count_calls(lambda: queue.sort_with([], []))

    assert count(10_000) < 10 * count(100)


@given(
    st.dictionaries(
        st.integers(0, 40), st.tuples(st.integers(1, 2), st.integers(0, 3)), min_size=1
    ),
    st.booleans(),
)
def test_ranges_of_several_sets_are_joined(
    set_by_message: dict[int, tuple[int, int]], is_popped_at_once: bool
) -> None:
    sets: dict[tuple[int, int], SequenceSet] = {}
    expected: list[Span] = []
    for message, (attempts, number) in sorted(set_by_message.items()):
        sets.setdefault((attempts, number), SequenceSet()).add(message, message + 1)
        if expected and expected[-1].last == message and expected[-1].attempts == attempts:
            expected[-1].last += 1
        else:
            expected.append(Span(message, message + 1, attempts))
    queue = RedeliveryQueue()
    queue.append_sets([(attempts, messages) for (attempts, _), messages in sets.items()])
    assert queue.count_messages(100) == len(set_by_message)
    if is_popped_at_once:
        spans = queue.pop_all()
    else:
        spans = []
        while queue:
            spans.append(queue.pop_first())
    assert spans == expected


def test_adding_sets_costs_the_same_for_any_number_of_ranges() -> None:
    def count(range_count: int) -> int:
        queue = RedeliveryQueue()
        sets = build_sets(dict.fromkeys(range(0, 2 * range_count, 2), 1))
        more = build_sets(dict.fromkeys(range(1, 8 * range_count, 8), 2))

        def add() -> None:
            queue.append_sets(sets)
            queue.sort_with(more, [])
            queue.pop_first()

        return count_calls(add)

    assert count(10) == count(1000)


def test_sorting_few_new_spans_costs_the_same_for_many_sorted_ones() -> None:
    def count(span_count: int) -> int:
        queue = RedeliveryQueue()
        queue.extend(Span(2 * n, 2 * n + 1, n % 3) for n in range(span_count))
        queue.sort(span_attempts)
        queue.append(Span(101, 102, 1))
        return count_calls(lambda: queue.sort(span_attempts))

    assert count(10_000) < 2 * count(100)
