"""A connected socket and the client core behind it, without an event loop.

Rule 1: no decisions here. What bytes mean and what is written next is the core's business.
Rule 2: whoever waits to write reads meanwhile, so that neither side waits for the other.
"""

from __future__ import annotations

import math
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic

from simplebus.client import dial
from simplebus.core.client import ClientCore
from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.limits import READ_BYTES
from simplebus.core.receive import ReceiveBuffer


class BlockingWire:
    """Used by one thread at a time. Whoever makes it closes the socket and the selector."""

    def __init__(
        self,
        core: ClientCore,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        address: dial.Address,
    ) -> None:
        self.core = core
        self.address = address
        self._socket = sock
        self._selector = selector
        self._buffer = ReceiveBuffer(READ_BYTES)
        self._awaited = EVENT_READ
        self._loss = ""
        """What became of the connection; empty while it is there."""
        self._cause: Exception | None = None
        selector.register(sock, EVENT_READ)

    def check(self) -> None:
        """Raise BusConnectionError unless the connection is there."""
        if self._loss:
            raise BusConnectionError(self._loss) from self._cause

    def write(self, deadline: float = math.inf) -> None:
        """Write all that is queued, reading meanwhile. Past the deadline, give up."""
        outgoing = self.core.outgoing
        while data := outgoing.peek():
            try:
                outgoing.sent(self._socket.send(data))
            except BlockingIOError:
                wanted = EVENT_WRITE if self.core.is_full else EVENT_READ | EVENT_WRITE
                ready = self._wait(wanted, deadline)
                if not ready:
                    return
                if ready & EVENT_READ:
                    self._read()
            except OSError as error:
                self._lose(error)
                self.check()

    def _read(self) -> None:
        """Take what is there, without waiting."""
        try:
            count = self._socket.recv_into(self._buffer.space)
            if count == 0:
                self._lose(None)
            else:
                self.core.receive(self._buffer, count)
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError) as error:
            self._lose(error)
        self.check()

    def read_until(self, condition: Callable[[], bool], deadline: float = math.inf) -> bool:
        """Write and read until the condition holds, or, then False, until the deadline."""
        self.check()
        self.write(deadline)
        while not condition():
            if self.core.is_full:  # Nobody will make room while we wait.
                self.core.find_still(self.core.progress())
            if not self._wait(EVENT_READ, deadline):
                return False
            self._read()
        return True

    def sync(self, deadline: float = math.inf) -> bool:
        """Wait until the bus has applied everything queued so far; False at the deadline."""
        asked = self.core.connect()
        return self.read_until(lambda: self.core.answers >= asked, deadline)

    def _wait(self, wanted: int, deadline: float) -> int:
        """Which of the wanted events are there; 0 at the deadline."""
        if wanted != self._awaited:
            self._selector.modify(self._socket, wanted)
            self._awaited = wanted
        patience = None if deadline == math.inf else max(0.0, deadline - monotonic())
        ready = self._selector.select(patience)
        return ready[0][1] if ready else 0

    def _lose(self, error: Exception | None) -> None:
        self._loss = dial.lost(self.address, error, left=False)
        self._cause = error

    def close(self, seconds: float) -> None:
        """Write what is queued, say goodbye, and wait until the bus has heard it."""
        deadline = monotonic() + seconds
        with suppress(BusConnectionError, OSError):
            self.check()
            self.core.settle_processed()
            self.write(deadline)
            self._socket.shutdown(socket.SHUT_WR)
            while self._wait(EVENT_READ, deadline) and monotonic() < deadline:
                if self._socket.recv_into(self._buffer.space) == 0:
                    break  # Until then: what comes now was not acknowledged, and will come again.
        self._loss = self._loss or dial.lost(self.address, None, left=True)

    def unwritten(self) -> BusConnectionError | None:
        """After `close`: an error if something was left that the bus did not take."""
        left = self.core.outgoing.queued_bytes
        return dial.unwritten(left, self._loss) if left else None
