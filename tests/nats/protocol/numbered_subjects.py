"""Subjects in one buffer, as the bulk parser passes them to the subject table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simplebus.core.protocol.frames import Words, unaligned
from simplebus.nats.protocol.subject_table import Indexes, SubjectNumbers, SubjectTable


class SubjectBuffer(NamedTuple):
    """Subjects back to back in a buffer."""

    text: Words
    starts: Indexes
    lengths: Indexes


def number_subjects(subjects: list[bytes]) -> SubjectBuffer:
    lengths = np.array([len(subject) for subject in subjects], np.int64)
    data = np.frombuffer(b"".join(subjects) + bytes(16), np.uint8)
    return SubjectBuffer(unaligned(data, np.dtype("<u8")), np.cumsum(lengths) - lengths, lengths)


def numbered(table: SubjectTable, subjects: list[bytes]) -> SubjectNumbers:
    """Return the numbers of subjects; new subjects are added."""
    table.reserve(len(subjects))
    return np.array(table.assign_numbers(subjects, *number_subjects(subjects)), np.int32)
