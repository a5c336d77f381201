"""A class of a door before a JetStream cluster as the far end of a lane.

Rule 1: a message's number there is its sequence here, so nothing has to be written down: what comes
again, through whichever door, is known by it to the stream, for as long as the cluster knows ids.
Rule 2: numbers ascend. What stays here leaves its number out, and what would have to be sent behind
others has the lane begin anew.

    sequence   7    8         9         10   11
    copied     yes  yes       no        yes  yes
    number     7    8         left out  10   11
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import numpy as np

from simplebus.bridge.ends import Found, Made, Near, Refusal
from simplebus.bridge.far import FarTerms, named_at
from simplebus.bridge.looked import Looked
from simplebus.bridge.rewriting import Copies, Rewriter
from simplebus.bridge.wires import check, wired
from simplebus.client.confirms import Waiter
from simplebus.client.link import Place
from simplebus.client.signal import Signal
from simplebus.client.wire import Wire
from simplebus.core.errors import BusConnectionError
from simplebus.core.limits import DELIMITER_BYTES, MESSAGE_ID_BITS, MESSAGE_ID_MASK

_BATCHES_MAX = 6
_MESSAGES_MAX = 24_576
"""So much is under way: the door has something to do while others are made."""
_SPAN_MAX = 1 << (MESSAGE_ID_BITS - 2)
"""Numbers that are under way are no further apart: else nobody could tell which one is ahead."""


class FarDoor:
    """One connection."""

    must_wait = False

    def __init__(
        self, wire: Wire, class_id: int, terms: FarTerms, near: Near, at: int, looked: Looked
    ) -> None:
        """`at` is the sequence whose number the connection has begun with."""
        self._near, self._looked = near, looked
        self.identity = wire.core.bus_id
        self.class_id = class_id
        self._wire, self._core = wire, wire.core
        self._at = at - wire.core.published
        """The sequence of position 0."""
        self._rewriter = Rewriter(
            class_id=class_id,
            here=near.identity,
            there=self.identity,
            channels=terms.channels,
            renaming=terms.renaming,
            hops=terms.hops,
            frame_bytes_max=wire.core.frame_bytes,
        )
        self._sent: deque[tuple[Waiter, Made]] = deque()
        """What is not settled."""
        self._done = Signal()

    @property
    def confirmed(self) -> int:
        end = self._at + self._core.confirmed
        return sum(int(np.searchsorted(made.sequences, end)) for _, made in self._sent)

    def make(self, found: Found) -> Made:
        copies = Copies()
        for piece in found.pieces:
            self._rewriter.many(piece, copies)
        made = Made(copies.numbers(), found.next, copies, copies.left, copies.refused)
        made.mark = found.mark(int(made.sequences[-1])) if made.count else None
        return made

    def has_room(self, planned: Sequence[Made]) -> bool:
        count = sum(made.count for made in planned) + sum(made.count for _, made in self._sent)
        return len(planned) + len(self._sent) < _BATCHES_MAX and count < _MESSAGES_MAX

    def announce(self, planned: Sequence[Made]) -> None:
        """Nobody there has to remember it."""

    async def announced(self) -> list[Refusal]:
        return []

    def send(self, made: Made) -> None:
        copies, core = made.body, self._core
        assert isinstance(copies, Copies)
        first, last = int(made.sequences[0]) - self._at, int(made.sequences[-1]) - self._at
        if first < core.published:
            raise BusConnectionError(
                f"what is to be sent again comes before what {self.identity} has: beginning anew"
            )
        if last - core.confirmed >= _SPAN_MAX:
            raise BusConnectionError(
                f"{last - core.confirmed} messages in a row were not copied: beginning anew"
            )
        for (raw, bounds), sequences in zip(copies.frames(), copies.sequences, strict=True):
            edges = [0, *(np.flatnonzero(np.diff(sequences) != 1) + 1).tolist(), sequences.size]
            for begin, end in pairwise(edges):
                part = memoryview(raw)[int(bounds[begin]) : int(bounds[end]) + DELIMITER_BYTES]
                core.publisher.publish_frames(
                    part,
                    bounds[begin : end + 1] - bounds[begin],
                    self.class_id,
                    left_out=int(sequences[begin]) - self._at - core.published,
                )
        self._looked.note(self._near, made)
        self._sent.append((self._wire.confirms.wait_for(first, last, self._done.set), made))
        self._wire.writer.push()

    async def settle(self) -> list[Refusal]:
        waiter, _ = self._sent[0]
        while not waiter.is_done:
            check(self._wire)
            await self._done.wait()
        self._sent.popleft()
        return [
            Refusal(self._at + position, error.code, error.sentence)
            for position, error in zip(waiter.positions, waiter.refused, strict=True)
        ]


@asynccontextmanager
async def far_door(
    place: Place, terms: FarTerms, near: Near, at: int, looked: Looked
) -> AsyncIterator[FarDoor]:
    """A connection that goes on at this sequence. Raises BusConnectionError and RefusedError."""
    core = terms.core(first=at & MESSAGE_ID_MASK)
    async with wired(place, core) as wire:
        yield FarDoor(wire, await named_at(wire, terms.class_), terms, near, at, looked)
