"""A stream that may get another leader, or be full, as the far end of a lane: few messages are
under way at once.

Rule 1: some messages are said together, and nothing more before the stream has answered all of
them. While it gets another leader some are lost on their way to the old one, and what stands behind
these is stored before them if the new one leads before it has arrived; so is what arrives when a
stream that was full has room again. With one under way, as it is unless more are asked for, nothing
stands behind it: order holds.
Rule 2: behind what the stream has not taken, and may take later, nothing is said: it counts as
refused for the same reason, and all of it is sent again in its order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simplebus.bridge.interfaces import STREAM_FULL, SourceBatch, TargetBatch, Refusal
from simplebus.bridge.nats_connection import NatsWire
from simplebus.bridge.target.nats import FarNats, body_of

UNDER_WAY_MESSAGES = 1
"""Of 1,024 some were overtaken at 2 of 246 changes of the leader, of 24,576 at 6 of 56."""
_MESSAGE_BYTES = 512
"""Of messages that are longer than this fewer are under way: they take longer to arrive."""
_ROUNDS_MAX = 512
"""Of a batch that takes longer, more would have to be sent again when a connection is lost."""


class FarFew(FarNats):
    """One connection, and a stream."""

    def __init__(self, wire: NatsWire, *known: Any, under_way: int, **more: Any) -> None:
        """So many messages are under way at most."""
        super().__init__(wire, *known, **more)
        self._under_way = under_way
        self._part = self._row = self._begun = 0
        """Of the first batch: what is to be said next, from which of its rows on, and how many of
        the batch have been said."""
        self._later: Refusal | None = None
        """Why nothing behind it is said of what waits."""

    def make(self, found: SourceBatch) -> TargetBatch:
        made = super().make(found.limit(_ROUNDS_MAX * self._under_way))
        body_of(made).room = min(self._under_way, self._looked.room)
        return made

    def send(self, made: TargetBatch) -> None:
        body_of(made).missing = np.ones(made.count, np.bool_)
        self._looked.note(self._near, made)
        self._sent.append(made)
        if len(self._sent) == 1:
            self._begin()

    async def settle(self) -> list[Refusal]:
        made = self._sent[0]
        if self._later is None:
            await self._dealt_with(made)
            self._hear_complaints()
        self._look_if_later(made)
        await self._note_mapped(made)
        self._sent.popleft()
        if not self._sent:
            self._later = None
        elif self._later is None:
            self._begin()
        return body_of(made).refusals

    async def _pub_acks(self) -> None:
        """Wait for some, when all is said that may be. Of what is said all may be answered, and
        nothing be left to say."""
        made = self._sent[0]
        body = body_of(made)
        if not body.missing[: self._begun].any():
            if body.unheard:
                await self._sort_unheard(made)
            self._look_if_later(made)
            if body.missing.any():
                self._say_some(made)
            else:
                return
        await super()._pub_acks()

    def _begin(self) -> None:
        self._part = self._row = self._begun = 0
        self._say_some(self._sent[0])

    def _say_some(self, made: TargetBatch) -> None:
        """Say what may be under way at once; but not what is known to be refused."""
        body, most = body_of(made), min(self._under_way, self._looked.room)
        left, room = most, _MESSAGE_BYTES * most
        while left and self._part < len(body.said):
            said, count = body.said[self._part], body.counts[self._part]
            size = len(said) // count
            fitting = max(room // size, int(left == most))
            rows = min(count - self._row, left, fitting)
            if not rows:
                break
            if body.missing[self._begun : self._begun + rows].any():
                self._core.write(said[self._row * size : (self._row + rows) * size])
                left -= rows
                room -= rows * size
            self._begun += rows
            self._row += rows
            if self._row == count:
                self._part, self._row = self._part + 1, 0
        self._wire.link.flush()

    def _look_if_later(self, made: TargetBatch) -> None:
        """If some of a batch is to be sent again later, so is what of it is not known."""
        body = body_of(made)
        refused = (each for each in body.refusals if each.code == STREAM_FULL)
        why = self._later = self._later or next(refused, None)
        if why is not None:
            for sequence in made.sequences[body.missing].tolist():
                body.refusals.append(Refusal(sequence, why.code, why.sentence))
            body.missing[:] = False
