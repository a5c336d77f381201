"""Closing of positions in the cluster.

Closing is retried until it succeeds: an orphaned consumer would hold back its stream, and lose its
messages when JetStream expires it. Retries do not block the class's other jobs, and stop if the
consumer's name is in use again. A durable or group returns its messages once; after a failure they
are redelivered after the ack wait, like those of a failed server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import trio

from simplebus.core.errors import BusConnectionError
from simplebus.core.subscription.position import Position
from simplebus.jetstream.class_jobs import ClassJobs
from simplebus.jetstream.consume.consumers import ConsumerManager
from simplebus.jetstream.consume.dead_letters import DeadLetterMark
from simplebus.jetstream.consume.handover import TAKEOVER_SECONDS
from simplebus.jetstream.consume.returned_messages import ReturnedMessages, UnackedOnExit
from simplebus.jetstream.remote_class import RemoteClass
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = EventLogger("simplebus.engine")

_DEAD_LETTER_WAIT_SECONDS = 2.0
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.25, 5.0


@dataclass(frozen=True, slots=True)
class ClosedPosition:
    """A position without subscriptions on this server."""

    cls: RemoteClass
    position: Position
    name: str
    """Name of the consumer."""
    forget: bool = False
    """True if the position is deleted and cannot be resumed."""
    last_ack: tuple[str, bytes] | None = None
    """Subject and payload of the last ack. When it is answered, all earlier acks were processed."""
    returned: ReturnedMessages | None = None
    unacked: UnackedOnExit | None = None
    dead_letters: DeadLetterMark | None = None
    """Mark after which all dead letters of the position are stored; None without dead letters."""
    tries: int = 0

    @property
    def is_named(self) -> bool:
        return bool(self.position.durable or self.position.group)

    @property
    def is_resumable(self) -> bool:
        """True if a subscription may resume the position by its durable or group."""
        return self.is_named and not self.forget


class ConsumerCloser:
    """Closes the positions of one server."""

    def __init__(
        self,
        link: NatsConnection,
        consumers: ConsumerManager,
        jobs: ClassJobs,
        is_used: Callable[[RemoteClass, str], bool],
        wait_dead_letters: Callable[[DeadLetterMark], Awaitable[None]],
    ) -> None:
        """Create a closer without work.

        Args:
            is_used: Returns True if this server has, or requests, a consumer of this name.
            wait_dead_letters: Waits until dead letters are stored.
        """
        self._link = link
        self._consumers = consumers
        self._jobs = jobs
        self._is_used = is_used
        self._wait_dead_letters = wait_dead_letters
        self._releasing = consumers.releasing

    def answer_query(self, query: bytes) -> bytes:
        """Return the answer to another server's query about consumers to be released."""
        return self._releasing.answer(query, trio.current_time())

    def close_later(self, closed: ClosedPosition) -> None:
        """Close a position after all earlier jobs of its class."""
        if not closed.is_named:
            now = trio.current_time()
            self._releasing.add(closed.position, closed.cls.class_id, closed.name, now)
        self._jobs.enqueue(closed.cls.class_id, partial(self.close, closed))

    async def close(self, closed: ClosedPosition) -> None:
        """Close a position now, and retry later if that fails."""
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
            more = "" if is_final else "; retrying"
            log.warning(
                "consumer.close_failed",
                "cannot close a subscription to class {class_name}: {error}{outcome}",
                class_name=closed.cls.label,
                error=error,
                outcome=more,
            )
            if not is_final:
                retry = replace(closed, tries=closed.tries + 1)
                pause = min(_PAUSE_SECONDS * 2**closed.tries, _PAUSE_SECONDS_MAX)
                self._jobs.enqueue_later(class_id, partial(self.close, retry), pause)
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
        """Return the unacknowledged messages, after waiting a moment for pending dead letters."""
        if closed.unacked is None or closed.dead_letters is None:
            return closed.unacked
        with trio.move_on_after(0.0 if closed.tries else _DEAD_LETTER_WAIT_SECONDS) as scope:
            await self._wait_dead_letters(closed.dead_letters)
        return closed.unacked.resolve_dead_letters(not scope.cancelled_caught)
