"""What a door remembers of the messages that a consumer sends it, by their sequences in the stream.

Rule 1: what was acknowledged is known, should it come again: a server that was killed forgets what
it was deliveries a moment before, and a consumer that was deleted is made again from the floor on.
Rule 2: of messages that came before, none is younger than the newest_time. Where one is, the stream
came back with less than it had, and its sequences are those of other messages: nothing is known.

    acknowledged, as the consumer says   floor   acknowledged or not   highest   new
    ─────────────────────────────────────────┼──────────────────────────────┼─────────►
"""

from __future__ import annotations

import numpy as np

from simplebus.core.protocol.frames import Flags, Integers
from simplebus.core.redelivery.sequence_set import SequenceSet
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamDeliveries

RANGES_MAX = 64 * 1024
"""Of more ranges that were acknowledged, the first ones are forgotten: they may come again."""
CLOCK_SKEW_SECONDS = 1.0
"""Two servers' clocks differ by less, and no server loses what it has and is back within that."""


class AckedSequences:
    """Of one position's messages."""

    def __init__(self) -> None:
        self.highest = 0
        """The last message of the stream that was taken; 0 for none."""
        self.floor = 0
        """Everything before it is acknowledged, as the consumer says; 0 where it has not."""
        self._lowest = 0
        """The first message of the stream that was taken; 0 for none."""
        self._newest_time = 0.0
        """When the last message was stored that was taken: seconds since 1970."""
        self._acked = SequenceSet()
        """What is acknowledged from the floor on."""

    def record_received(self, deliveries: JetStreamDeliveries) -> None:
        """These have come, one at least."""
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
        """From which message on another consumer is to begin: all before it is acknowledged, or
        was never sent; 0 if that is not known."""
        return self.floor or self._lowest

    def shows_rollback(self, deliveries: JetStreamDeliveries) -> bool:
        """Whether these show that the stream came back with less than it had."""
        before = deliveries.sequences <= self.highest
        newest_time = (self._newest_time + CLOCK_SKEW_SECONDS) * 1e9
        return bool(before.any()) and bool((deliveries.times[before] > newest_time).any())

    def add(self, sequences: Integers) -> None:
        """These, which ascend, are acknowledged."""
        self._acked.update(_ranges(sequences))
        if self._acked.range_count > RANGES_MAX:
            self._acked.remove(0, list(self._acked)[RANGES_MAX // 2][0])

    def raise_floor(self, floor: int) -> None:
        """The consumer says that everything before this one is acknowledged."""
        if floor > self.floor:
            self.floor = floor
            self._acked.remove(0, floor)

    def acked_flags(self, sequences: Integers) -> Flags:
        """Which of these are known to be acknowledged: shape (n,)."""
        found = sequences < self.floor
        for row in np.flatnonzero((sequences >= self.floor) & (sequences <= self.highest)).tolist():
            found[row] = self._acked.overlaps(int(sequences[row]), int(sequences[row]) + 1)
        return found


def _ranges(numbers: Integers) -> list[tuple[int, int]]:
    """Ascending numbers as ranges first..last-1."""
    if not numbers.size:
        return []
    edges = np.flatnonzero(np.diff(numbers) != 1) + 1
    firsts = numbers[np.concatenate([[0], edges])]
    lasts = numbers[np.concatenate([edges - 1, [numbers.size - 1]])] + 1
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
