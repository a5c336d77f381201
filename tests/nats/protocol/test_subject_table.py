"""Subject numbers: the arrays agree with the dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.nats.limits import BULK_SUBJECT_BYTES_MAX
from simplebus.nats.protocol import subject_table as tables
from simplebus.nats.protocol.subject_table import SubjectTable, have_no_blanks
from tests.nats.protocol.numbered_subjects import number_subjects

SUBJECTS = st.binary(min_size=1, max_size=20) | st.sampled_from(
    [b"a", b"a\0", b"a" * 8, b"a" * 8 + b"\0", b"a" * 16, b"a" * 17, b"a" * BULK_SUBJECT_BYTES_MAX]
)


def find(table: SubjectTable, subjects: list[bytes]) -> list[int]:
    return table.find(*number_subjects(subjects)).tolist()


def add_unknown(table: SubjectTable, subjects: list[bytes]) -> list[int]:
    """Number the unknown subjects, as the bulk parser does."""
    found = table.find(*number_subjects(subjects))
    unknown_subjects = [
        subject for subject, number in zip(subjects, found.tolist(), strict=True) if number < 0
    ]
    table.reserve(len(unknown_subjects))
    if unknown_subjects:
        found[found < 0] = table.assign_numbers(
            unknown_subjects, *number_subjects(unknown_subjects)
        )
    return found.tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(SUBJECTS, min_size=1, max_size=20), max_size=3),
    st.lists(SUBJECTS, min_size=1, max_size=30),
)
def test_find_returns_known_numbers(
    known_batches: list[list[bytes]], other_subjects: list[bytes]
) -> None:
    table = SubjectTable()
    numbers: dict[bytes, int] = {}
    for subjects in known_batches:
        found = add_unknown(table, subjects)
        for subject in subjects:
            numbers.setdefault(subject, len(numbers))
        assert found == [numbers[subject] for subject in subjects]
        assert table.names == list(numbers)
    all_subjects = other_subjects + list(numbers)
    assert find(table, all_subjects) == [numbers.get(subject, -1) for subject in all_subjects]


def test_equal_hashes_are_resolved_by_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_FACTOR", 0)
    table = SubjectTable()
    subjects = [b"s.%d" % n for n in range(7)] + [b"a", b"a\0", b"sames.ames.1"]
    for _ in range(3):
        assert add_unknown(table, subjects) == list(range(10))
    found = find(table, [*subjects, b"other", b"sames.ames.2", b"sames.ames.12"])
    assert found == [-1] * 9 + [9] + [-1] * 3
    colliding = SubjectTable()
    assert add_unknown(colliding, [b"a\0"]) == [0]
    assert find(colliding, [b"a", b"a\0", b"a\0\0"]) == [-1, 0, -1]


def test_few_subjects_need_the_dict() -> None:
    table = SubjectTable()
    subjects = [b"orders.%d.paid" % n for n in range(60_000)]
    assert add_unknown(table, subjects) == list(range(60_000))
    found = np.array(find(table, subjects))
    assert ((found == np.arange(60_000)) | (found == -1)).all()
    assert np.count_nonzero(found == -1) < 600


def test_full_table_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SUBJECTS_MAX", 4)
    table = SubjectTable()
    assert add_unknown(table, [b"%d" % n for n in range(4)]) == [0, 1, 2, 3]
    assert add_unknown(table, [b"2", b"3"]) == [2, 3]
    assert table.generation == 0
    assert add_unknown(table, [b"new"]) == [0]
    assert (table.generation, table.names) == (1, [b"new"])
    assert find(table, [b"2", b"new"]) == [-1, 0]
    table.reserve(3)
    assert table.generation == 1
    table.reserve(4)
    assert (table.generation, table.names) == (2, [])


def test_finds_blanks_and_tabs_at_any_offset() -> None:
    subjects = [b"a", b"\x1f\x21\x08\x0a\r\0\xa0\x89" * 3]
    for length in (1, 7, 8, 9, 16, 40):
        for index in range(length):
            for byte in (b" ", b"\t", b"!"):
                subjects.append(b"x" * index + byte + b"x" * (length - index - 1))
    valid = [not {*b" \t"} & {*subject} for subject in subjects]
    assert have_no_blanks(*number_subjects(subjects)).tolist() == valid
