"""Payloads and receipts of the demo."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.protocol.frames import DELIMITER
from simplebus.demo.records import (
    CORRUPT,
    PAYLOAD_BYTES_MAX,
    PAYLOAD_BYTES_MIN,
    RECEIPT,
    ReceiptLog,
    message_number,
    payload,
    read_receipts,
)

CLASSES = st.integers(0, 0xFFFF)
NUMBERS = st.integers(0, 10**10 - 1)


@given(CLASSES, NUMBERS)
def test_a_payload_gives_its_number_back(class_id: int, number: int) -> None:
    content = payload(class_id, number)
    assert message_number(class_id, content) == number
    assert PAYLOAD_BYTES_MIN <= len(content) <= PAYLOAD_BYTES_MAX
    assert DELIMITER not in content


@given(CLASSES, NUMBERS, st.data())
def test_a_changed_payload_has_no_number(class_id: int, number: int, data: st.DataObject) -> None:
    content = bytearray(payload(class_id, number))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    assert message_number(class_id, bytes(content)) == CORRUPT


@given(CLASSES, NUMBERS, st.binary(max_size=80))
def test_a_payload_of_another_class_or_length_has_no_number(
    class_id: int, number: int, foreign_payload: bytes
) -> None:
    content = payload(class_id, number)
    assert message_number((class_id + 1) & 0xFFFF, content) == CORRUPT
    assert message_number(class_id, content[:-1]) == CORRUPT
    assert message_number(class_id, content + b"!") == CORRUPT
    assert message_number(class_id, foreign_payload) == CORRUPT


def test_receipts_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    rows = [(1, False, 0, 0), (2, True, 10**9, 7), (0xFFFF, False, CORRUPT, (1 << 31) - 1)]
    receipt_log = ReceiptLog(path)
    receipt_log.write(rows[:2])
    receipt_log.write(rows[2:])
    receipt_log.close()
    assert [tuple(row) for row in read_receipts(path).tolist()] == rows


def test_a_torn_record_at_the_end_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    receipt_log = ReceiptLog(path)
    receipt_log.write([(1, False, n, n) for n in range(3)])
    receipt_log.close()
    whole = path.read_bytes()
    for cut in range(1, RECEIPT.itemsize + 1):
        path.write_bytes(whole[:-cut])
        assert read_receipts(path)["number"].tolist() == [0, 1]
