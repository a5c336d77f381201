"""Record format: round trips, and the end of damaged data."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.commit_log import JournalEntry
from simplebus.storage import records
from simplebus.storage.records import HEADER_BYTES, EndOfRecords, Record, RecordKind


def entry(count: int = 3, publisher: str = "till", class_id: int = 7) -> JournalEntry:
    journal_entry = JournalEntry(class_id, 40, 1.5)
    for number in range(count):
        journal_entry.append_frames(1, b"frame %d" % number, publisher)
    return journal_entry


def encode_entry(journal_entry: JournalEntry, batch_number: int) -> bytes:
    return b"".join(records.encode_entry(journal_entry, batch_number))


def test_reads_written_records() -> None:
    data = memoryview(encode_entry(entry(), 9) + b"".join(records.encode_changes(b"names", 10)))
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
    data = memoryview(encode_entry(entry(publisher=""), 1))
    record = records.read_record(data, 0)
    assert isinstance(record, Record)
    assert record.meta_bytes == 0
    assert records.decode_producer_runs(data, record) == [(3, "")]


def test_zeros_are_a_clean_end() -> None:
    assert records.read_record(memoryview(bytes(200)), 0) == EndOfRecords(0)
    assert records.read_record(memoryview(bytes(20)), 0) == EndOfRecords(0)


def test_truncated_record_is_damaged() -> None:
    data = encode_entry(entry(), 1)
    for size in range(1, len(data)):
        for padding in (b"", bytes(len(data) - size)):  # Truncated, or never written.
            found = records.read_record(memoryview(data[:size] + padding), 0)
            if data[:size].ljust(len(data), b"\0") == data:
                continue
            assert isinstance(found, EndOfRecords), size
            assert found.problem, size


def test_flipped_bit_is_detected() -> None:
    data = encode_entry(entry(), 1)
    for offset in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[offset] ^= 1 << bit
            assert isinstance(records.read_record(memoryview(damaged), 0), EndOfRecords), (
                offset,
                bit,
            )


def test_header_walk_reads_no_bodies() -> None:
    damaged = bytearray(encode_entry(entry(), 1))
    damaged[-1] ^= 1
    assert isinstance(records.read_record(memoryview(damaged), 0, verify_body=False), Record)
    assert isinstance(records.read_record(memoryview(damaged), 0), EndOfRecords)


def test_later_format_is_reported_as_unknown() -> None:
    data = bytearray(encode_entry(entry(), 1))
    data[3:4] = b"9"
    data[HEADER_BYTES - 4 : HEADER_BYTES] = zlib.crc32(data[: HEADER_BYTES - 4]).to_bytes(
        4, "little"
    )
    found = records.read_record(memoryview(data), 0)
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
    offset, end = 0, first
    while offset < len(data):
        record = records.read_record(data, offset, salt=9)
        assert isinstance(record, Record)
        assert (record.kind, record.class_id, record.first) == (RecordKind.GAP, 7, end)
        offset, end = record.end, record.last
    assert end == first + count
