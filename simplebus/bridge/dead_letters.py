"""Dead letters of what a far end refuses for good.

Rule 1: a message is given up when its letter is stored, not before: whoever is told that there is
no room for it begins anew, and has lost nothing.
Rule 2: a letter is whole. What is too long for one, with the reason, lies in several, each of which
says which part of the payload it has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np

from simplebus.bridge.bus_connection import core_of, wired
from simplebus.bridge.interfaces import Refusal
from simplebus.bridge.target.nats_frames import Framer
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.transport import Endpoint
from simplebus.core import dead_letters
from simplebus.core.dead_letters import DeadMessage, DeadLetterCause
from simplebus.core.errors import BusError, Reason, RefusedError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frames import DELIMITER, Integers
from simplebus.core.protocol.inquiry import ClassQuestion, ClassSaid
from simplebus.core.protocol.requests import Auth, NamedClass
from simplebus.nats.client import jetstream_codec
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
    open: Open,
    framer: Framer,
) -> None:
    """Have a dead letter stored of each of these messages."""
    if not found:
        return
    why = {each.sequence: each for each in refusals}
    async with open() as written:
        for messages, sequences in found:
            told = jetstream_codec.deliveries(messages)
            times = np.where(told.good, told.times / 1e9, 0.0).tolist()
            piece = framer.piece(messages, sequences)
            framer.odd()  # It was told when they were found.
            for row, sequence in enumerate(sequences.tolist()):
                frame = bytes(piece.part(row, row + 1).raw)
                written.add(frame, why[sequence], accepted=times[row], now=time.time())


_PART_BYTES_MIN = 16
"""A bus that takes less in a letter takes none."""


class Letters:
    """Those that are written on one connection to a bus. `open` comes first, `stored` last."""

    def __init__(self, wire: Wire, class_: int | str, lane: str) -> None:
        """`class_` is the one that they are letters of."""
        self._wire = wire
        self._core = wire.core
        self._class = class_
        self._of = str(class_)
        self._lane = lane
        self._class_id = -1
        self._first = wire.core.published_position

    async def open(self) -> None:
        self._of = await self._called()
        name = dead_letters.class_name(self._of)
        if self._core.find_class_id(name) is None:
            await self._wire.wait_answered(self._core.name_classes(NamedClass(name=name)))
        class_id = self._core.find_class_id(name)
        assert class_id is not None
        self._class_id, self._first = class_id, self._core.published_position

    async def _called(self) -> str:
        """What the bus calls the class, by which it calls that of its dead letters: its name, if it
        has one and says it; else its id."""
        if isinstance(self._class, str):
            return self._class
        asked = self._core.inquire(ClassQuestion(self._class))
        try:
            said = (await self._wire.answered(asked)).reply
        except RefusedError:  # There is none yet, or whoever asks has not the right to.
            return str(self._class)
        assert isinstance(said, ClassSaid)
        return said.name or str(self._class)

    def add(self, frame: bytes, refusal: Refusal, *, accepted: float, now: float) -> None:
        """Write of the message in this frame, accepted at this time, in seconds since 1970; 0
        where that is not known. Raises BusError where there can be no letter of it."""
        death = DeadLetterCause(Reason.TERMINATED, self._of, 1, self._lane, "", now)
        for parts in _divided(frame, f"{refusal.code}: {refusal.sentence}"):
            dead = [DeadMessage(refusal.sequence, part, accepted, why) for part, why in parts]
            found = dead_letters.write(
                dead,
                death,
                class_id=self._class_id,
                frame_bytes_max=self._core.accepted_frame_bytes_max,
            )
            if not found.lost:
                assert found.batch is not None
                raw = bytearray(DELIMITER) + found.batch.data.tobytes()
                self._core.publish_buffer.publish_frames(raw, found.batch.bounds, self._class_id)
                return
        raise BusError(f"message {refusal.sequence} fits into no dead letter there")

    async def stored(self) -> None:
        """Wait until they are. Raises RefusedError where there is no room."""
        last = self._core.published_position - 1
        if last >= self._first:
            refused = await self._wire.wait_confirmed(self._first, last)
            if refused:
                raise refused[0]


def _divided(frame: bytes, error: str) -> Iterator[list[tuple[bytes, str]]]:
    """A message as it may lie in dead letters, and what is said of each: in ever more of them, and
    without its headers where no number of letters has room for these."""
    read, payload = Envelope(), frame[HEADER_BYTES:-DELIMITER_BYTES]
    if frame[0] == frames.ENVELOPE:
        read, payload = envelope_batch.decode(payload)
    yield [(frame, error)]
    bare = read._replace(headers=())
    for front, lost in (read, ""), (bare, "without its headers; "), (Envelope(), "payload only; "):
        count = 1
        while count == 1 or len(payload) // count >= _PART_BYTES_MIN:
            size = max(1, -(-len(payload) // count))
            cuts = [payload[at : at + size] for at in range(0, max(1, len(payload)), size)]
            yield [
                (_frame(front, cut), f"part {number} of {len(cuts)}; {lost}{error}")
                for number, cut in enumerate(cuts, 1)
            ]
            count *= 2


def _frame(front: Envelope, payload: bytes) -> bytes:
    return frames.encode(frames.ENVELOPE, content=envelope_batch.encode(front, payload))


Open = Callable[[], AbstractAsyncContextManager[Letters]]


def letters_at(
    place: Place, class_: int | str, lane: str, *, heartbeat: float, auth: Auth | None
) -> Open:
    """What opens a connection for letters of this class, for as long as some are written. Raises
    BusError where there is no room for them, or no right to write them."""

    @asynccontextmanager
    async def open() -> AsyncIterator[Letters]:
        async with wired(place, core_of(None, heartbeat=heartbeat, auth=auth)) as wire:
            letters = Letters(wire, class_, lane)
            await letters.open()
            yield letters
            await letters.stored()

    return open
