"""Writes the send queue of a client to its transport.

Every producer of bytes tries to write at once, without waiting. A task writes the bytes that the
transport did not accept, and the small messages that accumulate until their publisher yields.
Publishers that wait for room queue up: free space wakes one of them.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel

from simplebus.client.aio.transport import Transport
from simplebus.client.core.client import ClientCore
from simplebus.client.event_loop.wakeup_event import WakeupEvent

# Publishers do not wait until this many bytes are queued.
WRITE_BUFFER_BYTES = 256 * 1024
# Bytes to write in one turn before other tasks run.
_BYTES_PER_TURN = 1024 * 1024


class TransportWriter:
    """Writing half of a client connection."""

    def __init__(
        self,
        core: ClientCore,
        changed: WakeupEvent,
        *,
        check: Callable[[], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self.free_until_bytes = 0
        """Total of published bytes from which a publisher must call `wait_for_room` first. It is 0
        while the writing task sleeps, so that the next publisher wakes the task.
        """
        self.transport: Transport | None = None
        """Target of writes; None while there is no connection with a completed handshake."""
        self._core = core
        self._changed = changed
        self._check = check
        self._on_lost = on_lost
        self._has_work = False
        """True if the task has something to write."""
        self._is_blocked = False
        """True if the transport accepted less than it was given."""
        self._work_added = WakeupEvent()
        self._room_lock = anyio.Lock()
        """Held by the one publisher that waits for room."""

    async def run(self, transport: Transport) -> None:
        """Write queued bytes to this transport, until cancelled."""
        self._has_work, self._is_blocked = True, False
        while True:
            if not self._has_work:
                await self._work_added.wait()
                continue
            if self._is_blocked:
                try:
                    await transport.wait_sendable()
                except OSError as error:
                    self._on_lost(error)
                self._is_blocked = False
            self.write_now()
            if not self._is_blocked:
                self._has_work = False
                self.free_until_bytes = 0
            self._changed.set()

    def write_now(self) -> None:
        """Write as much as the transport accepts now; the task writes the rest."""
        transport = self.transport
        if self._is_blocked or transport is None:
            return
        outgoing = self._core.send_queue
        enough = outgoing.sent_bytes + _BYTES_PER_TURN
        try:
            while data := outgoing.peek():
                sent_count = transport.send(data)
                outgoing.mark_sent(sent_count)
                if not sent_count or outgoing.sent_bytes > enough:
                    self._is_blocked = True
                    self.write_soon()
                    return
            if not transport.flush():
                self._is_blocked = True
                self.write_soon()
        except OSError as error:
            self._on_lost(error)

    def write_soon(self) -> None:
        """Have the task write when the caller yields."""
        self._has_work = True
        self._work_added.set()

    def write_due_acks(self) -> None:
        """Write if many acks are pending."""
        if self._core.has_due_acks:
            self.write_now()

    @property
    def has_room(self) -> bool:
        """True if a publisher that writes at once may append a message."""
        outgoing = self._core.send_queue
        return not outgoing.has_queued or outgoing.queued_bytes < WRITE_BUFFER_BYTES

    def check_room(self) -> bool:
        """Return True if a publisher may append one more message, which is written soon."""
        self._check()
        if self._core.send_queue.queued_bytes >= WRITE_BUFFER_BYTES:
            self.write_now()
            if (
                self._core.send_queue.queued_bytes >= WRITE_BUFFER_BYTES
                and not self._core.has_credit
            ):
                return False
        self._allow_publishing()
        return True

    async def wait_for_room(self) -> None:
        """Return when a publisher may append one more message."""
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
        """Let publishers append messages without a check until there is enough for a write."""
        core = self._core
        self.free_until_bytes = core.publish_buffer.published_bytes + max(
            1, WRITE_BUFFER_BYTES - core.send_queue.queued_bytes
        )
        self.write_soon()
