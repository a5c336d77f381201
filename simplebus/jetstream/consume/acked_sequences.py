"""Acknowledged stream sequences of one position.

A NATS server that was killed forgets the last acks, and a deleted consumer is recreated from its
ack floor; this class recognizes the messages that are then delivered again. If an old sequence is
stored later than the newest known message, the stream was rolled back: its sequences now belong to
other messages, and nothing is known about them.

    acknowledged, as reported by the consumer   floor   acknowledged or not   highest   new
    ──────────────────────────────────────────────┼──────────────────────────────┼─────────►
"""

from __future__ import annotations

import numpy as np

from simplebus.core.protocol.frames import Flags, Integers
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamDeliveries

RANGES_MAX = 64 * 1024
"""With more ranges of acknowledged sequences the lower half is forgotten; those messages may be
delivered again.
"""
CLOCK_SKEW_SECONDS = 1.0
"""Upper limit of the difference between two servers' clocks. A rollback takes longer than this."""


class AckedSequences:
    """Sequences that a position received and acknowledged."""

    def __init__(self) -> None:
        self.highest = 0
        """Highest received stream sequence; 0 for none."""
        self.floor = 0
        """Lowest sequence that the consumer may not have acknowledged; 0 if unknown."""
        self._lowest = 0
        """Lowest received stream sequence; 0 for none."""
        self._newest_time = 0.0
        """Storage time of the newest received message: seconds since 1970."""
        self._acked = SequenceSet()
        """Acknowledged sequences from the floor on."""

    def record_received(self, deliveries: JetStreamDeliveries) -> None:
        """Record deliveries, at least one."""
        row = int(deliveries.sequences.argmax())
        if deliveries.sequences[row] >= self.highest:
            self.highest = int(deliveries.sequences[row])
            self._newest_time = max(
                self._newest_time, jetstream_codec.parse_stored_time(deliveries.messages, row)
            )
        lowest = int(deliveries.sequences.min())
        self._lowest = min(self._lowest or lowest, lowest)

    @property
    def restart_sequence(self) -> int:
        """Sequence at which a recreated consumer must start; 0 if unknown."""
        return self.floor or self._lowest

    def shows_rollback(self, deliveries: JetStreamDeliveries) -> bool:
        """Return True if these deliveries prove that the stream lost messages."""
        before = deliveries.sequences <= self.highest
        newest_time = (self._newest_time + CLOCK_SKEW_SECONDS) * 1e9
        return bool(before.any()) and bool((deliveries.times[before] > newest_time).any())

    def add(self, sequences: Integers) -> None:
        """Record ascending sequences as acknowledged."""
        self._acked.update(_ranges(sequences))
        if self._acked.range_count > RANGES_MAX:
            self._acked.remove(0, list(self._acked)[RANGES_MAX // 2][0])

    def raise_floor(self, floor: int) -> None:
        """Record that the consumer has acknowledged everything before `floor`."""
        if floor > self.floor:
            self.floor = floor
            self._acked.remove(0, floor)

    def acked_flags(self, sequences: Integers) -> Flags:
        """Return the flags of the sequences that are known to be acknowledged: shape (n,)."""
        found = sequences < self.floor
        for row in np.flatnonzero((sequences >= self.floor) & (sequences <= self.highest)).tolist():
            found[row] = self._acked.overlaps(int(sequences[row]), int(sequences[row]) + 1)
        return found


def _ranges(numbers: Integers) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges first..last-1."""
    if not numbers.size:
        return []
    edges = np.flatnonzero(np.diff(numbers) != 1) + 1
    firsts = numbers[np.concatenate([[0], edges])]
    lasts = numbers[np.concatenate([edges - 1, [numbers.size - 1]])] + 1
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
