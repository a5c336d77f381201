"""Protocols of a copier's source and target, and the batches that pass between them.

A source returns messages in sequence order. After a restart it returns them again from the last
committed position. A target reports which messages it stored and which it refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from simplebus.bridge.checkpoint import MessageFingerprint
from simplebus.bridge.transform import MessageRun, SkipReason
from simplebus.core.errors import BusConnectionError, BusError
from simplebus.core.protocol.frames import Integers

STREAM_FULL = "jetstream_full"
"""Refusal code of a full stream. It does not depend on the message."""


class FatalConfigurationError(BusError):
    """A copier can never work with its configuration. The message says what to change."""


class TakenOverError(BusConnectionError):
    """Another bridge connected with the same name, and the bus closed this connection."""


@dataclass(slots=True)
class SourceBatch:
    """Messages that were read from the source, in sequence order."""

    runs: list[MessageRun]
    first_sequence: int
    """Sequence from which messages were requested. The source no longer has the missing
    messages.
    """
    next_sequence: int
    """Sequence after the last message."""
    head: int
    """Next sequence after all messages that the source can deliver now."""
    missed_count: int = 0
    """Messages that the source dropped before they were copied."""
    read_at: float = 0.0
    """Unix time in seconds to which the ages refer; 0 if the ages are unknown."""
    altered_count: int = 0
    """Messages that a bus cannot represent exactly."""
    alteration: str = ""
    """Description of the first of these changes."""

    @property
    def oldest_age_seconds(self) -> float:
        """Seconds since the source accepted the first message; 0 if unknown."""
        ages = self.runs[0].ages if self.runs else 0.0
        return ages if isinstance(ages, float) else float(ages[0])

    def below(self, end: int) -> SourceBatch:
        """Return the messages with sequences below `end`."""
        counts = [int(np.searchsorted(run.sequences, end)) for run in self.runs]
        runs = [run.slice(0, n) for run, n in zip(self.runs, counts, strict=True) if n]
        return SourceBatch(
            runs, self.first_sequence, min(self.next_sequence, end), self.head, read_at=self.read_at
        )

    def limit(self, count: int) -> SourceBatch:
        """Return the first `count` messages."""
        for run in self.runs:
            if run.count > count:
                return self.below(int(run.sequences[count]))
            count -= run.count
        return self

    def starting_at(self, first: int) -> SourceBatch:
        """Return the messages from sequence `first` on."""
        counts = [int(np.searchsorted(run.sequences, first)) for run in self.runs]
        runs = [
            run.slice(n, run.count)
            for run, n in zip(self.runs, counts, strict=True)
            if n < run.count
        ]
        return SourceBatch(
            runs,
            max(first, self.first_sequence),
            self.next_sequence,
            self.head,
            read_at=self.read_at,
        )

    def concat(self, other: SourceBatch) -> SourceBatch:
        """Return these messages followed by those of `other`."""
        head = max(self.head, other.head)
        return SourceBatch(
            [*self.runs, *other.runs],
            self.first_sequence,
            other.next_sequence,
            head,
            read_at=self.read_at,
        )

    def fingerprint(self, sequence: int) -> MessageFingerprint | None:
        """Return the fingerprint of a message, or None if the batch does not contain it."""
        for run in reversed(self.runs):
            row = int(np.searchsorted(run.sequences, sequence))
            if row < run.count and run.sequences[row] == sequence:
                age = run.ages if isinstance(run.ages, float) else float(run.ages[row])
                frame = bytes(memoryview(run.raw)[run.bounds[row] : run.bounds[row + 1]])
                return MessageFingerprint.from_frame(
                    frame, self.read_at - age if self.read_at else 0.0
                )
        return None

    def select(self, sequences: Integers) -> list[MessageRun]:
        """Return the messages with the given sequences, in runs."""
        parts = []
        for run in self.runs:
            rows = np.flatnonzero(np.isin(run.sequences, sequences))
            for part in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
                if part.size:
                    parts.append(run.slice(int(part[0]), int(part[-1]) + 1))
        return parts


@dataclass(slots=True)
class TargetBatch:
    """Messages that were prepared for the target."""

    sequences: Integers
    next_sequence: int
    """Source sequence after the last message, including skipped messages."""
    encoded: object
    """Encoded messages, of a type that only the target uses."""
    skipped_counts: dict[SkipReason, int] = field(default_factory=dict)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    """Sequences of messages that the target can never store, with the reasons."""
    source_batch: SourceBatch | None = None
    """Source messages of this batch, from which refused ones are prepared again."""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """Half-open ranges of the sequences, for a target that keeps bridge records."""
    last_fingerprint: MessageFingerprint | None = None
    """Fingerprint of the last message, for targets that detect a restored source."""

    oldest_accepted_at: float = 0.0
    """Monotonic time at which the source accepted the oldest message; for NATS, when it arrived."""

    @property
    def count(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message, or an announcement, that the target did not accept."""

    sequence: int
    """Sequence of the message; -1 for an announcement."""
    code: str
    sentence: str


class MessageSource(Protocol):
    """Source from which a copier reads messages."""

    identity: str
    """Name of the source in the bridge path of a message."""
    storage_id: str
    """Identity of the storage that assigned the sequences. Sequences of another storage are not
    comparable.
    """
    head: int
    """Sequence after the last message at the time the source was opened."""

    async def read(self, sequence: int) -> SourceBatch:
        """Return messages from `sequence` on; the batch is empty if none is stored yet."""

    async def read_fingerprint(self, sequence: int) -> MessageFingerprint | None:
        """Return the fingerprint of a message, or None if it was removed."""

    async def wait_for_message(self, sequence: int) -> int:
        """Wait for a message at or after `sequence`. Returns the sequence from which to read."""

    async def commit_position(self, sequence: int, *, now: bool) -> None:
        """Store that all messages below `sequence` were copied: at once with `now`, or soon."""

    async def measure_backlog(self, sequence: int) -> tuple[int, float]:
        """Return the count and age of the messages from `sequence` on.

        Can be called while another call of this source is running.

        Returns:
            The number of messages to copy, as counted by the source, and the seconds since
            the source accepted the first one; 0 seconds if unknown.
        """

    async def dead_letter(self, refusals: Sequence[Refusal]) -> int:
        """Store the refused messages as dead letters. Returns how many of them the source no
        longer has.
        """

    def count_lost_on_close(self, sequence: int) -> int:
        """Return how many messages from `sequence` on are lost when this connection closes."""


class MessageTarget(Protocol):
    """Target to which a copier sends messages."""

    identity: str
    """Identity of the bus that stores the messages; empty if unknown."""

    @property
    def confirmed_count(self) -> int:
        """Number of confirmed messages in batches that are not settled yet."""

    @property
    def must_wait_for_announcement(self) -> bool:
        """True if the announced batches may not be sent yet."""

    def prepare(self, source_batch: SourceBatch) -> TargetBatch:
        """Encode messages for the target: all of them, or only the first ones if there are too
        many.
        """

    def has_room(self, planned: Sequence[TargetBatch]) -> bool:
        """Return True if one more batch may be announced, besides `planned` and the batches in
        flight.
        """

    def announce(self, planned: Sequence[TargetBatch]) -> None:
        """Announce the batches that will be sent next, in this order. Replaces earlier
        announcements.
        """

    async def wait_announced(self) -> list[Refusal]:
        """Wait until the next batch may be sent. Returns refusals of the announcement."""

    def send(self, batch: TargetBatch) -> None:
        """Send the next announced batch."""

    async def settle_oldest(self) -> list[Refusal]:
        """Wait until the oldest sent batch is stored or refused. Returns its refusals."""
