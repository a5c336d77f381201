"""What a lane needs of its two ends, whatever they are.

Rule 1: a near end gives messages in the order of their sequences, as often as it is asked, until it
is told that they are copied. A far end says when they are safe there, and which ones it refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from simplebus.bridge.checkpoint import Mark
from simplebus.bridge.transform import Left, Piece
from simplebus.core.errors import BusConnectionError, BusError
from simplebus.core.protocol.frames import Integers

STREAM_FULL = "jetstream_full"
"""A refusal of a stream that says nothing of the message."""


class FatalConfigurationError(BusError):
    """A lane can never work as it is set up. It says what is to be changed."""


class TakenOverError(BusConnectionError):
    """Another one has come under the name of this lane, and has taken over its connection."""


@dataclass(slots=True)
class SourceBatch:
    """Messages of the near end, in the order of their sequences."""

    runs: list[Piece]
    first_sequence: int
    """The sequence from which on they were asked for; what is missing behind it is gone."""
    next_sequence: int
    """The sequence behind them."""
    head: int
    """The sequence behind all that the near end can show now."""
    missed_count: int = 0
    """How many were gone before they could be copied."""
    read_at: float = 0.0
    """To what time ages are counted, in seconds since 1970; 0 where they are not known."""
    altered_count: int = 0
    """How many are otherwise here than at the near end, as a bus has no place for something,"""
    alteration: str = ""
    """and what that is, of the first of them."""

    @property
    def oldest_age_seconds(self) -> float:
        """Seconds since the first of them was accepted, where that is known."""
        ages = self.runs[0].ages if self.runs else 0.0
        return ages if isinstance(ages, float) else float(ages[0])

    def below(self, end: int) -> SourceBatch:
        """Those below this sequence."""
        counts = [int(np.searchsorted(piece.sequences, end)) for piece in self.runs]
        pieces = [p.part(0, n) for p, n in zip(self.runs, counts, strict=True) if n]
        return SourceBatch(pieces, self.first_sequence, min(self.next_sequence, end), self.head, read_at=self.read_at)

    def limit(self, count: int) -> SourceBatch:
        """So many of them, from the first one on."""
        for piece in self.runs:
            if piece.count > count:
                return self.below(int(piece.sequences[count]))
            count -= piece.count
        return self

    def starting_at(self, first: int) -> SourceBatch:
        """Those from this sequence on."""
        counts = [int(np.searchsorted(piece.sequences, first)) for piece in self.runs]
        pieces = [
            p.part(n, p.count) for p, n in zip(self.runs, counts, strict=True) if n < p.count
        ]
        return SourceBatch(pieces, max(first, self.first_sequence), self.next_sequence, self.head, read_at=self.read_at)

    def concat(self, other: SourceBatch) -> SourceBatch:
        """These, and the other ones behind them."""
        head = max(self.head, other.head)
        return SourceBatch([*self.runs, *other.runs], self.first_sequence, other.next_sequence, head, read_at=self.read_at)

    def fingerprint(self, sequence: int) -> Mark | None:
        """That of the message with this sequence; None where it is none of them."""
        for piece in reversed(self.runs):
            row = int(np.searchsorted(piece.sequences, sequence))
            if row < piece.count and piece.sequences[row] == sequence:
                age = piece.ages if isinstance(piece.ages, float) else float(piece.ages[row])
                frame = bytes(memoryview(piece.raw)[piece.bounds[row] : piece.bounds[row + 1]])
                return Mark.of(frame, self.read_at - age if self.read_at else 0.0)
        return None

    def select(self, wanted: Integers) -> list[Piece]:
        """Those with these sequences."""
        parts = []
        for piece in self.runs:
            rows = np.flatnonzero(np.isin(piece.sequences, wanted))
            for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
                if run.size:
                    parts.append(piece.part(int(run[0]), int(run[-1]) + 1))
        return parts


@dataclass(slots=True)
class TargetBatch:
    """Some of them as the far end takes them."""

    sequences: Integers
    next_sequence: int
    """The near end's sequence behind them, and behind what stays."""
    encoded: object
    """The far end's own."""
    skipped_counts: dict[Left, int] = field(default_factory=dict)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    """Sequences of what could never be taken, and why."""
    source_batch: SourceBatch | None = None
    """What it is made of: of that is sent again what could not be taken yet."""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """The sequences, half-open, where the far end has to know them so;"""
    last_fingerprint: Mark | None = None
    """and that of the last message."""

    oldest_accepted_at: float = 0.0
    """When the near end accepted the first of what was found, or of NATS, gave it, by the
    monotonic clock."""

    @property
    def count(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The far end has not taken a message."""

    sequence: int
    """-1: the announcement of what was to follow."""
    code: str
    sentence: str


class Near(Protocol):
    """Where messages come from."""

    identity: str
    """What it is in the path of a message."""
    storage_id: str
    """Whose sequences these are: in another memory, other messages have them."""
    head: int
    """The sequence behind all that it had when it was opened."""

    async def read(self, at: int) -> SourceBatch:
        """Messages from a sequence on, none if there are none yet."""

    async def read_fingerprint(self, sequence: int) -> Mark | None:
        """That of the message with this sequence; None where it is gone."""

    async def wait_for_message(self, at: int) -> int:
        """Return when there are some from this sequence on: the first one that is."""

    async def commit_position(self, at: int, *, now: bool) -> None:
        """All below are copied: have it remembered, `now` or soon."""

    async def measure_backlog(self, at: int) -> tuple[int, float]:
        """How many messages from this sequence on it has now, as far as it can be said those that
        are to be copied; and how many seconds ago the first one was accepted, 0 where that is not
        known. May be asked while something else is."""

    async def give_up(self, refusals: Sequence[Refusal]) -> int:
        """These can never be copied: have them kept with the dead letters. Returns how many are not
        there any more."""

    def left(self, at: int) -> int:
        """How many messages from this sequence on are gone with this end."""


class Far(Protocol):
    """Where they go."""

    identity: str
    """Whose memory they go to; empty where that is not known."""

    @property
    def confirmed(self) -> int:
        """How many messages of what is not settled need not be waited for any more."""

    @property
    def must_wait(self) -> bool:
        """Whether it is not yet safe to send what is announced."""

    def make(self, found: SourceBatch) -> TargetBatch:
        """What is to be sent of some messages; of the first ones, where those are too many."""

    def has_room(self, planned: Sequence[TargetBatch]) -> bool:
        """Whether more may be announced than this, behind what is under way."""

    def announce(self, planned: Sequence[TargetBatch]) -> None:
        """Say what will be sent next, in this order, before each of them is; what was announced
        before and is none of it will not be."""

    async def announced(self) -> list[Refusal]:
        """Return when it is safe to send what is next; or why that cannot be said."""

    def send(self, made: TargetBatch) -> None:
        """Send what is next."""

    async def settle(self) -> list[Refusal]:
        """Return when the first of what was sent is safe, or refused."""
