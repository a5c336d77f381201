"""Last failure reasons that consumers gave in nacks, per message.

The memory is bounded for the whole bus: the oldest reasons are dropped first, and only the text is
lost. Sequences are never reused, so a stale entry never describes another message.
"""

from __future__ import annotations

from typing import Protocol

from simplebus.core.limits import FAILURE_REASONS_BYTES_MAX, FAILURE_REASONS_MAX
from simplebus.core.redelivery.ack_window import AckWindow

# Approximate memory of one entry without its text.
_ENTRY_BYTES = 200


class _Position(Protocol):
    @property
    def window(self) -> AckWindow: ...


class FailureReasons:
    """Failure reasons by position and sequence.

    Invariant: at most `count_max` entries with `bytes_max` bytes together.
    """

    def __init__(
        self, *, count_max: int = FAILURE_REASONS_MAX, bytes_max: int = FAILURE_REASONS_BYTES_MAX
    ) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._texts: dict[tuple[_Position, int], str] = {}
        """Reasons by position and sequence, oldest first."""
        self._sequences: dict[_Position, set[int]] = {}
        """Sequences with a reason, by position. No set is empty."""
        self._bytes = 0

    def __len__(self) -> int:
        """Return the number of messages with a reason."""
        return len(self._texts)

    def record(self, position: _Position, first: int, last: int, text: str) -> None:
        """Store the reason of messages first..last-1. An empty text keeps the earlier reason."""
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

    def get(self, position: _Position, sequence: int) -> str:
        """Return the last reason of a message; empty if none is stored."""
        return self._texts.get((position, sequence), "")

    def forget_acked(self) -> None:
        """Drop the oldest reasons while their messages are below the floor of their position."""
        while self._texts:
            position, sequence = next(iter(self._texts))
            if sequence >= position.window.floor:
                return
            self._drop(position, sequence)

    def forget_position(self, position: _Position) -> None:
        """Drop all reasons of a position."""
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
        """Raise AssertionError unless the invariants hold."""
        assert len(self._texts) <= self._count_max
        assert self._bytes <= self._bytes_max
        assert self._bytes == sum(map(_size, self._texts.values()))
        expected_keys = {
            (position, s) for position, sequences in self._sequences.items() for s in sequences
        }
        assert expected_keys == set(self._texts)
        assert all(self._sequences.values())


def _size(text: str) -> int:
    return _ENTRY_BYTES + 4 * len(text)  # A character takes at most 4 bytes.
