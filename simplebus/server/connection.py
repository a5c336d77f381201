"""One client connection: moves bytes between a socket and a session.

Decisions are made in the core; this module only reads and writes. A write is tried at once. A
separate task sends the bytes that the socket did not accept.

Back-pressure on publishers: reading from a version 1 client pauses while its messages are parked or
the journal is behind, and a version 2 client has a credit instead. The next read is delayed while
consumers are behind (`PublisherThrottle`), and briefly after acks, so that acks accumulate.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
import time
from array import array
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import trio

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import (
    CLOSE_FLUSH_SECONDS,
    CONNECTION_SCAN_MESSAGES_MAX,
    DISCONNECT_CHECK_SECONDS,
    HANDSHAKE_FRAME_BYTES_MAX,
    LARGE_PIECE_BYTES,
    TRICKLE_SECONDS,
)
from simplebus.core.protocol.opening import OPENING_BYTES, WrongProtocolError
from simplebus.core.protocol.receive_buffer import ReceiveBuffer, UnprocessedInput
from simplebus.core.protocol.requests import Auth
from simplebus.core.session.rate_limits import address_network
from simplebus.net.tls import TlsSocket, has_unread
from simplebus.server import process
from simplebus.server.preauth.auth_worker import AuthWorker
from simplebus.server.preauth.closing import ClosingConnections
from simplebus.server.preauth.eviction import EvictableConnections
from simplebus.server.preauth.greeting import Greeting
from simplebus.server.preauth.queue import PreAuthQueue
from simplebus.server.read_limit import MEASURED_READ_BYTES_MIN, ReadLimit
from simplebus.server.turns import SlowRequestTurns

# Outbox pieces sent before other connections get a turn.
_SENDS_PER_TURN = 4

_DISCARD_BYTES = 65_536

_TCP_UNACKED = struct.Struct("24x I 28x I")
"""Fields of Linux's `struct tcp_info`: `tcpi_unacked`, and `tcpi_last_ack_recv` in milliseconds."""
_TCP_STATUS = struct.Struct("=B 51x I 12x I")
"""Fields `tcpi_state`, `tcpi_last_data_recv` in milliseconds and `tcpi_rtt` in microseconds."""
_TCP_ESTABLISHED = 1


class TcpStatus(NamedTuple):
    """State of an open TCP connection, as the kernel reports it."""

    idle_seconds: float
    """Time since the last received data."""
    rtt_microseconds: int
    """Estimate of the round-trip time."""


class ConnectionOutbox(Protocol):
    """Interface of the bytes that wait to be sent to a client; see `core.outbox.Outbox`."""

    @property
    def is_idle(self) -> bool: ...
    @property
    def pending_bytes(self) -> int: ...
    @property
    def scanned_count(self) -> int:
        """Messages that the last call of `peek` scanned."""

    def peek(self, tick: int) -> memoryview: ...
    def mark_sent(self, count: int, tick: int) -> None: ...


class ConnectionSession(Protocol):
    """Interface of the session that a connection serves, for any protocol."""

    peer: str
    address: str
    is_closed: bool

    def begin_authentication(self) -> None:
        """Record that the client's credentials are being checked: the client waits for the
        server.
        """

    def end_authentication(self, error: RemoteProtocolError | None) -> None:
        """Record the error that refuses the client, or None if its credentials are right."""

    def allow_split_reads(self) -> None:
        """Process a read with many slow requests in several turns."""

    def refill(self, buffer: ReceiveBuffer) -> int:
        """Copy some of the `unprocessed` bytes into the buffer. Returns how many."""

    @property
    def unprocessed(self) -> UnprocessedInput:
        """Received bytes that are to be processed in later turns."""

    @property
    def is_request_pending(self) -> bool:
        """True if `Listener.continue_request` must be called before anything else is processed."""

    @property
    def outbox(self) -> ConnectionOutbox: ...
    @property
    def next_read_bytes(self) -> int: ...
    @property
    def is_reading_paused(self) -> bool: ...
    @property
    def can_free_space(self) -> bool:
        """True if an ack or a request of this session may free space in the full class."""

    @property
    def can_receive_error(self) -> bool:
        """True if the outbox is still sent before the connection is closed."""


SessionT = TypeVar("SessionT", bound=ConnectionSession)


class Listener(Protocol[SessionT]):
    """Interface between the server of one protocol and its connections."""

    buffer: ReceiveBuffer

    @property
    def preauth_queue(self) -> PreAuthQueue:
        """Schedules connections that are not authenticated yet."""

    evictable_connections: EvictableConnections
    closing_connections: ClosingConnections

    @property
    def slow_request_turns(self) -> SlowRequestTurns:
        """Schedules the `unprocessed` requests of all connections."""

    @property
    def had_large_read(self) -> trio.Event:
        """Set after a large read from any client."""

    @property
    def auth_worker(self) -> AuthWorker | None:
        """Checks credentials before the session gets them; None if no client needs any."""

    def is_valid_auth(self, auth: Auth) -> bool:
        """Return True if these credentials are known to be valid without a slow check."""

    def find_wrong_port(self, data: bytes, *, has_tls: bool) -> RemoteProtocolError | None:
        """Return the error for first data of another protocol, or None.

        `has_tls` is True if this port requires a TLS handshake, and the data came before it.
        """

    def parse_greeting(self, greeting: Greeting) -> tuple[bool, Auth | None]:
        """Return whether the client's first message is complete, and its credentials.

        Raises RemoteProtocolError.
        """

    @property
    def tick_number(self) -> int: ...
    def receive(self, session: SessionT, count: int) -> None: ...
    def continue_request(self, session: SessionT) -> None:
        """Process the next part of the pending request of a session."""

    def should_delay_read(self, session: SessionT) -> bool:
        """Return True if the next read should be delayed; the caller then awaits `delay_read`."""

    def is_blocking_publishers(self, session: SessionT) -> bool: ...
    def send_fatal_error(self, session: SessionT, error: RemoteProtocolError) -> None: ...
    def flush_ready(self) -> None: ...
    def end_some_subscriptions(self, session: SessionT) -> bool:
        """End some subscriptions of a disconnected client. Returns True if there are more."""

    def on_closed(
        self, connection: Connection[SessionT], reason: str | RemoteProtocolError
    ) -> None: ...
    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None: ...
    async def delay_read(self, session: SessionT) -> None: ...


class Connection(Generic[SessionT]):
    """A client's socket and its session.

    Owns the socket; `run` closes it and raises nothing but Cancelled.
    """

    def __init__(
        self, sock: socket.socket, session: SessionT, listener: Listener[SessionT]
    ) -> None:
        self.socket = sock
        self.session = session
        self.connected_at = time.time()
        """Unix time of the connection, in seconds."""
        self.transport: socket.socket | TlsSocket = sock
        """The socket, or TLS on top of it."""
        self.tls: TlsSocket | None = None
        self.network = address_network(session.address)
        self.preauth = listener.preauth_queue.add(sock, (type(listener), self.network))
        """Entry in the pre-authentication queue until the client is authenticated."""
        self._listener = listener
        self._cancel_scope = trio.CancelScope()
        self._resumed = trio.Event()
        self._is_writing = False
        self._disconnect_error: RemoteProtocolError | None = None
        self._is_disconnecting = False
        self._remaining_input_bytes: int | None = None
        """Bytes to read before the connection is closed; see `disconnect_after_input`. None if it
        stays open.
        """
        self._is_opening_checked = False
        """True once the first data was compared with the protocols of the other listeners."""
        self._wrong_port_reply = b""
        """Explanation for a client of another protocol; replaces all other output."""
        session.allow_split_reads()

    def make_evictable(self) -> None:
        """Allow the listener to close this connection for a newer one until it is authenticated."""
        self._listener.evictable_connections.add(self.network, self.disconnect)

    async def run(self) -> None:
        """Serve the client until it closes, violates the protocol or is disconnected."""
        listener, session, sock = self._listener, self.session, self.socket
        space, read_limit = listener.buffer.writable, ReadLimit()
        reason: str | RemoteProtocolError = "closed by the peer"
        try:
            with self._cancel_scope:
                await self.open_transport()
                transport, tls = self.transport, self.tls
                is_open = True
                if listener.auth_worker is not None:
                    is_open = await self._authenticate(listener.auth_worker)
                elif tls is None and not self.has_unread():
                    # Many clients that send nothing must not delay others.
                    await self.preauth.wait_readable()
                self._leave_preauth()
                while is_open:
                    if self._has_processed_remaining_input:
                        reason = "the server is stopping"
                        break
                    if session.is_request_pending or session.unprocessed:
                        await listener.slow_request_turns.wait_turn()
                    elif tls is not None and tls.has_unread:
                        await trio.lowlevel.checkpoint()
                    else:
                        await trio.lowlevel.wait_readable(sock)
                    # The session may have been closed while the task was waiting.
                    if session.is_closed or self._is_disconnecting:
                        break
                    if session.is_request_pending:
                        listener.continue_request(session)
                        if not session.is_request_pending:
                            await self._wait_for_receivers()
                        continue
                    is_refilled = bool(session.unprocessed)
                    try:
                        count = (
                            session.refill(listener.buffer)
                            if is_refilled
                            else transport.recv_into(
                                space[: min(session.next_read_bytes, read_limit.size_bytes)]
                            )
                        )
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        reason = f"lost: {error.strerror or error}"
                        break
                    if count == 0:
                        break
                    if self._remaining_input_bytes is not None and not is_refilled:
                        self._remaining_input_bytes -= count
                    if not self._is_opening_checked:
                        self._check_opening(space[:count])
                    if count < MEASURED_READ_BYTES_MIN:
                        listener.receive(session, count)
                    else:
                        began_at = time.thread_time()
                        listener.receive(session, count)
                        read_limit.record(count, time.thread_time() - began_at)
                        listener.had_large_read.set()
                    if not session.is_request_pending:
                        await self._wait_for_receivers()
        except RemoteProtocolError as error:
            # The traceback refers to this frame, and its `reason` to the error: a reference cycle.
            reason = error.with_traceback(None)
            if isinstance(error, WrongProtocolError):
                self._wrong_port_reply = error.reply
        except Exception as error:
            # An internal error ends this connection only.
            reason = process.log_connection_fault(error, session.peer)
        finally:
            self._leave_preauth()
            reason = self._disconnect_error or reason
            while session.is_request_pending:
                await trio.lowlevel.cancel_shielded_checkpoint()
                with contextlib.suppress(RemoteProtocolError):  # No client can receive the error.
                    listener.continue_request(session)
            while listener.end_some_subscriptions(session):
                await trio.lowlevel.cancel_shielded_checkpoint()
            if isinstance(reason, RemoteProtocolError) and not session.is_closed:
                listener.send_fatal_error(session, reason)
            listener.on_closed(self, reason)
            if self._send_final_bytes():
                listener.closing_connections.add(self._close)
                listener.start_soon(self._wait_for_peer_close)
            else:
                self._close()

    def _check_opening(self, data: memoryview) -> None:
        """Check the first data from the client. Raises RemoteProtocolError."""
        self._is_opening_checked = True
        error = self._listener.find_wrong_port(bytes(data[:OPENING_BYTES]), has_tls=False)
        if error is not None:
            raise error

    def _leave_preauth(self) -> None:
        """End the pre-authentication limits: the client is authenticated or gone."""
        self.preauth.leave()
        self._listener.evictable_connections.discard(self.disconnect)

    async def _authenticate(self, auth_worker: AuthWorker) -> bool:
        """Read the greeting and check its credentials, then pass it to the session.

        Returns:
            False if the client has closed the connection.
        """
        listener, session, preauth = self._listener, self.session, self.preauth
        transport, space = self.transport, self._listener.buffer.writable
        greeting_buffers = auth_worker.greeting_buffers
        greeting = greeting_buffers.open(self.disconnect)
        is_complete, auth = False, None
        try:
            while not is_complete:
                await (preauth.wait_turn() if has_unread(transport) else preauth.wait_readable())
                try:
                    received_bytes = transport.recv_into(space[:HANDSHAKE_FRAME_BYTES_MAX])
                except BlockingIOError:
                    continue
                except OSError:
                    return False
                if received_bytes == 0:
                    return False
                if not self._is_opening_checked:
                    self._check_opening(space[:received_bytes])
                greeting.data += space[:received_bytes]
                is_complete, auth = listener.parse_greeting(greeting)
                greeting_buffers.enforce_limit(greeting)
            session.begin_authentication()
            refusal: RemoteProtocolError | None = None
            try:
                await auth_worker.check(auth, session.address, listener.is_valid_auth)
            except RemoteProtocolError as error:
                refusal = error  # The session replies in its own protocol.
            await preauth.wait_turn()  # Many checks may finish at the same time.
            session.end_authentication(refusal)
        finally:
            greeting_buffers.close(greeting)
        if session.is_closed:
            return False
        received_bytes = len(greeting.data)
        space[:received_bytes] = greeting.data
        listener.receive(session, received_bytes)
        return True

    async def open_transport(self) -> None:
        """Prepare the transport before the greeting; subclasses start TLS here.

        Raises RemoteProtocolError.
        """

    def disconnect(self, error: RemoteProtocolError | None = None) -> None:
        """Close the connection, with `error` as the reason."""
        self._disconnect_error, self._is_disconnecting = error, True
        self.preauth.cancel_in_turn(self._cancel_scope)

    def disconnect_after_input(self) -> None:
        """Close the connection when the bytes that have arrived until now are processed.

        The connection is closed at once if it uses TLS, because the number of these bytes is
        unknown, or if reading is paused, because they would not be processed.
        """
        if self.tls is not None or self.session.is_reading_paused:
            self.disconnect()
            return
        if self._remaining_input_bytes is None:
            size = array("i", [0])
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.socket, termios.FIONREAD, size)
            self._remaining_input_bytes = size[0]
        if self._has_processed_remaining_input:
            self.disconnect()

    @property
    def _has_processed_remaining_input(self) -> bool:
        """True if `disconnect_after_input` was called and all of the input is processed."""
        remaining_bytes = self._remaining_input_bytes
        return remaining_bytes is not None and remaining_bytes <= 0 and not self._has_unprocessed

    @property
    def _has_unprocessed(self) -> bool:
        """True if bytes were read that are not processed yet."""
        return self.session.is_request_pending or bool(self.session.unprocessed)

    def _send_final_bytes(self) -> bool:
        """Send the last replies that the socket accepts. Returns False if no reply waits."""
        outbox = self.session.outbox
        try:
            if self._wrong_port_reply:
                self.transport.send(self._wrong_port_reply)
                self.transport.shutdown(socket.SHUT_WR)
                return True
            if not self.session.can_receive_error or not outbox.pending_bytes:
                return False
            while outbox.pending_bytes and (data := outbox.peek(self._listener.tick_number)):
                count = self.transport.send(data)
                outbox.mark_sent(count, self._listener.tick_number)
            self.transport.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    async def _wait_for_peer_close(self) -> None:
        """Discard input until the client closes, for a limited time.

        Closing a socket with unread input would reset the connection, and the client would lose
        the last replies.
        """
        try:
            with trio.move_on_after(CLOSE_FLUSH_SECONDS):
                while self.socket.fileno() >= 0:  # It may be closed to free its descriptor.
                    await trio.lowlevel.wait_readable(self.socket)
                    if not self.socket.recv(_DISCARD_BYTES):
                        break
        except (trio.ClosedResourceError, OSError):
            pass
        finally:
            self._listener.closing_connections.discard(self._close)
            self._close()

    def _close(self) -> None:
        if self.socket.fileno() < 0:
            return
        trio.lowlevel.notify_closing(self.socket)
        self.transport.close()

    def resume_reading(self) -> None:
        """Read again: the client's queued messages are stored."""
        self._resumed.set()

    async def _wait_for_receivers(self) -> None:
        """Wait before the next read if receivers of the client's messages are behind."""
        if self.session.is_reading_paused:
            await self._wait_until_resumed()
        elif self._listener.should_delay_read(self.session):
            await self._listener.delay_read(self.session)

    async def _wait_until_resumed(self) -> None:
        """Wait until the client's queued messages are stored.

        While it waits, the server still reads, slowly, from a client whose acks may free space. If
        the client has closed its side, the rest of its input is read so that the socket can be
        closed.
        """
        self._resumed = trio.Event()
        seconds = TRICKLE_SECONDS if self.session.can_free_space else DISCONNECT_CHECK_SECONDS
        while self.session.is_reading_paused and not self._has_peer_closed():
            with trio.move_on_after(seconds):
                await self._resumed.wait()
            if self._listener.is_blocking_publishers(self.session):
                return

    def _has_peer_closed(self) -> bool:
        return self._poll(select.POLLRDHUP)

    def has_unread(self) -> bool:
        """Return True if received bytes are to be processed, or the stream has ended."""
        return self._has_unprocessed or self._poll(select.POLLIN)

    def _poll(self, events: int) -> bool:
        if self.socket.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self.socket, events)
        return bool(poll.poll(0))

    def flush(self) -> None:
        """Send the bytes that the socket accepts now; a separate task sends the rest.

        An internal error ends this connection only.
        """
        try:
            if not self._is_writing and not self._send():
                self._is_writing = True
                self._listener.start_soon(self._send_rest)
        except Exception as error:
            process.log_connection_fault(error, self.session.peer)
            self.disconnect()

    def retry_send(self) -> bool:
        """Send again before the system reports the socket as writable.

        The system does so only when much of the send buffer is free. Returns True if some bytes
        were sent, and another call may send more.
        """
        if not self._is_writing or self.socket.fileno() < 0:
            return False
        outbox = self.session.outbox
        previous_bytes = outbox.pending_bytes
        return not self._send() and outbox.pending_bytes != previous_bytes

    def _send(self) -> bool:
        """Send a limited number of pieces. Returns True if the outbox is empty and flushed."""
        outbox, tick, transport = self.session.outbox, self._listener.tick_number, self.transport
        scanned_count = 0
        try:
            for _ in range(_SENDS_PER_TURN):
                if scanned_count > CONNECTION_SCAN_MESSAGES_MAX:
                    break
                data = outbox.peek(tick)
                scanned_count += outbox.scanned_count
                if not data:
                    # The outbox may need another call, after other connections had a turn.
                    return outbox.is_idle and self._is_flushed()
                count = transport.send(data)
                outbox.mark_sent(count, tick)
                if count < len(data):
                    return False
                if outbox.is_idle:
                    return self.tls is None or self._is_flushed()
                if count >= LARGE_PIECE_BYTES:
                    break
        except BlockingIOError:
            return False
        except OSError:
            self.disconnect()  # The reading task may be waiting and not see the error.
            return True
        return outbox.is_idle and self._is_flushed()

    def _is_flushed(self) -> bool:
        """Return True if the TLS layer, if any, holds no unsent bytes."""
        if self.tls is None:
            return True
        self.tls.flush()
        return not self.tls.has_unsent

    async def _send_rest(self) -> None:
        try:
            while self.socket.fileno() >= 0:  # It may be closed before this task first runs.
                await trio.lowlevel.wait_writable(self.socket)
                is_flushed = self._send()
                self._listener.flush_ready()  # Skipped messages may have freed space.
                if is_flushed:
                    return
        except (trio.ClosedResourceError, OSError):
            return
        except Exception as error:
            process.log_connection_fault(error, self.session.peer)
            self.disconnect()
        finally:
            self._is_writing = False

    def tcp_status(self) -> TcpStatus | None:
        """Return the state of the TCP connection; None if the client or the server has closed it.

        If the client has closed it, its last bytes may not be read yet.
        """
        if self._is_disconnecting or self.session.is_closed:
            return None
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_STATUS.size)
        except OSError:
            return None
        state, last_data_ms, rtt_microseconds = _TCP_STATUS.unpack(info)
        if state != _TCP_ESTABLISHED:
            return None
        return TcpStatus(last_data_ms / 1000, rtt_microseconds)

    def unacked_seconds(self) -> float:
        """Return for how long the peer's host has not acknowledged sent TCP data; 0 if none is
        sent.

        A running host acknowledges at once, even if its program reads nothing.
        """
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_UNACKED.size)
        except OSError:
            return 0.0
        unacked, last_ack_ms = _TCP_UNACKED.unpack(info)
        return last_ack_ms / 1000 if unacked else 0.0
