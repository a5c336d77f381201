"""What a position leaves in the cluster when nobody at this door has it any more (trio).

Rule 1: it is tried until it is done: a consumer that its door has forgotten would be nobody's as
long as the door lives, keep all that is stored behind it, and be lost with what it keeps when it
has been idle for long.
Rule 2: what is tried again waits outside of the row of what is to be query about its class. What
has come under its name meanwhile is left alone.
Rule 3: of what goes on under its name, messages are given back once: they come again after the ack
wait, as those of a door that is closed.
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
from simplebus.jetstream.consume.consumers import ConsumerManager
from simplebus.jetstream.consume.dead_letters import DeadLetterMark
from simplebus.jetstream.consume.give_back import ReturnedMessages, UnackedOnExit
from simplebus.jetstream.consume.handover import TAKEOVER_SECONDS
from simplebus.jetstream.remote_class import RemoteClass
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

_DEAD_LETTER_WAIT_SECONDS = 2.0
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.25, 5.0


@dataclass(frozen=True, slots=True)
class ClosedPosition:
    """A position that is closed from this door."""

    cls: RemoteClass
    position: BrokerSubscription
    name: str
    """Of its consumer."""
    forget: bool = False
    """Whether nobody is to find it again."""
    last_ack: tuple[str, bytes] | None = None
    """What was said last of a message, and where: when it is answered, all is known that was said
    before."""
    returned: ReturnedMessages | None = None
    unacked: UnackedOnExit | None = None
    dead_letters: DeadLetterMark | None = None
    """When the dead letters of what it has given up are stored; None for there are none."""
    tries: int = 0

    @property
    def is_named(self) -> bool:
        return bool(self.position.durable or self.position.group)

    @property
    def is_resumable(self) -> bool:
        """Whether somebody may come back to it by its names."""
        return self.is_named and not self.forget


class ConsumerCloser:
    """Of one door."""

    def __init__(
        self,
        link: NatsConnection,
        consumers: ConsumerManager,
        jobs: ClassJobs,
        is_used: Callable[[RemoteClass, str], bool],
        wait_dead_letters: Callable[[DeadLetterMark], Awaitable[None]],
    ) -> None:
        """`is_used`: whether somebody here has, or asks for, the consumer of this name.
        `resolve_dead_letters` waits until dead letters are stored."""
        self._link = link
        self._consumers = consumers
        self._jobs = jobs
        self._is_used = is_used
        self._wait_dead_letters = wait_dead_letters
        self._releasing = consumers.releasing

    def answer_query(self, query: bytes) -> bytes:
        """What another door is told that asks what this one is about to leave."""
        return self._releasing.answer(query, trio.current_time())

    def close_later(self, closed: ClosedPosition) -> None:
        """Close it when all is done that was query about its class before."""
        if not closed.is_named:
            now = trio.current_time()
            self._releasing.add(closed.position, closed.cls.class_id, closed.name, now)
        self._jobs.enqueue(closed.cls.class_id, partial(self.close, closed))

    async def close(self, closed: ClosedPosition) -> None:
        """Close it now, and later again if that fails."""
        class_id, position = closed.cls.class_id, closed.position
        if closed.tries and closed.is_named and self._is_used(closed.cls, closed.name):
            return
        if self._releasing.is_offered(position, trio.current_time()):
            self._jobs.enqueue_later(class_id, partial(self.close, closed), TAKEOVER_SECONDS)
            return
        try:
            with self._releasing.releasing(position):
                await self._release(closed)
        except (BusConnectionError, JetStreamError) as error:
            is_final = closed.is_resumable or (isinstance(error, JetStreamError) and error.is_final)
            more = "" if is_final else "; trying on"
            log.warning("a subscription to class %d is not ended: %s%s", class_id, error, more)
            if not is_final:
                again = replace(closed, tries=closed.tries + 1)
                pause = min(_PAUSE_SECONDS * 2**closed.tries, _PAUSE_SECONDS_MAX)
                self._jobs.enqueue_later(class_id, partial(self.close, again), pause)
                return
        self._releasing.remove(position)

    async def _release(self, closed: ClosedPosition) -> None:
        if closed.last_ack is not None and not closed.tries:
            await self._link.request(*closed.last_ack)
        unacked = await self._resolve_dead_letters(closed)
        await self._consumers.close(
            closed.cls,
            closed.position,
            closed.name,
            forget=closed.forget,
            returned=closed.returned,
            unacked=unacked,
        )

    async def _resolve_dead_letters(self, closed: ClosedPosition) -> UnackedOnExit | None:
        """What is to go on. Dead letters that find no room are waited for a moment only."""
        if closed.unacked is None or closed.dead_letters is None:
            return closed.unacked
        with trio.move_on_after(0.0 if closed.tries else _DEAD_LETTER_WAIT_SECONDS) as scope:
            await self._wait_dead_letters(closed.dead_letters)
        return closed.unacked.resolve_dead_letters(not scope.cancelled_caught)
