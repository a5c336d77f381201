"""Writing what a client has for the bus: at once where it goes, by a task where it does not.

Rule 1: whoever has something to write tries at once, without waiting; the task does what did not
fit, and the small messages that were left to pile up until their publisher yields.
Rule 2: publishers that wait for room stand in line: room for one wakes one.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel

from simplebus.client.aio.transport import Transport
from simplebus.client.aio.wakeup_event import WakeupEvent
from simplebus.client.core.client import ClientCore

# A publisher goes on without a thought until so much waits to be written.
WRITE_BUFFER_BYTES = 256 * 1024
# Written in one turn before other tasks get theirs.
_BYTES_PER_TURN = 1024 * 1024


class TransportWriter:
    """A wire's half that writes."""

    def __init__(
        self,
        core: ClientCore,
        changed: WakeupEvent,
        *,
        check: Callable[[], None],
        lose: Callable[[Exception], None],
    ) -> None:
        self.free_until_bytes = 0
        """When so many bytes were ever handed over, a publisher must call `make_room` first; 0
        while the task sleeps, so that the next publisher wakes it."""
        self.transport: Transport | None = None
        """Where to write to; None while there is no connection on which the bus has answered."""
        self._core = core
        self._changed = changed
        self._check = check
        self._on_lost = lose
        self._has_work = False
        """Whether the task has something to do."""
        self._is_blocked = False
        """Whether the link took less than it was given."""
        self._work_added = WakeupEvent()
        self._room_lock = anyio.Lock()
        """Held by the one publisher that watches for room."""

    async def run(self, link: Transport) -> None:
        """Write what others left, on this link."""
        self._has_work, self._is_blocked = True, False
        while True:
            if not self._has_work:
                await self._work_added.wait()
                continue
            if self._is_blocked:
                try:
                    await link.wait_sendable()
                except OSError as error:
                    self._on_lost(error)
                self._is_blocked = False
            self.write_now()
            if not self._is_blocked:
                self._has_work = False
                self.free_until_bytes = 0
            self._changed.set()

    def write_now(self) -> None:
        """Write what the link takes now; the task does the rest."""
        link = self.transport
        if self._is_blocked or link is None:
            return
        outgoing = self._core.send_queue
        enough = outgoing.sent_bytes + _BYTES_PER_TURN
        try:
            while data := outgoing.peek():
                taken = link.send(data)
                outgoing.mark_sent(taken)
                if not taken or outgoing.sent_bytes > enough:
                    self._is_blocked = True
                    self.write_soon()
                    return
            if not link.flush():
                self._is_blocked = True
                self.write_soon()
        except OSError as error:
            self._on_lost(error)

    def write_soon(self) -> None:
        """Have the task write, once the caller yields."""
        self._has_work = True
        self._work_added.set()

    def write_due_acks(self) -> None:
        """Write if acknowledgements are many."""
        if self._core.has_due_acks:
            self.write_now()

    def check_room(self) -> bool:
        """Whether a publisher may queue one more message now. It is written soon."""
        self._check()
        if self._core.send_queue.queued_bytes >= WRITE_BUFFER_BYTES:
            self.write_now()
            if self._core.send_queue.queued_bytes >= WRITE_BUFFER_BYTES and not self._core.has_credit:
                return False
        self._allow_publishing()
        return True

    async def wait_for_room(self) -> None:
        """Return when a publisher may queue one more message."""
        outgoing, check = self._core.send_queue, self._check
        check()
        if outgoing.queued_bytes >= WRITE_BUFFER_BYTES:
            self.write_now()
            await anyio.lowlevel.checkpoint()
            check()
            if outgoing.queued_bytes >= WRITE_BUFFER_BYTES:
                async with self._room_lock:
                    while outgoing.queued_bytes >= WRITE_BUFFER_BYTES:
                        await self._changed.wait()
                        check()
        self._allow_publishing()

    def _allow_publishing(self) -> None:
        """Publishers go on without a thought until there is enough for a write."""
        core = self._core
        self.free_until_bytes = core.publish_buffer.published_bytes + max(
            1, WRITE_BUFFER_BYTES - core.send_queue.queued_bytes
        )
        self.write_soon()
