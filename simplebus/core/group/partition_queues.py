"""Messages of one position by their key's lane: of each lane one at most may be out.

Rule 1: who comes first in a lane may be handed out; those behind it wait until it has left, in the
order of their sequences. Whoever is first stays first, whoever enters later.
Rule 2: a lane exists while something is in it. What is in lane 0 waits for nobody.
Rule 3: entering and leaving cost the same however many lanes there are.

    lane 7    12 │ 15 19        12 may be out, 15 and 19 wait
    lane 9    13 │
    lane 0    14 16 17          without a key
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

NO_LANE = 0
"""Of what has no key."""


class Lanes:
    """Of one position."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        """By sequence, the lane that it is in."""
        self._rows: dict[int, list[int]] = {}
        """By lane, who is in it: the first one, and ascending those that wait."""

    def __len__(self) -> int:
        """How many messages there are."""
        return len(self._of)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._of

    def __iter__(self) -> Iterator[int]:
        """All that are in here, in the order in which they came."""
        return iter(self._of)

    def lanes(self, sequences: Iterable[int]) -> Iterator[int]:
        """Where these are; they must be in here."""
        return map(self._of.__getitem__, sequences)

    def enter(self, sequences: Iterable[int], lanes: Iterable[int]) -> list[int]:
        """These come in, each into its lane. Returns those that may be handed out."""
        of, rows = self._of, self._rows
        free: list[int] = []
        for sequence, lane in zip(sequences, lanes, strict=True):
            of[sequence] = lane
            if not lane:
                free.append(sequence)
                continue
            row = rows.get(lane)
            if row is None:
                rows[lane] = [sequence]
                free.append(sequence)
            elif len(row) == 1 or sequence > row[-1]:
                row.append(sequence)
            else:
                insort(row, sequence, lo=1)
        return free

    def leave(self, sequences: Iterable[int]) -> list[int]:
        """These, which are in here, are dealt with. Returns who may be handed out instead."""
        of, rows = self._of, self._rows
        following: list[int] = []
        for sequence in sequences:
            lane = of.pop(sequence)
            if not lane:
                continue
            row = rows[lane]
            if len(row) == 1:
                del rows[lane]
            elif row[0] == sequence:
                del row[0]
                following.append(row[0])
            else:
                row.remove(sequence)
        return [sequence for sequence in following if sequence in of]

    def is_first(self, sequence: int) -> bool:
        """Whether it may be handed out; it must be in here."""
        lane = self._of[sequence]
        return not lane or self._rows[lane][0] == sequence

    def longest(self) -> tuple[int, int]:
        """How many lanes there are, and how many messages are in the longest one."""
        return len(self._rows), max(map(len, self._rows.values()), default=0)

    def check(self) -> None:
        """Raise AssertionError unless everybody is in one lane, and in order."""
        inside = {s: lane for lane, row in self._rows.items() for s in row}
        assert inside == {s: lane for s, lane in self._of.items() if lane}
        for row in self._rows.values():
            assert row, "an empty lane"
            assert row[1:] == sorted(set(row[1:])), row
