"""Subjects as numbers.

Rule 1: equality of bytes decides, never of hashes.
"""

from __future__ import annotations

from simplebus.nats.limits import SUBJECTS_MAX


class SubjectTable:
    """Of one front."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        """By number."""
        self.generation = 0
        """Grows when all are forgotten."""
        self._numbers: dict[bytes, int] = {}

    def number(self, subject: bytes) -> int:
        """This subject's."""
        number = self._numbers.get(subject)
        if number is None:
            if len(self.names) >= SUBJECTS_MAX:
                self.names.clear()
                self._numbers.clear()
                self.generation += 1
            number = self._numbers[subject] = len(self.names)
            self.names.append(subject)
        return number
