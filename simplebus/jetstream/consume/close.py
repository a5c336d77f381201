"""What a position leaves in the cluster when nobody at this door has it any more (trio).

Rule 1: it is tried until it is done: a consumer that its door has forgotten would be nobody's as
long as the door lives, keep all that is stored behind it, and be lost with what it keeps when it
has been idle for long.
Rule 2: what is tried again waits outside of the row of what is to be asked about its class. What
has come under its name meanwhile is left alone.
Rule 3: of what goes on under its name, messages are given back once: they come again after the ack
wait, as those of a door that is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import trio

from simplebus.core.errors import BusConnectionError
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.jetstream.class_jobs import ClassJobs
from simplebus.jetstream.consume.consumers import Positions
from simplebus.jetstream.consume.dead_letters import Mark
from simplebus.jetstream.consume.give_back import Leaving, Owed
from simplebus.jetstream.consume.handover import TAKING_SECONDS
from simplebus.jetstream.remote_class import RemoteClass
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

_BURYING_SECONDS = 2.0
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.25, 5.0


@dataclass(frozen=True, slots=True)
class Gone:
    """A position that is gone from this door."""

    cls: RemoteClass
    position: BrokerSubscription
    name: str
    """Of its consumer."""
    forget: bool = False
    """Whether nobody is to find it again."""
    last: tuple[str, bytes] | None = None
    """What was said last of a message, and where: when it is answered, all is known that was said
    before."""
    leaving: Leaving | None = None
    owed: Owed | None = None
    buried: Mark | None = None
    """When the dead letters of what it has given up are stored; None for there are none."""
    tries: int = 0

    @property
    def is_named(self) -> bool:
        return bool(self.position.durable or self.position.group)

    @property
    def goes_on(self) -> bool:
        """Whether somebody may come back to it by its names."""
        return self.is_named and not self.forget


class Closing:
    """Of one door."""

    def __init__(
        self,
        link: NatsConnection,
        positions: Positions,
        jobs: ClassJobs,
        is_used: Callable[[RemoteClass, str], bool],
        when_buried: Callable[[Mark], Awaitable[None]],
    ) -> None:
        """`is_used`: whether somebody here has, or asks for, the consumer of this name.
        `when_buried` waits until dead letters are stored."""
        self._link = link
        self._positions = positions
        self._jobs = jobs
        self._is_used = is_used
        self._when_buried = when_buried
        self._going = positions.going

    def answer(self, asked: bytes) -> bytes:
        """What another door is told that asks what this one is about to leave."""
        return self._going.answer(asked, trio.current_time())

    def end(self, gone: Gone) -> None:
        """Close it when all is done that was asked about its class before."""
        if not gone.is_named:
            now = trio.current_time()
            self._going.put(gone.position, gone.cls.class_id, gone.name, now)
        self._jobs.enqueue(gone.cls.class_id, partial(self.close, gone))

    async def close(self, gone: Gone) -> None:
        """Close it now, and later again if that fails."""
        class_id, position = gone.cls.class_id, gone.position
        if gone.tries and gone.is_named and self._is_used(gone.cls, gone.name):
            return
        if self._going.is_being_taken(position, trio.current_time()):
            self._jobs.enqueue_later(class_id, partial(self.close, gone), TAKING_SECONDS)
            return
        try:
            with self._going.leaving(position):
                await self._leave(gone)
        except (BusConnectionError, JetStreamError) as error:
            is_final = gone.goes_on or (isinstance(error, JetStreamError) and error.is_final)
            more = "" if is_final else "; trying on"
            log.warning("a subscription to class %d is not ended: %s%s", class_id, error, more)
            if not is_final:
                again = replace(gone, tries=gone.tries + 1)
                pause = min(_PAUSE_SECONDS * 2**gone.tries, _PAUSE_SECONDS_MAX)
                self._jobs.enqueue_later(class_id, partial(self.close, again), pause)
                return
        self._going.remove(position)

    async def _leave(self, gone: Gone) -> None:
        if gone.last is not None and not gone.tries:
            await self._link.request(*gone.last)
        owed = await self._owed(gone)
        await self._positions.close(
            gone.cls,
            gone.position,
            gone.name,
            forget=gone.forget,
            leaving=gone.leaving,
            owed=owed,
        )

    async def _owed(self, gone: Gone) -> Owed | None:
        """What is to go on. Dead letters that find no room are waited for a moment only."""
        if gone.owed is None or gone.buried is None:
            return gone.owed
        with trio.move_on_after(0.0 if gone.tries else _BURYING_SECONDS) as scope:
            await self._when_buried(gone.buried)
        return gone.owed.when_buried(not scope.cancelled_caught)
