"""Writes messages to a bus in this process, and retries while the bus is full.

Messages without room are sent again in order until they are stored, and no others are accepted
meanwhile. The copier that reads from that bus makes room. Messages in flight are bounded in number
and bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import trio

from simplebus.client.aio.bus import Bus
from simplebus.client.pending_confirms import ConfirmWaiter
from simplebus.core.errors import Reason, RefusedError
from simplebus.logs.event_logger import EventLogger

MESSAGES_MAX = 4096
RETRY_SECONDS = 1.0
"""Delay before messages without room are sent again."""
_RETRYABLE_REASONS = {Reason.DISK_FULL, Reason.DROP_NEWEST}


@dataclass(frozen=True, slots=True)
class _PendingMessage:
    """A message that was published and is not confirmed."""

    waiter: ConfirmWaiter
    payload: bytes
    options: Mapping[str, Any]


class BusWriter:
    """Writes messages to a bus. Start `run` in a nursery."""

    def __init__(
        self,
        bus: Bus,
        class_: int | str,
        *,
        bytes_max: int,
        log: EventLogger,
    ) -> None:
        """Create a writer. With more than `bytes_max` bytes in flight, `put` waits."""
        self._bus = bus
        self._class = class_
        self._bytes_max = bytes_max
        self._log = log
        self._pending: deque[_PendingMessage] = deque()
        """Messages in flight, in order."""
        self._pending_bytes = 0
        self._changed = trio.Event()
        self.stored_count = 0
        """Messages that the bus has stored."""
        self.problem = ""
        """Reason why the bus is full; empty if it is not."""

    async def put(self, payload: bytes, options: Mapping[str, Any]) -> None:
        """Publish a message once there is room.

        Raises LocalProtocolError and ValueError if the message is invalid.
        """
        while (
            self.problem
            or len(self._pending) >= MESSAGES_MAX
            or self._pending_bytes > self._bytes_max
        ):
            await self._changed.wait()
        await self._publish(payload, options)

    async def run(self) -> None:
        """Process confirms. Raises RefusedError if a message can never be stored."""
        while True:
            if to_resend := self._pop_results():
                await self._resend(to_resend)
            await self._wait_result()

    async def flush(self) -> None:
        """Wait until all messages are stored."""
        while self._pending or self.problem:
            self._bus.connection.check_open()
            await self._changed.wait()

    async def _wait_result(self) -> None:
        """Wait for a confirm or another change. Raises BusConnectionError if the bus is gone."""
        self._bus.connection.check_open()
        if not (self._pending and self._pending[0].waiter.is_done):
            await self._changed.wait()
            self._bus.connection.check_open()

    async def _publish(self, payload: bytes, options: Mapping[str, Any]) -> None:
        connection = self._bus.connection
        await self._bus.publish(payload, class_id=self._class, confirm=False, **options)
        position = connection.core.published_position - 1
        connection.core.require_confirm(position + 1)
        waiter = connection.confirms.add_waiter(position, position, self._notify_changed)
        self._pending.append(_PendingMessage(waiter, payload, options))
        self._pending_bytes += len(payload)
        connection.writer.write_soon()

    def _notify_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _pop_results(self) -> list[_PendingMessage]:
        """Remove confirmed messages. Returns those without room. Raises RefusedError."""
        to_resend, before = [], len(self._pending)
        while self._pending and self._pending[0].waiter.is_done:
            each = self._pending.popleft()
            self._pending_bytes -= len(each.payload)
            if not each.waiter.refusals:
                self.stored_count += 1
                continue
            error = each.waiter.refusals[0]
            if error.code not in _RETRYABLE_REASONS:
                raise error
            to_resend.append(each)
        if len(self._pending) != before:  # Makes room for other messages.
            self._notify_changed()
        return to_resend

    async def _resend(self, to_resend: list[_PendingMessage]) -> None:
        """Send messages again until they are stored: a few at first, to keep their order."""
        error: RefusedError = to_resend[0].waiter.refusals[0]
        self.problem = str(error)
        self._log.warning(
            "module_store.full", "received messages wait for space ({error})", error=error
        )
        to_resend += await self._wait_all_results()
        count = 1
        while to_resend:
            await trio.sleep(RETRY_SECONDS if count == 1 else 0)
            for message in to_resend[:count]:
                await self._publish(message.payload, message.options)
            refused = await self._wait_all_results()
            to_resend = refused + to_resend[count:]
            count = 1 if refused else 2 * count
        self.problem = ""
        self._log.info("module_store.recovered", "received messages are stored again")
        self._notify_changed()

    async def _wait_all_results(self) -> list[_PendingMessage]:
        to_resend = self._pop_results()
        while self._pending:
            await self._wait_result()
            to_resend += self._pop_results()
        return to_resend
