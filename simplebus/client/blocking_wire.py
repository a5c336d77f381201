"""The client core on a socket, and on another one when that is lost, without an event loop.

Rule 1: no decisions here. What bytes mean and what is written next is the core's business, and when
to try again the schedule's.
Rule 2: whoever waits, for whatever, writes and reads meanwhile, so that neither side waits for the
other; and has a lost connection replaced, within the time that it may wait.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic, sleep

from simplebus.client import dial, forks
from simplebus.client.blocking_dial import dialled
from simplebus.client.confirms import Confirms
from simplebus.client.dial import Address
from simplebus.client.retry import Schedule, is_worth_retrying
from simplebus.core.asking import RefusedError, Request
from simplebus.core.client import ClientCore
from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.limits import READ_BYTES
from simplebus.core.receive import ReceiveBuffer

log = logging.getLogger("simplebus.client")


class BlockingWire:
    """Used by one thread at a time. Whoever makes it calls `open`, and `close` at the end."""

    def __init__(self, core: ClientCore, addresses: Sequence[Address], schedule: Schedule) -> None:
        self.core = core
        self.confirms = Confirms()
        self._addresses, self._schedule = addresses, schedule
        self._address = addresses[0]
        """Where the connection goes, or went."""
        self._socket: socket.socket | None = None
        """None while there is no connection."""
        self._selector = selectors.DefaultSelector()
        self._buffer = ReceiveBuffer(READ_BYTES)
        self._is_stuck = False
        """Whether the socket took less than it was given."""
        self._awaited = EVENT_READ
        """What the selector looks for."""
        self._problem: BusConnectionError | None = None
        """Why the last attempt failed."""
        self._loss: BusConnectionError | None = None
        """What became of the last connection."""
        self._end: BusConnectionError | None = None
        """Why there will be no other connection; None while there may be one."""
        self._is_last = False
        """Whether this connection is to be the last: nothing is left to be done on another."""
        forks.watch(self)

    def check(self) -> None:
        """Raise BusConnectionError when there is no connection and will be none."""
        if self._end is not None:
            raise BusConnectionError(str(self._end)) from self._end.__cause__

    # Connections ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the first connection. Raises BusConnectionError."""
        while not self._connect_once(math.inf):
            pass

    def _connect_once(self, deadline: float) -> bool:
        """One attempt; whether there is a connection. Raises BusConnectionError to give up."""
        attempt = self._schedule.next(monotonic())
        if attempt is None:
            self._give_up()
            return False
        sleep(min(attempt.pause, max(0.0, deadline - monotonic())))
        if monotonic() >= deadline:
            return False
        self._address = self._addresses[attempt.address]
        until = min(deadline, monotonic() + attempt.seconds)
        try:
            self._socket = dialled(self._address, until, attempt.seconds)
            self._selector.register(self._socket, EVENT_READ)
            self._is_stuck, self._awaited = False, EVENT_READ
            self._greet(until, attempt.seconds)
        except BusConnectionError as problem:
            self._hang_up()
            self._problem = problem
            if not is_worth_retrying(problem.__cause__):
                self._give_up()
            return False
        self._schedule.made(attempt.address, monotonic())
        return True

    def _give_up(self) -> None:
        """There will be no connection."""
        seconds = self._schedule.timeout if self._loss is None else self._schedule.reconnect
        problem = self._problem or dial.unanswered(self._address, seconds, connected=False)
        self._over(problem if self._loss is None else dial.given_up(self._loss, problem, seconds))

    def _greet(self, until: float, seconds: float) -> None:
        """Have the bus answer the Connect. Raises BusConnectionError."""
        asked = self.core.connected(monotonic())
        try:
            while not asked.done:
                self._send()
                if not self._wait(until):
                    raise dial.unanswered(self._address, seconds, connected=True)
                self._receive()
            if asked.error is not None:
                raise dial.lost(self._address, asked.error)
        except BusConnectionError:
            raise
        except (OSError, RemoteProtocolError) as error:
            raise dial.lost(self._address, error) from error

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None
        self.core.lost()

    def _lose(self, error: Exception) -> None:
        """The connection is gone: another one is made by who waits. Raises if there is none."""
        loss = self._loss = dial.lost(self._address, error)
        self._hang_up()
        self.confirms.update(self.core.confirmed, self.core.refusals())  # It came before the end.
        if self._is_last or not self._schedule.reconnect or not is_worth_retrying(loss.__cause__):
            self._over(dial.left(self._address) if self._is_last else loss)
        log.warning("%s; trying again", loss)
        self._schedule.lost(monotonic())

    def disown(self, end: BusConnectionError) -> None:
        """This process is a child of the one that made the connection. What the selector looks for
        is the parent's: it is closed here, and not changed."""
        if self._end is None:
            self._end = end
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            self._selector.close()

    def _over(self, end: BusConnectionError) -> None:
        """There will be no other connection. Raises that."""
        self._end = end
        self.core.fail_requests(end)
        self.check()

    # Bytes ---------------------------------------------------------------------------------------

    def push(self) -> None:
        """Write what the socket takes now."""
        if self._socket is not None:
            try:
                self._send()
            except OSError as error:
                self._lose(error)

    def _send(self) -> None:
        assert self._socket is not None
        outgoing = self.core.outgoing
        try:
            while data := outgoing.peek():
                outgoing.sent(self._socket.send(data))
            self._is_stuck = False
        except BlockingIOError:
            self._is_stuck = True

    def _receive(self) -> None:
        """Take what is there, without waiting. Raises OSError and RemoteProtocolError."""
        assert self._socket is not None
        core = self.core
        try:
            count = self._socket.recv_into(self._buffer.space)
        except BlockingIOError:
            return
        if not count:
            raise dial.lost(self._address, None)
        core.receive(self._buffer, count, monotonic())
        self.confirms.update(core.confirmed, core.refusals())

    def _wait(self, until: float) -> int:
        """Which events are there; 0 when it is time to look at the clock."""
        assert self._socket is not None
        wanted = EVENT_READ | (EVENT_WRITE if self._is_stuck else 0)
        if wanted != self._awaited:
            self._selector.modify(self._socket, wanted)
            self._awaited = wanted
        patience = None if until == math.inf else max(0.0, until - monotonic())
        ready = self._selector.select(patience)
        return ready[0][1] if ready else 0

    # Waiting for the bus -------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool], deadline: float = math.inf) -> bool:
        """Write and read until the condition holds, or, then False, until the deadline."""
        while True:
            self.check()
            self.push()
            if condition():
                return True
            now = monotonic()
            if now >= deadline:
                return False
            if self._socket is None:
                self._connect_once(deadline)
                continue
            try:
                due = self.core.tick(now)
                self._send()
                if self._wait(min(due, deadline)):
                    self._receive()
            except (OSError, RemoteProtocolError) as error:
                self._lose(error)

    def poll(self) -> None:
        """Write and read what goes without waiting."""
        self.wait_until(lambda: False, monotonic())

    def write(self, deadline: float = math.inf) -> None:
        """Write all that is queued."""
        self.check()
        self.push()
        if self.core.outgoing.queued_bytes:
            self.wait_until(lambda: not self.core.outgoing.queued_bytes, deadline)

    def confirmed(self, first: int, last: int) -> list[RefusedError]:
        """Wait until the bus has confirmed these positions, or refused them."""
        waiter = self.confirms.wait_for(first, last, wake=lambda: None)
        try:
            self.wait_until(lambda: waiter.is_done)
        except BaseException as error:
            if not (waiter.is_done and isinstance(error, BusConnectionError)):
                self.confirms.leave(waiter)
                raise
        return waiter.refused

    def flush(self, deadline: float = math.inf) -> bool:
        """Wait until everything published so far is confirmed, and every acknowledgement so far
        is written; False at the deadline."""
        core, outgoing = self.core, self.core.outgoing
        core.settle_processed()
        if not self.wait_until(lambda: not core.holds_verdicts, deadline):
            return False
        mark, published = outgoing.mark(), core.published
        return self.wait_until(
            lambda: core.confirmed >= published and outgoing.has_written(mark), deadline
        )

    def answered(self, request: Request) -> Request:
        """Wait for an answer of the bus. Raises RefusedError, or what became of the connection."""
        self.wait_until(lambda: request.done)
        if request.error is not None:
            raise request.error
        return request

    def ask(self, question: Callable[[], Request]) -> Request:
        """Ask the bus, again if the connection is lost before the answer."""
        while True:
            self.wait_until(lambda: self._socket is not None)
            try:
                return self.answered(question())
            except BusConnectionError:
                self.check()

    # The end -------------------------------------------------------------------------------------

    def close(self, seconds: float) -> None:
        """Have everything confirmed, say goodbye, and wait until the bus has heard it."""
        deadline = monotonic() + seconds
        try:
            with suppress(BusConnectionError, OSError):
                self.check()
                if self.flush(deadline) and self._socket is not None:
                    self._is_last = True
                    self._socket.shutdown(socket.SHUT_WR)
                    self.wait_until(lambda: False, deadline)
        finally:
            self._end = self._end or dial.left(self._address)
            if self._socket is not None:
                self._hang_up()
            self._selector.close()

    def unconfirmed(self) -> BusConnectionError | None:
        """After `close`: an error if the bus did not confirm everything."""
        count = self.core.published - self.core.confirmed
        return dial.unconfirmed(count, self._end or dial.left(self._address)) if count else None
