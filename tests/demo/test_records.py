"""What the demo publishes and writes down."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.protocol.frames import DELIMITER
from simplebus.demo.records import (
    DAMAGED,
    PAYLOAD_BYTES_MAX,
    PAYLOAD_BYTES_MIN,
    RECEIPT,
    Notebook,
    number_in,
    payload,
    read,
)

CLASSES = st.integers(0, 0xFFFF)
NUMBERS = st.integers(0, 10**10 - 1)


@given(CLASSES, NUMBERS)
def test_a_payload_gives_its_number_back(class_id: int, number: int) -> None:
    content = payload(class_id, number)
    assert number_in(class_id, content) == number
    assert PAYLOAD_BYTES_MIN <= len(content) <= PAYLOAD_BYTES_MAX
    assert DELIMITER not in content


@given(CLASSES, NUMBERS, st.data())
def test_a_changed_payload_has_no_number(class_id: int, number: int, data: st.DataObject) -> None:
    content = bytearray(payload(class_id, number))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    assert number_in(class_id, bytes(content)) == DAMAGED


@given(CLASSES, NUMBERS, st.binary(max_size=80))
def test_a_payload_of_another_class_or_length_has_no_number(
    class_id: int, number: int, other: bytes
) -> None:
    content = payload(class_id, number)
    assert number_in((class_id + 1) & 0xFFFF, content) == DAMAGED
    assert number_in(class_id, content[:-1]) == DAMAGED
    assert number_in(class_id, content + b"!") == DAMAGED
    assert number_in(class_id, other) == DAMAGED


def test_what_is_written_down_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    rows = [(1, False, 0, 0), (2, True, 10**9, 7), (0xFFFF, False, DAMAGED, (1 << 31) - 1)]
    notebook = Notebook(path)
    notebook.write(rows[:2])
    notebook.write(rows[2:])
    notebook.close()
    assert [tuple(row) for row in read(path).tolist()] == rows


def test_a_torn_record_at_the_end_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    notebook = Notebook(path)
    notebook.write([(1, False, n, n) for n in range(3)])
    notebook.close()
    whole = path.read_bytes()
    for cut in range(1, RECEIPT.itemsize + 1):
        path.write_bytes(whole[:-cut])
        assert read(path)["number"].tolist() == [0, 1]
