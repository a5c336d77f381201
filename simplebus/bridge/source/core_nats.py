"""What is published on subjects of a NATS server, as the near end of a lane.

Rule 1: NATS without JetStream keeps nothing: what is published while the lane is away is gone, and
what finds no room is counted as missed.
Rule 2: it has no dead letters: those of what the far bus refuses lie there.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Sequence

import numpy as np

from simplebus.bridge import dead_letters
from simplebus.bridge.checkpoint import Mark
from simplebus.bridge.dead_letters import Given, bury
from simplebus.bridge.interfaces import SourceBatch, Refusal
from simplebus.bridge.nats_connection import NatsWire
from simplebus.bridge.reserved_headers import is_reserved
from simplebus.bridge.target.nats_frames import Framer
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client.events import Messages

log = logging.getLogger("simplebus.bridge")

HELD_BYTES_MAX = 64 * 1024 * 1024
"""What comes from NATS without JetStream, and finds no room beside so much, is missed."""
_FOUND_MESSAGES = 65_536
"""With so many no further piece is found at once."""
_ID_CHARACTERS = 16
_RESERVED = np.frombuffer(b"$_", np.uint8)
"""What subjects begin with that may be the server's own."""


class NearCore:
    """What is published on some subjects, from now on."""

    def __init__(
        self,
        wire: NatsWire,
        subjects: Sequence[str],
        *,
        letters: dead_letters.Open,
        group: str = "",
    ) -> None:
        """`letters` opens what dead letters are written with."""
        self._wire = wire
        self._letters = letters
        self.identity = identity_of(wire)
        self.memory = f"nats {secrets.token_hex(8)}"
        self.head = 0
        self._framer = Framer()
        self._held: deque[Messages] = deque()
        self._held_bytes = 0
        self._next = 0
        self._missed = 0
        self._out = Given()
        wire.on_messages = self._take
        self._wide: list[int] = []
        """The subscriptions whose first segment is a wildcard."""
        for subject in subjects or (">",):
            sid = wire.core.subscribe(subject, group)
            if subject.split(".", 1)[0] in ("*", ">", "#"):
                self._wide.append(sid)
        wire.link.flush()

    async def open(self) -> int:
        """Begin. Returns the first sequence."""
        await self._wire.echoed()  # It has taken the subscriptions.
        self._wire.check_rights()
        return 0

    def _take(self, messages: Messages) -> None:
        messages = self._meant(messages)
        size = int((messages.ends - messages.bodies).sum())
        if self._held_bytes + size > HELD_BYTES_MAX:
            self._missed += messages.count
            return
        if messages.count:
            self._held.append(messages)
            self._held_bytes += size

    def _meant(self, messages: Messages) -> Messages:
        """Without what a wildcard matches and nobody means: answers to others, and echoes of this
        bridge."""
        likely = np.isin(messages.data[messages.subjects], _RESERVED)
        if not likely.any():
            return messages
        likely &= np.isin(messages.sids, self._wide)
        for row in np.flatnonzero(likely).tolist():
            likely[row] = is_reserved(messages.subject(row).decode("utf-8", "replace"))
        return messages.pick(~likely)

    async def find(self, at: int) -> SourceBatch:
        self._wire.check_rights()
        missed, self._missed = self._missed, 0
        pieces = []
        first = self._next
        while self._held and self._next - first < _FOUND_MESSAGES:
            messages = self._held.popleft()
            self._held_bytes -= int((messages.ends - messages.bodies).sum())
            sequences = np.arange(self._next, self._next + messages.count)
            pieces.append(self._framer.piece(messages, sequences))
            self._out.add(messages, sequences)
            self._next += messages.count
        head = self._next + sum(messages.count for messages in self._held)
        found = SourceBatch(pieces, at, self._next, head, missed)
        found.altered_count, found.alteration = self._framer.odd()
        return found

    async def look(self, sequence: int) -> Mark | None:
        return None  # It keeps nothing.

    async def behind(self, at: int) -> tuple[int, float]:
        return self._next - at + sum(messages.count for messages in self._held), 0.0

    async def wait(self, at: int) -> int:
        await self.keep(at, now=False)
        while not self._held:
            await self._wire.changed()
            self._wire.check_rights()
        return at

    async def keep(self, at: int, *, now: bool) -> None:
        """NATS would not know what to do with it."""
        self._out.take(at)

    async def give_up(self, refusals: Sequence[Refusal]) -> int:
        found = self._out.of(refusals)
        await bury(found, refusals, self._letters, self._framer)
        return len(refusals) - sum(messages.count for messages, _ in found)

    def left(self, at: int) -> int:
        held = sum(messages.count for messages in self._held)
        return self._next - at + held + self._missed


def check_lane(wire: NatsWire) -> None:
    """Raise BusConnectionError for a server without JetStream."""
    info = wire.core.info
    if info is None or not info.jetstream:
        raise BusConnectionError("that NATS server has no JetStream, and a stream is named")


def identity_of(wire: NatsWire, stream: str = "") -> str:
    """What a server, or a stream of it, is in the path of a message. Other servers of its cluster
    are called otherwise."""
    info = wire.core.info
    server = f"nats.{info.server_id[:_ID_CHARACTERS]}" if info and info.server_id else "nats"
    return f"{server}.{stream}" if stream else server
