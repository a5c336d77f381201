"""Messages in flight to a member of a key-ordered group, against a dictionary."""

from __future__ import annotations

import random

import pytest

from simplebus.core.group.keys_in_flight import KeyOrderedInFlight

MESSAGE_COUNT = 2_000
"""Enough messages for short ranges, which are scanned one by one, and long ones."""


class InFlightModel:
    """Dictionary of the messages in flight, beside the object under test."""

    def __init__(self) -> None:
        self.attempts_of: dict[int, int] = {}
        self.due: dict[int, int] = {}
        self.sent = KeyOrderedInFlight(self.attempts_of)

    def add_sent(self, sequences: list[int], attempts: int, due: int) -> None:
        self.attempts_of.update(dict.fromkeys(sequences, attempts))
        self.due.update(dict.fromkeys(sequences, due))
        self.sent.add_sent(sequences, [s % 7 for s in sequences], attempts=attempts, due_tick=due)

    def find_matching(self, first: int, last: int, attempt: int) -> list[int]:
        return [
            s for s in sorted(self.due) if first <= s < last and attempt in (0, self.attempts_of[s])
        ]

    def remove(self, removed: list[int]) -> tuple[list[int], int]:
        for sequence in removed:
            del self.due[sequence]
        return removed, sum(s % 7 for s in removed)

    def check_equal(self) -> None:
        self.sent.check_invariants()
        assert {s: due for s, (due, _) in self.sent.held_messages.items()} == self.due


@pytest.mark.parametrize("grows", [5, 0])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_match_model(seed: int, grows: int) -> None:
    """With `grows` 0, a message that is sent again has the same due tick as before."""
    chance, model = random.Random(seed), InFlightModel()
    sent, tick, head = model.sent, 0, 0
    waiting: list[int] = []
    for step in range(300):
        first = chance.randrange(MESSAGE_COUNT)
        last = first + chance.choice([1, 3, 255, 256, 257, 700, MESSAGE_COUNT])
        attempt = chance.choice([0, 0, 0, 1, 2, 9])

        def due(attempts: int, tick: int = tick) -> int:
            return tick + 5 + grows * attempts

        match chance.choice(["put"] * 3 + ["lose", "range", "working", "holds", "tick", "again"]):
            case "put" if head < MESSAGE_COUNT:
                count = chance.choice([1, 40, 300])
                sequences = [s for s in range(head, head + count) if chance.random() < 0.8]
                head += count
                if sequences:
                    model.add_sent(sequences, 1, due(1))
            case "again" if waiting:
                chance.shuffle(waiting)
                sequences = [waiting.pop() for _ in range(len(waiting) // 2 + 1)]
                for attempts in sorted({model.attempts_of[s] for s in sequences}):
                    same_attempts = sorted(s for s in sequences if model.attempts_of[s] == attempts)
                    model.add_sent(same_attempts, attempts + 1, due(attempts + 1))
            case "lose":
                requested = chance.sample(range(MESSAGE_COUNT), 50)
                removed, size = model.remove([s for s in requested if s in model.due])
                assert sent.remove_sequences(requested) == (removed, size)
                waiting += removed
            case "range":
                removed, size = model.remove(model.find_matching(first, last, attempt))
                assert sent.remove_range(first, last, attempt) == (removed, size)
                waiting += removed
            case "working":
                sent.extend_timeouts(first, last, due, attempt)
                model.due.update(
                    {
                        s: due(model.attempts_of[s])
                        for s in model.find_matching(first, last, attempt)
                    }
                )
            case "holds":
                assert sent.has_in_flight(first, last, attempt) == bool(
                    model.find_matching(first, last, attempt)
                )
            case "tick":
                tick += 1
                late = [s for s, at in model.due.items() if at == tick]
                assert sorted(sent.find_overdue(tick)) == sorted(late)
                assert sorted(sent.remove_sequences(late)[0]) == sorted(late)
                waiting += model.remove(late)[0]
        if step % 5 == 0:
            model.check_equal()


def test_message_sent_again_is_held_once() -> None:
    model = InFlightModel()
    sent = model.sent
    model.add_sent(list(range(400)), 1, 17)
    sent.remove_sequences([5, 7, 9])
    model.add_sent([5, 7, 9], 2, 17)
    assert sent.has_in_flight(0, 400, 2)
    late, _ = sent.remove_range(0, 400, 1)
    assert late == [s for s in range(400) if s not in (5, 7, 9)]
    sent.check_invariants()
    assert not sent.has_in_flight(0, 400, 1)
    assert sent.remove_range(0, 400)[0] == [5, 7, 9]


class CountingDict(dict[int, tuple[int, int]]):
    """Dictionary that counts its lookups."""

    lookup_count = 0

    def get(self, *arguments: object) -> object:  # type: ignore[override]
        self.lookup_count += 1
        return super().get(*arguments)  # type: ignore[arg-type]


def test_repeated_range_operations_do_not_inspect_messages() -> None:
    model = InFlightModel()
    sent = model.sent
    sent.held_messages = messages = CountingDict()
    model.add_sent(list(range(20_000)), 1, 30)
    model.add_sent(list(range(30_000, 30_010)), 2, 60)
    for _ in range(100):
        sent.extend_timeouts(0, 20_000, lambda attempts: 30 * attempts + 1)
    assert messages.lookup_count == 20_000
    for attempt in range(3, 500):  # No message has this attempt.
        assert not sent.has_in_flight(0, 20_000, attempt)
    assert sent.remove_range(0, 20_000)[0] == list(range(20_000))
    for _ in range(100):  # These messages are removed, others are still held.
        assert not sent.has_in_flight(0, 20_000)
        assert not sent.remove_range(0, 20_000)[0]
    assert messages.lookup_count == 40_000


def test_removed_messages_are_inspected_once() -> None:
    model = InFlightModel()
    model.sent.held_messages = messages = CountingDict()
    model.add_sent(list(range(20_000)), 1, 30)
    model.sent.remove_sequences(range(10_000))
    for _ in range(100):
        assert not model.sent.has_in_flight(0, 9_984)
    assert messages.lookup_count == 9_984


def count_entries(sent: KeyOrderedInFlight) -> int:
    return sum(
        len(list(bucket))
        for by in sent._bucket_by_due_and_attempts.values()
        for bucket in by.values()
    )


def test_extended_message_is_in_one_bucket() -> None:
    model = InFlightModel()
    model.add_sent(list(range(100)), 1, 30)
    for tick in range(50):
        for sequence in range(100):
            model.sent.extend_timeouts(
                sequence, sequence + 1, lambda attempts, tick=tick: 30 * attempts + tick
            )
    assert count_entries(model.sent) == 100


def test_stale_entries_are_dropped_before_they_are_due() -> None:
    model = InFlightModel()
    for first in range(0, 100_000, 100):
        model.add_sent(list(range(first, first + 100)), 1, 3_600)
        model.remove(list(range(first, first + 100)))
        model.sent.remove_sequences(range(first, first + 100))
    assert count_entries(model.sent) < 2_000
    model.check_equal()
