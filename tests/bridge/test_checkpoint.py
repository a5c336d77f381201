"""Bridge records: sequences of the source by message number at the target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.bridge.checkpoint import (
    AnnouncedBatch,
    BridgeRecord,
    BridgeRecordError,
    MessageFingerprint,
    TargetNumbering,
    ranges,
)
from simplebus.core.limits import MESSAGE_ID_MASK

IDS = MESSAGE_ID_MASK + 1


def sequences_from(record: BridgeRecord, number: int) -> list[int | None]:
    """Return the sequences by number, from `number` on; None for the number of a record."""
    found: list[int | None] = []
    for first, parts in record.iter_missing(number):
        assert first == (number + len(found)) % IDS
        found += [n for start, end in parts for n in range(start, end)] if parts else [None]
    return found


@given(
    st.integers(0, IDS - 1),
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=7),
    st.integers(1, 4),
    st.data(),
)
def test_missing_parts_match_announcement(
    start: int, steps: list[list[int]], announced_count: int, data: st.DataObject
) -> None:
    """Covers wrapping numbers, skipped sequences, and batches that were only announced."""
    planned, position = list[tuple[list[tuple[int, int]], int, MessageFingerprint | None]](), 0
    expected = list[int | None]()
    for gaps in steps:
        sequences = position + np.cumsum(gaps)
        position = int(sequences[-1]) + 1
        planned.append((ranges(sequences), position, None))
        expected += [None, *sequences.tolist()]
    numbering = TargetNumbering("here", start)
    sent = data.draw(st.integers(1, len(planned)))
    settled = data.draw(st.integers(0, sent - 1))
    told_upto = min(len(planned), sent - 1 + announced_count)
    for index in range(sent):
        record, batches = numbering.create_record(planned[index : index + announced_count])
        assert len(batches) == min(announced_count, len(planned) - index)
        if index < sent - 1:
            numbering.note_sent(batches[0])
        if index < settled:
            numbering.note_settled()
    decoded = BridgeRecord.decode(record.encode())
    assert decoded == record
    row = expected[: sum(1 + len(steps[index]) for index in range(told_upto))]
    assert row[(record.number - start) % IDS] is None
    first = (record.first_number - start) % IDS
    missing = data.draw(st.integers(first, len(row)))
    assert sequences_from(decoded, (start + missing) % IDS) == row[missing:]
    assert decoded.next == planned[told_upto - 1][1]


def test_announcement_can_be_replaced() -> None:
    numbering = TargetNumbering("here", 7)
    _, (first, *_) = numbering.create_record([([(0, 3)], 3, None), ([(3, 5)], 5, None)])
    numbering.note_sent(first)
    numbering.create_record([([(3, 5)], 5, None)])
    record, _ = numbering.create_record([([(1, 2)], 3, None)])
    assert record.number == 12
    # A batch that was announced but not sent used up one number, that of its record.
    assert sequences_from(record, 10) == [2, None, None, 1]


def test_sequence_at_index_of_batch() -> None:
    batch = AnnouncedBatch(0, ranges(np.array([1, 2, 5, 7, 8])), 9)
    assert [batch.sequence_at(index) for index in range(batch.count)] == [1, 2, 5, 7, 8]


@pytest.mark.parametrize("payload", [b"", b"{}", b"[1]", b'{"source":"a","number":1,"batches":[]}'])
def test_rejects_malformed_record(payload: bytes) -> None:
    with pytest.raises(BridgeRecordError, match="is not a bridge record"):
        BridgeRecord.decode(payload)


@pytest.mark.parametrize(
    ("number", "batches", "problem"),
    [
        (5, [(6, [(0, 1 << 40)], 1 << 40)], "messages, expected at most 262144"),
        (5, [(100_000_000, [(0, 10)], 10)], r"begin at \[100000000\]"),
        (1 << 40, [(1, [(0, 10)], 10)], "number is 1099511627776"),
        (0, [(1, [(-5, 1)], 7)], "do not ascend"),
        (0, [(1, [(0, 5)], 3)], "do not ascend to 3"),
        (0, [(1, [(3, 5), (4, 6)], 9)], "do not ascend"),
        (0, [(1, [(3, 3)], 9)], "empty range"),
        (9, [(900_000_000, [(0, 2)], 2), (10, [(2, 3)], 3)], "begins at number 900000000"),
        (0, [(1, [(0, 1)], 1)] * 2, "the next one at 1"),
        (0, [(1, [], 0)] * 17, "17 batches"),
    ],
)
def test_rejects_inconsistent_record(
    number: int, batches: list[tuple[int, list[tuple[int, int]], int]], problem: str
) -> None:
    forged = BridgeRecord("here", number, [AnnouncedBatch(*batch) for batch in batches])
    with pytest.raises(BridgeRecordError, match=problem):
        BridgeRecord.decode(forged.encode())


@pytest.mark.parametrize("start", [7, IDS - 3])
def test_record_matches_its_numbers_only(start: int) -> None:
    numbering = TargetNumbering("here", start)
    _, (first, _) = numbering.create_record([([(0, 10)], 10, None), ([(10, 15)], 15, None)])
    numbering.note_sent(first)
    record, _ = numbering.create_record([([(10, 15)], 15, None)])
    row = 1 + 10 + 1 + 5
    fitting = [n for n in range(-3, row + 3) if record.matches_next_number((start + n) % IDS)]
    assert fitting == list(range(-3, row + 1))
    assert not record.matches_next_number((start + 1000 * row) % IDS)
    assert not record.matches_next_number((start - IDS // 4) % IDS)
