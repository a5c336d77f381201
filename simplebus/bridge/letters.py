"""Dead letters of what a far end refuses for good.

Rule 1: a message is given up when its letter is stored, not before: whoever is told that there is
no room for it begins anew, and has lost nothing.
Rule 2: a letter is whole. What is too long for one, with the reason, lies in several, each of which
says which part of the payload it has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from simplebus.bridge.ends import Refusal
from simplebus.bridge.wires import core_of, wired
from simplebus.client.link import Place
from simplebus.client.wire import Wire
from simplebus.core import dead_letters, envelope, frames
from simplebus.core.dead_letters import Dead, Death
from simplebus.core.envelope import Envelope
from simplebus.core.errors import BusError, Reason, RefusedError
from simplebus.core.explained import ClassQuestion, ClassSaid
from simplebus.core.frames import DELIMITER
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.requests import Auth, NamedClass

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
        self._first = wire.core.published

    async def open(self) -> None:
        self._of = await self._called()
        name = dead_letters.class_name(self._of)
        if self._core.class_id(name) is None:
            await self._wire.answered(self._core.name_classes(NamedClass(name=name)))
        class_id = self._core.class_id(name)
        assert class_id is not None
        self._class_id, self._first = class_id, self._core.published

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
        death = Death(Reason.TERMINATED, self._of, 1, self._lane, "", now)
        for parts in _divided(frame, f"{refusal.code}: {refusal.sentence}"):
            dead = [Dead(refusal.sequence, part, accepted, why) for part, why in parts]
            found = dead_letters.write(
                dead,
                death,
                class_id=self._class_id,
                frame_bytes_max=self._core.frame_bytes,
            )
            if not found.lost:
                assert found.batch is not None
                raw = bytearray(DELIMITER) + found.batch.data.tobytes()
                self._core.publisher.publish_frames(raw, found.batch.bounds, self._class_id)
                return
        raise BusError(f"message {refusal.sequence} fits into no dead letter there")

    async def stored(self) -> None:
        """Wait until they are. Raises RefusedError where there is no room."""
        last = self._core.published - 1
        if last >= self._first:
            refused = await self._wire.confirmed(self._first, last)
            if refused:
                raise refused[0]


def _divided(frame: bytes, error: str) -> Iterator[list[tuple[bytes, str]]]:
    """A message as it may lie in dead letters, and what is said of each: in ever more of them, and
    without its headers where no number of letters has room for these."""
    read, payload = Envelope(), frame[HEADER_BYTES:-DELIMITER_BYTES]
    if frame[0] == frames.ENVELOPE:
        read, payload = envelope.decode(payload)
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
    return frames.encode(frames.ENVELOPE, content=envelope.encode(front, payload))


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
