"""What a lane was given of NATS and is not through with, and the dead letters of some of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from simplebus.bridge import letters
from simplebus.bridge.ends import Refusal
from simplebus.bridge.nats_framer import Framer
from simplebus.core.frames import Integers
from simplebus.nats.client import jetstream
from simplebus.nats.client.events import Messages


class Given:
    """Messages that were given out and that the lane is not through with."""

    def __init__(self) -> None:
        self._parts: deque[tuple[Messages, Integers]] = deque()
        self.count = 0

    def add(self, messages: Messages, sequences: Integers) -> None:
        self._parts.append((messages, sequences))
        self.count += messages.count

    def clear(self) -> None:
        self._parts.clear()
        self.count = 0

    def take(self, at: int) -> list[tuple[Messages, Integers]]:
        """Those below this sequence, which are not kept any longer."""
        taken, rest = [], deque[tuple[Messages, Integers]]()
        for messages, sequences in self._parts:
            through = sequences < at
            if through.any():
                taken.append((messages.pick(through), sequences[through]))
                self.count -= taken[-1][0].count
            if not through.all():
                rest.append((messages.pick(~through), sequences[~through]))
        self._parts = rest
        return taken

    def of(self, refusals: Sequence[Refusal]) -> list[tuple[Messages, Integers]]:
        """Those that these are about."""
        wanted, found = np.array([each.sequence for each in refusals]), []
        for messages, sequences in self._parts:
            those = np.isin(sequences, wanted)
            if those.any():
                found.append((messages.pick(those), sequences[those]))
        return found


async def bury(
    found: Sequence[tuple[Messages, Integers]],
    refusals: Sequence[Refusal],
    open: letters.Open,
    framer: Framer,
) -> None:
    """Have a dead letter stored of each of these messages."""
    if not found:
        return
    why = {each.sequence: each for each in refusals}
    async with open() as written:
        for messages, sequences in found:
            told = jetstream.deliveries(messages)
            times = np.where(told.good, told.times / 1e9, 0.0).tolist()
            piece = framer.piece(messages, sequences)
            framer.odd()  # It was told when they were found.
            for row, sequence in enumerate(sequences.tolist()):
                frame = bytes(piece.part(row, row + 1).raw)
                written.add(frame, why[sequence], accepted=times[row], now=time.time())
