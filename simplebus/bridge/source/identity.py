"""Whether the near bus is still what it was, for far ends that know a message by its sequence; and
how much a stream there takes at once.

Rule 1: a sequence may be another message's by now, where the near bus came back from an old copy:
then what is sent from there on goes under another name. What was sent last is known as long as this
process lives.
Rule 2: of a bus that may lose what it has shown, a sequence means one message in one run of it.
"""

from __future__ import annotations

import logging
import secrets

from simplebus.bridge.checkpoint import Mark
from simplebus.bridge.interfaces import TargetBatch, Near
from simplebus.client.core.client import ClientCore
from simplebus.core.commit_log import Durability

log = logging.getLogger("simplebus.bridge")

_ROOM_MIN = 64
"""With fewer under way a lane is slow, and whoever else fills a stream's room leaves it no more."""


def life_of(near: ClientCore) -> str:
    """Within what a sequence of the near bus means one message: of a bus that may lose what it has
    shown, in one run of it. Then other messages are not taken for those that were lost."""
    return near.bus_id if near.durability is Durability.DISK else f"{near.bus_id} {near.run_id}"


class Looked:
    """What is known of the ends from one connection to the next one."""

    def __init__(self) -> None:
        self.era = ""
        """Part of the name since it came back from an old copy."""
        self._memory = ""
        self._last: tuple[int, Mark] | None = None
        """What was sent last."""
        self.room = 1 << 30
        """So many messages may be made for a stream, or asked for, at once."""
        self.end = 0
        """The sequence in the stream of what it stored last; 0 while that is not known."""
        self.mapped: set[bytes] = set()
        """Subjects that a stream takes though it does not say so: on the way to it they are given
        another one."""

    def too_many(self, count: int) -> None:
        """A stream has said that it had no room for so many."""
        self.room = min(self.room, max(_ROOM_MIN, count // 2))

    def note(self, near: Near, made: TargetBatch) -> None:
        """This is sent."""
        if made.last_fingerprint is not None:
            self._memory, self._last = near.storage_id, (int(made.sequences[-1]), made.last_fingerprint)

    async def again(self, near: Near, name: str) -> int:
        """The near end is open. Returns how many doubts there are that it is what it was: 1 or
        none."""
        if self._last is None or self._memory != near.storage_id:
            return 0
        sequence, mark = self._last
        if sequence < near.head:
            there = await near.read_fingerprint(sequence)
            if there is None or mark.may_be(there):  # What is gone, nobody knows.
                return 0
        log.warning(
            "%s: %s came back from an old copy: what was copied from there since may come again",
            name,
            near.identity,
        )
        self.era, self._last = f" {secrets.token_hex(4)}", None
        return 1
