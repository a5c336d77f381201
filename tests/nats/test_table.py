"""Subjects as numbers: what arrays find is what the dict says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.frames import unaligned
from simplebus.nats import table as tables
from simplebus.nats.limits import SUBJECT_BYTES_FAST
from simplebus.nats.table import SubjectTable

SUBJECTS = st.binary(min_size=1, max_size=20) | st.sampled_from(
    [b"a", b"a\0", b"a" * 8, b"a" * 8 + b"\0", b"a" * 16, b"a" * 17, b"a" * SUBJECT_BYTES_FAST]
)


def find(table: SubjectTable, subjects: list[bytes]) -> list[int]:
    """By arrays, the subjects lying one behind the other."""
    lengths = np.array([len(subject) for subject in subjects], np.int64)
    data = np.frombuffer(b"".join(subjects) + bytes(16), np.uint8)
    words = unaligned(data, np.dtype("<u8"))
    return table.find(words, np.cumsum(lengths) - lengths, lengths).tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(SUBJECTS, max_size=30), st.lists(SUBJECTS, min_size=1, max_size=30))
def test_arrays_find_what_is_known(known: list[bytes], asked: list[bytes]) -> None:
    table = SubjectTable()
    numbers = {subject: table.number(subject) for subject in known}
    assert [table.names[number] for number in numbers.values()] == list(numbers)
    assert find(table, asked + known) == [numbers.get(subject, -1) for subject in asked + known]


def test_equality_decides_where_all_hashes_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_FACTOR", 0)
    table = SubjectTable()
    subjects = [b"s.%d" % n for n in range(9)]
    numbers = [table.number(subject) for subject in subjects]
    assert numbers == list(range(9))
    found = find(table, [*subjects, b"other"])
    assert set(found) == {0, -1}
    assert found[0] == 0


def test_many_subjects_are_found_and_few_only_by_the_dict() -> None:
    table = SubjectTable()
    subjects = [b"orders.%d.paid" % n for n in range(20_000)]
    for subject in subjects:
        table.number(subject)
    found = np.array(find(table, subjects))
    assert ((found == np.arange(20_000)) | (found == -1)).all()
    assert np.count_nonzero(found == -1) < 100


def test_all_are_forgotten_when_there_would_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SUBJECTS_MAX", 4)
    table = SubjectTable()
    assert [table.number(b"%d" % n) for n in range(4)] == [0, 1, 2, 3]
    assert table.generation == 0
    assert table.number(b"2") == 2
    assert table.number(b"new") == 0
    assert (table.generation, table.names) == (1, [b"new"])
    assert find(table, [b"2", b"new"]) == [-1, 0]
    table.make_room(3)
    assert table.generation == 1
    table.make_room(4)
    assert (table.generation, table.names) == (2, [])


def test_a_subject_too_long_for_arrays_has_a_number() -> None:
    table = SubjectTable()
    assert table.number(b"x" * (SUBJECT_BYTES_FAST + 1)) == 0
    assert table.number(b"") == 1
    assert table.number(b"x" * (SUBJECT_BYTES_FAST + 1)) == 0
