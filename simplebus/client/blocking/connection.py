"""Connection of the blocking client, which is replaced when it is lost.

Every waiting call also reads and writes, so that client and server never wait for each other, and
replaces a lost connection within its timeout. The core decides which bytes are sent, and the
reconnect schedule when to connect.
"""

from __future__ import annotations

import math
import selectors
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic

from simplebus.client import addresses as client_addresses
from simplebus.client import fork_safety
from simplebus.client.addresses import Address
from simplebus.client.blocking.socket_steps import (
    Step,
    connect_socket,
    start_tls,
    wait,
    wait_ready,
)
from simplebus.client.core.client import ClientCore
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.credentials import Access
from simplebus.client.pending_confirms import PendingConfirms
from simplebus.client.reconnect import ConnectAttempt, ReconnectSchedule, is_worth_retrying
from simplebus.core.errors import (
    BusConnectionError,
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
)
from simplebus.core.limits import READ_BYTES
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.logs.event_logger import EventLogger
from simplebus.net.tls import TlsSocket, has_unread, is_flushed, plain_socket


class ThreadGuard:
    """Context manager that raises LocalProtocolError if another thread is inside."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise LocalProtocolError(
                "another thread is using this bus; a blocking bus belongs to one thread at a time: "
                "connect once in each"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


log = EventLogger("simplebus.client")

# After this time without a read, the socket is read before the silence of the server is checked,
# because heartbeats of the server may wait there.
_STALE_READ_SECONDS = 0.05

# Longest wait of one `select`, because operating systems limit its timeout.
_SELECT_SECONDS_MAX = 3600.0


class BlockingClientConnection:
    """Reconnecting connection of a client core, for one thread at a time. Call `open`, and `close`
    at the end.
    """

    def __init__(
        self,
        core: ClientCore,
        addresses: Sequence[Address],
        schedule: ReconnectSchedule,
        access: Access | None = None,
    ) -> None:
        self.core = core
        self._access = access
        self.confirms = PendingConfirms()
        self._addresses, self._schedule = addresses, schedule
        self._address = addresses[0]
        """Address of the present or last connection."""
        self._socket: socket.socket | TlsSocket | None = None
        """None while there is no connection with a completed handshake."""
        self._pending_connection: Generator[Step, None, None] | None = None
        """Steps of the connection that is being made."""
        self._selector = selectors.DefaultSelector()
        self._buffer = ReceiveBuffer(READ_BYTES)
        self._is_write_blocked = False
        """True if the socket accepted less than it was given."""
        self._read_at = 0.0
        """Time of the last read from a socket."""
        self._tick_due = 0.0
        """Time of the next `ClientCore.tick`."""
        self._selected_events = EVENT_READ
        """Events for which the socket is registered with the selector."""
        self._lost_error: BusConnectionError | None = None
        """Reason for the loss of the last connection."""
        self._end_error: BusConnectionError | None = None
        """Reason why no other connection will be made; None while one may be."""
        self._is_last = False
        """True if no other connection is needed, because everything is confirmed."""
        self.thread_guard = ThreadGuard()
        """Held by the thread that uses the bus."""
        self.core.set_notice_handler(client_addresses.NoticeLog().add)
        fork_safety.register(self)

    def check_open(self) -> None:
        """Raise BusConnectionError if no other connection will be made."""
        if self._end_error is not None:
            raise BusConnectionError(str(self._end_error)) from self._end_error.__cause__

    # Connections ---------------------------------------------------------------------------------

    @property
    def is_disconnected(self) -> bool:
        """True if there is no connection now."""
        return self._socket is None

    def open(self) -> None:
        """Make the first connection. Raises BusConnectionError."""
        while self._socket is None:
            self._connect(math.inf)

    def _connect(self, deadline: float) -> None:
        """Do one step of connecting, and wait for the next one until the deadline.

        Raises BusConnectionError if no connection can be made.
        """
        if self._pending_connection is None:
            attempt = self._schedule.next_attempt(monotonic())
            if attempt is None:
                self._give_up()
                return
            self._pending_connection = self._attempt_connection(attempt)
        step = next(self._pending_connection, None)
        if step is None:
            self._pending_connection = None
        else:
            wait(step, deadline)

    def _attempt_connection(self, attempt: ConnectAttempt) -> Generator[Step, None, None]:
        """Yield the steps of one attempt. Raises BusConnectionError to give up."""
        start = monotonic() + attempt.delay_seconds
        while monotonic() < start:
            yield None, 0, start
        self._address = self._addresses[attempt.address_index]
        until = monotonic() + attempt.timeout_seconds
        try:
            forgotten_before = self.core.publish_buffer.forgotten_count
            sock = yield from connect_socket(self._address, until, attempt.timeout_seconds)
            try:
                stream = yield from start_tls(
                    sock, self._address, self._access, until, attempt.timeout_seconds
                )
                yield from self._perform_handshake(stream, until, attempt.timeout_seconds)
            except BaseException:
                sock.close()
                self.core.connection_lost()
                raise
        except BusConnectionError as problem:
            schedule = self._schedule
            if not schedule.mark_failed(attempt.address_index, problem):
                self._give_up()
            elif schedule.last_error is problem and schedule.has_permanent_refusal:
                log.warning(
                    "address.refused", "{error}; that address is not tried again", error=problem
                )
            return
        client_addresses.log_forgotten_messages(
            self._address, self.core.publish_buffer.forgotten_count - forgotten_before
        )
        self._socket = stream
        self._selector.register(stream, EVENT_READ)
        self._selected_events = EVENT_READ
        self._tick_due = 0.0
        self._schedule.mark_connected(attempt.address_index, monotonic())

    def _give_up(self) -> None:
        """Raise the error for a connection that could not be made."""
        schedule, loss = self._schedule, self._lost_error
        seconds = schedule.timeout_seconds if loss is None else schedule.reconnect_seconds
        problem = schedule.last_error or client_addresses.connect_timeout_error(
            self._address, seconds, is_connected=False
        )
        limit = None if schedule.has_permanent_refusal else seconds
        self._end(
            problem
            if loss is None
            else client_addresses.reconnect_failed_error(loss, problem, limit)
        )

    def _perform_handshake(
        self, sock: socket.socket | TlsSocket, until: float, seconds: float
    ) -> Generator[Step, None, None]:
        """Yield steps until the bus has answered the Connect. Raises BusConnectionError."""
        connect_request = self.core.connection_made(monotonic())
        try:
            while not connect_request.is_done:
                self._send(sock)
                events = EVENT_READ | (EVENT_WRITE if self._is_write_blocked else 0)
                if not has_unread(sock) and not (
                    yield from wait_ready(plain_socket(sock), events, until)
                ):
                    raise client_addresses.connect_timeout_error(
                        self._address, seconds, is_connected=True
                    )
                self._receive(sock)
            if connect_request.error is not None:
                raise client_addresses.connection_lost_error(self._address, connect_request.error)
        except BusConnectionError:
            raise
        except (OSError, RemoteProtocolError) as error:
            raise client_addresses.connection_lost_error(self._address, error) from error

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None
        self.core.connection_lost()

    def _connection_lost(self, error: Exception) -> None:
        """Close the lost connection. The next wait replaces it; raises if that is not allowed."""
        loss = self._lost_error = client_addresses.connection_lost_error(self._address, error)
        self._close_socket()
        # Confirms that arrived before the loss are valid.
        self.confirms.update(self.core.confirmed_position, self.core.pop_refusals())
        if (
            self._is_last
            or not self._schedule.reconnect_seconds
            or not is_worth_retrying(loss.__cause__)
        ):
            self._end(
                client_addresses.connection_closed_error(self._address) if self._is_last else loss
            )
        log.warning("connection.lost", "{error}; retrying", error=loss)
        self._schedule.mark_lost(monotonic())

    def disown(self, end: BusConnectionError) -> None:
        """Close in a forked child. The selector shares its registrations with the parent, so it is
        closed without changing them.
        """
        # A thread that held the old guard does not exist in the child.
        self.thread_guard = ThreadGuard()
        if self._end_error is None:
            self._end_error = end
            if self._socket is not None:
                plain_socket(self._socket).close()
                self._socket = None
            self._selector.close()

    def _end(self, end: BusConnectionError) -> None:
        """Fail all requests and raise `end`, because no other connection will be made."""
        self._end_error = end
        self.core.fail_requests(end)
        self.check_open()

    # Bytes ---------------------------------------------------------------------------------------

    def write_now(self) -> None:
        """Write as much as the socket accepts now."""
        with self.thread_guard:
            self._write()

    def _write(self) -> None:
        if self._socket is not None:
            try:
                self._send(self._socket)
            except OSError as error:
                self._connection_lost(error)

    def read_and_write(self) -> None:
        """Read once what has arrived, and write as much as the socket accepts now."""
        with self.thread_guard:
            if self._socket is not None:
                try:
                    self._receive(self._socket)
                    self._send(self._socket)
                except (OSError, RemoteProtocolError) as error:
                    self._connection_lost(error)

    def _send(self, sock: socket.socket | TlsSocket) -> None:
        outgoing = self.core.send_queue
        try:
            while data := outgoing.peek():
                outgoing.mark_sent(sock.send(data))
            self._is_write_blocked = not is_flushed(sock)
        except BlockingIOError:
            self._is_write_blocked = True

    def _receive(self, sock: socket.socket | TlsSocket) -> None:
        """Read what has arrived, without waiting. Raises OSError and RemoteProtocolError."""
        core = self.core
        self._read_at = monotonic()
        try:
            count = sock.recv_into(self._buffer.writable)
        except BlockingIOError:
            return
        if not count:
            raise client_addresses.connection_lost_error(self._address, None)
        core.receive(self._buffer, count, monotonic())
        self.confirms.update(core.confirmed_position, core.pop_refusals())

    def _wait(self, sock: socket.socket | TlsSocket, until: float) -> int:
        """Wait for socket events and return them; 0 if there were none until the time `until`."""
        if has_unread(sock):
            return EVENT_READ
        events = EVENT_READ | (EVENT_WRITE if self._is_write_blocked else 0)
        if events != self._selected_events:
            self._selector.modify(sock, events)
            self._selected_events = events
        timeout = (
            None if until == math.inf else min(max(0.0, until - monotonic()), _SELECT_SECONDS_MAX)
        )
        ready = self._selector.select(timeout)
        return ready[0][1] if ready else 0

    # Waiting for the bus -------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool], deadline: float = math.inf) -> bool:
        """Read and write until the condition holds. Returns False at the deadline.

        Data that has arrived is read once even after the deadline, so that calls with a timeout of
        0 make progress.
        """
        with self.thread_guard:
            is_last = False
            while True:
                self.check_open()
                self._write()
                if condition():
                    return True
                if is_last:
                    return False
                now = monotonic()
                is_last = now >= deadline
                self._read(now, deadline)
                if condition():
                    return True

    def _read(self, now: float, deadline: float) -> None:
        """Wait until the deadline at most and read once, or continue connecting."""
        sock = self._socket
        if sock is None:
            self._connect(deadline)
            return
        try:
            is_stale = now - self._read_at >= _STALE_READ_SECONDS
            if is_stale:
                self._receive(sock)  # Before `tick` checks how long the server was silent.
            if now >= self._tick_due:
                self._tick_due = self.core.tick(now)
                self._send(sock)
            if not is_stale and self._wait(sock, min(self._tick_due, deadline)):
                self._receive(sock)
        except (OSError, RemoteProtocolError) as error:
            self._connection_lost(error)

    def poll(self) -> None:
        """Read and write without waiting, and continue connecting."""
        self.wait_until(lambda: False, monotonic())

    def write_all(self, deadline: float = math.inf) -> None:
        """Write all queued bytes."""
        self.check_open()
        self.write_now()
        if self.core.send_queue.queued_bytes:
            self.wait_until(lambda: not self.core.send_queue.queued_bytes, deadline)

    def wait_confirmed(self, first: int, last: int) -> list[RefusedError]:
        """Wait until the bus has confirmed or refused the positions first..last. Returns the
        refusals.
        """
        waiter = self.confirms.add_waiter(first, last, on_done=lambda: None)
        self.core.require_confirm(last + 1)
        try:
            self.wait_until(lambda: waiter.is_done)
        except BaseException as error:
            if not (waiter.is_done and isinstance(error, BusConnectionError)):
                self.confirms.cancel(waiter)
                raise
        return waiter.refusals

    def flush(self, deadline: float = math.inf) -> bool:
        """Wait until everything published so far is confirmed and every ack so far is written.

        Returns False at the deadline.
        """
        core, outgoing = self.core, self.core.send_queue
        core.ack_processed()
        if not self.wait_until(lambda: not core.has_held_acks, deadline):
            return False
        acks_end, published = outgoing.encode_acks(), core.published_position
        core.require_confirm(published)
        return self.wait_until(
            lambda: core.confirmed_position >= published and outgoing.has_written_acks(acks_end),
            deadline,
        )

    def wait_answered(self, request: OpenRequest) -> OpenRequest:
        """Wait for the reply to a request. Raises RefusedError or BusConnectionError."""
        self.wait_until(lambda: request.is_done)
        if request.error is not None:
            raise request.error
        return request

    def wait_answered_briefly(self, request: OpenRequest, deadline: float) -> None:
        """Write all queued bytes and wait for any reply, until the deadline. A lost connection ends
        the wait.
        """
        self.write_all(deadline)
        if self._socket is not None:
            self.wait_until(lambda: request.is_done or self._socket is None, deadline)

    def request(self, send: Callable[[], OpenRequest]) -> OpenRequest:
        """Send a request and wait for its reply; repeat it if the connection is lost before."""
        while True:
            self.wait_until(lambda: self._socket is not None)
            try:
                return self.wait_answered(send())
            except BusConnectionError:
                self.check_open()

    def sync_acks(self, inbox: Inbox) -> None:
        """Wait until the acks of a subscription are stored.

        Raises:
            BusConnectionError: The connection is lost; the acks may be lost, too.
            RefusedError: The server cannot confirm stored acks.
        """
        self.wait_until(
            lambda: (
                self._socket is not None
                and inbox.subscribe_request.is_done
                and not inbox.has_held_acks
            )
        )
        self.wait_answered(self.core.sync_acks())

    # The end -------------------------------------------------------------------------------------

    def close(self, seconds: float) -> None:
        """Wait until everything is confirmed and the bus has closed the connection."""
        deadline = monotonic() + seconds
        try:
            with suppress(BusConnectionError, OSError):
                self.check_open()
                if self.flush(deadline) and self._socket is not None:
                    self._is_last = True
                    self._socket.shutdown(socket.SHUT_WR)
                    self.wait_until(lambda: False, deadline)
        finally:
            self._end_error = self._end_error or client_addresses.connection_closed_error(
                self._address
            )
            if self._pending_connection is not None:
                self._pending_connection.close()
            if self._socket is not None:
                self._close_socket()
            self._selector.close()

    def unconfirmed_error(self) -> BusConnectionError | None:
        """Return an error if, after `close`, messages are not confirmed."""
        count = self.core.published_position - self.core.confirmed_position
        return (
            client_addresses.unconfirmed_error(
                count, self._end_error or client_addresses.connection_closed_error(self._address)
            )
            if count
            else None
        )
