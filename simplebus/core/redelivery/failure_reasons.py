"""What consumers said went wrong, the last time, with messages that are to come again.

Rule 1: so many are remembered, and so many bytes of them, by the whole bus; what was said longest
ago is forgotten first. Nobody waits for that, and nothing is lost but the sentence.
Rule 2: what is remembered goes with its message, sooner or later: a sequence is never used again,
so what is still here is never said of another one.
"""

from __future__ import annotations

from typing import Protocol

from simplebus.core.limits import ERRORS_BYTES_MAX, ERRORS_MAX
from simplebus.core.redelivery.ack_window import AckWindow

# A range is so many entries; about what each takes beside its text.
_ENTRY_BYTES = 200


class _Position(Protocol):
    @property
    def window(self) -> AckWindow: ...


class LastErrors:
    """See the module's law. Invariant: at most `count_max` entries, in `bytes_max` bytes."""

    def __init__(self, *, count_max: int = ERRORS_MAX, bytes_max: int = ERRORS_BYTES_MAX) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._texts: dict[tuple[_Position, int], str] = {}
        """By position and sequence, what was said longest ago first."""
        self._sequences: dict[_Position, set[int]] = {}
        """Of which messages of a position something was said. None of them is empty."""
        self._bytes = 0

    def __len__(self) -> int:
        """How many messages something is remembered of."""
        return len(self._texts)

    def note(self, position: _Position, first: int, last: int, text: str) -> None:
        """This was said of messages first..last-1, now. What was said before stays where nothing
        is said."""
        if not text:
            return
        texts, size = self._texts, _size(text)
        for sequence in range(max(first, last - self._count_max), last):
            self._drop(position, sequence)
            texts[position, sequence] = text
            self._sequences.setdefault(position, set()).add(sequence)
            self._bytes += size
        while len(texts) > self._count_max or self._bytes > self._bytes_max:
            self._drop(*next(iter(texts)))

    def of(self, position: _Position, sequence: int) -> str:
        """What was said last of a message; empty for nothing, or nothing that is remembered."""
        return self._texts.get((position, sequence), "")

    def forget_done(self) -> None:
        """Drop what is at the front, as far as it is about messages that are done with."""
        while self._texts:
            position, sequence = next(iter(self._texts))
            if sequence >= position.window.floor:
                return
            self._drop(position, sequence)

    def forget(self, position: _Position) -> None:
        """A position is no more."""
        for sequence in list(self._sequences.get(position, ())):
            self._drop(position, sequence)

    def _drop(self, position: _Position, sequence: int) -> None:
        text = self._texts.pop((position, sequence), None)
        if text is not None:
            self._bytes -= _size(text)
            sequences = self._sequences[position]
            sequences.remove(sequence)
            if not sequences:
                del self._sequences[position]

    def check(self) -> None:
        """Raise AssertionError unless the invariant holds."""
        assert len(self._texts) <= self._count_max
        assert self._bytes <= self._bytes_max
        assert self._bytes == sum(map(_size, self._texts.values()))
        known = {(position, s) for position, held in self._sequences.items() for s in held}
        assert known == set(self._texts)
        assert all(self._sequences.values())


def _size(text: str) -> int:
    return _ENTRY_BYTES + 4 * len(text)  # As much as a character may take.
