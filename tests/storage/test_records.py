"""Record format: round trips, and the end of damaged data."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.commit_log import JournalEntry
from simplebus.storage import records
from simplebus.storage.records import HEADER_BYTES, EndOfRecords, Record, RecordKind


def entry(count: int = 3, publisher: str = "till", class_id: int = 7) -> JournalEntry:
    made = JournalEntry(class_id, 40, 1.5)
    for number in range(count):
        made.append_frames(1, b"frame %d" % number, publisher)
    return made


def of_entry(made: JournalEntry, lot: int) -> bytes:
    return b"".join(records.encode_entry(made, lot))


def test_reads_written_records() -> None:
    data = memoryview(of_entry(entry(), 9) + b"".join(records.encode_changes(b"names", 10)))
    first = records.read_record(data, 0)
    assert isinstance(first, Record)
    assert (first.kind, first.class_id, first.message_count, first.batch_number) == (
        RecordKind.MESSAGES,
        7,
        3,
        9,
    )
    assert (first.first, first.last, first.time) == (40, 43, 1.5)
    assert bytes(data[first.body_offset : first.end]) == b"frame 0frame 1frame 2"
    assert records.decode_producer_runs(data, first) == [(3, "till")]
    second = records.read_record(data, first.end)
    assert isinstance(second, Record)
    assert (second.kind, second.batch_number) == (RecordKind.CHANGES, 10)
    assert bytes(data[second.body_offset : second.end]) == b"names"
    assert records.read_record(data, second.end) == EndOfRecords(second.end)


def test_messages_without_publisher_have_no_meta() -> None:
    data = memoryview(of_entry(entry(publisher=""), 1))
    record = records.read_record(data, 0)
    assert isinstance(record, Record)
    assert record.meta_bytes == 0
    assert records.decode_producer_runs(data, record) == [(3, "")]


def test_zeros_are_a_clean_end() -> None:
    assert records.read_record(memoryview(bytes(200)), 0) == EndOfRecords(0)
    assert records.read_record(memoryview(bytes(20)), 0) == EndOfRecords(0)


def test_truncated_record_is_damaged() -> None:
    whole = of_entry(entry(), 1)
    for size in range(1, len(whole)):
        for rest in (b"", bytes(len(whole) - size)):  # As cut off, or as never written.
            found = records.read_record(memoryview(whole[:size] + rest), 0)
            if whole[:size].ljust(len(whole), b"\0") == whole:
                continue
            assert isinstance(found, EndOfRecords), size
            assert found.problem, size


def test_flipped_bit_is_detected() -> None:
    whole = of_entry(entry(), 1)
    for at in range(len(whole)):
        for bit in range(8):
            bad = bytearray(whole)
            bad[at] ^= 1 << bit
            assert isinstance(records.read_record(memoryview(bad), 0), EndOfRecords), (at, bit)


def test_header_walk_reads_no_bodies() -> None:
    bad = bytearray(of_entry(entry(), 1))
    bad[-1] ^= 1
    assert isinstance(records.read_record(memoryview(bad), 0, verify_body=False), Record)
    assert isinstance(records.read_record(memoryview(bad), 0), EndOfRecords)


def test_later_format_is_reported_as_unknown() -> None:
    whole = bytearray(of_entry(entry(), 1))
    whole[3:4] = b"9"
    whole[HEADER_BYTES - 4 : HEADER_BYTES] = zlib.crc32(whole[: HEADER_BYTES - 4]).to_bytes(
        4, "little"
    )
    found = records.read_record(memoryview(whole), 0)
    assert isinstance(found, EndOfRecords)
    assert "b'sbj9'" in found.problem


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise(data: bytes) -> None:
    assert isinstance(records.read_record(memoryview(data), 0), EndOfRecords)


@given(
    first=st.integers(0, 1 << 50),
    count=st.one_of(st.integers(1, 1000), st.integers((1 << 32) - 2, 1 << 36)),
)
def test_gap_of_any_size_is_encoded_in_records_that_follow_each_other(
    first: int, count: int
) -> None:
    data = memoryview(records.encode_gap(7, first, count, 3, 1.5, salt=9))
    at, end = 0, first
    while at < len(data):
        record = records.read_record(data, at, salt=9)
        assert isinstance(record, Record)
        assert (record.kind, record.class_id, record.first) == (RecordKind.GAP, 7, end)
        at, end = record.end, record.last
    assert end == first + count
