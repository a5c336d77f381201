"""Acknowledged sequences and detection of rolled-back streams."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.jetstream.consume import acked_sequences
from simplebus.jetstream.consume.acked_sequences import CLOCK_SKEW_SECONDS, AckedSequences
from simplebus.nats.client.jetstream_codec import JetStreamDeliveries, parse_deliveries
from tests.jetstream.consume.test_feed import arrived, message

SECOND = 1_000_000_000


def deliveries(*messages: tuple[int, float]) -> JetStreamDeliveries:
    """Return deliveries of sequences with their storage time in seconds."""
    return parse_deliveries(
        arrived(*(message(n, stored=round(seconds * SECOND)) for n, seconds in messages))
    )


def numbers(*sequences: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(sequences, np.int64)


@given(data=st.data())
def test_knows_acked_sequences_before_and_after_the_floor(data: st.DataObject) -> None:
    tracker, acked, floor = AckedSequences(), set[int](), 0
    tracker.record_received(deliveries((100, 1.0)))
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            added = data.draw(st.sets(st.integers(1, 100), max_size=20))
            tracker.add(numbers(*sorted(added)))
            acked |= added
        else:
            probed = data.draw(st.integers(0, 100))
            tracker.raise_floor(probed)
            floor = max(floor, probed)
        expected = [n < floor or n in acked for n in range(1, 120)]
        assert tracker.acked_flags(np.arange(1, 120)).tolist() == expected


def test_knows_nothing_before_first_received_sequence() -> None:
    tracker = AckedSequences()
    tracker.record_received(deliveries((500, 1.0), (501, 1.0)))
    assert tracker.acked_flags(numbers(90, 500)).tolist() == [False, False]
    assert tracker.restart_sequence == 500
    tracker.record_received(deliveries((90, 1.0)))  # Another member of the group has returned it.
    assert (tracker.restart_sequence, tracker.highest) == (90, 501)
    tracker.raise_floor(80)
    assert tracker.restart_sequence == 80


def test_younger_message_at_old_sequence_shows_rollback() -> None:
    tracker = AckedSequences()
    assert not tracker.shows_rollback(deliveries((1, 10.0)))
    tracker.record_received(deliveries((1, 10.0), (2, 11.0), (3, 12.0)))
    assert not tracker.shows_rollback(deliveries((2, 11.0), (4, 60.0)))
    assert not tracker.shows_rollback(deliveries((2, 12.0 + CLOCK_SKEW_SECONDS / 2)))
    assert tracker.shows_rollback(deliveries((2, 12.0 + 2 * CLOCK_SKEW_SECONDS)))
    assert tracker.shows_rollback(deliveries((4, 70.0), (3, 60.0)))


def test_clock_set_back_is_no_rollback() -> None:
    tracker = AckedSequences()
    tracker.record_received(deliveries((1, 5000.0)))
    tracker.record_received(deliveries((2, 1000.0), (3, 1001.0)))
    assert not tracker.shows_rollback(deliveries((1, 5000.0), (2, 1000.0)))


def test_forgets_lowest_of_too_many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acked_sequences, "RANGES_MAX", 10)
    sequences_ = AckedSequences()
    sequences_.record_received(deliveries((100, 1.0)))
    for sequence in range(1, 23, 2):
        sequences_.add(numbers(sequence))
    acked = np.flatnonzero(sequences_.acked_flags(np.arange(100))).tolist()
    assert acked == [11, 13, 15, 17, 19, 21]
