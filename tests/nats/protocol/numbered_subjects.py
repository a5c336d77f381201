"""Subjects that a table is asked for, as a stretch of messages has them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simplebus.core.protocol.frames import Words, unaligned
from simplebus.nats.protocol.subject_table import Indexes, SubjectNumbers, SubjectTable


class Asked(NamedTuple):
    """Subjects that lie one behind the other."""

    words: Words
    starts: Indexes
    lengths: Indexes


def asked(subjects: list[bytes]) -> Asked:
    lengths = np.array([len(subject) for subject in subjects], np.int64)
    data = np.frombuffer(b"".join(subjects) + bytes(16), np.uint8)
    return Asked(unaligned(data, np.dtype("<u8")), np.cumsum(lengths) - lengths, lengths)


def numbered(table: SubjectTable, subjects: list[bytes]) -> SubjectNumbers:
    """Their numbers, those that are new included."""
    table.reserve(len(subjects))
    return np.array(table.assign_numbers(subjects, *asked(subjects)), np.int32)
