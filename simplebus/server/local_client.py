"""Clients inside the server process, connected without a socket.

The broker treats such a client as a session without authentication. It has all permissions, or
those of a user that another listener has authenticated. `send` has taken effect when it returns;
the client's reader receives replies in its own task.

    client ─► LocalClient.send ─────────► Broker
      ▲                                     │
      └──── LocalClient.receive_into ◄── Outbox
"""

from __future__ import annotations

import trio

from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.limits import CONNECTION_SCAN_MESSAGES_MAX
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.requests import FetchReply, FetchRequest
from simplebus.core.session.session import Session
from simplebus.core.users.users import User
from simplebus.server.server import PublisherDelay, Server

_DELAY_LOOP_TURNS = 4
"""Event loop turns that a fast publisher waits for local readers. Without a delay, a burst would
delay the messages that a bridge copies at the same time.
"""


class LocalEndpoint:
    """Endpoint of the server for clients in the same process. Implements the client's
    `Endpoint`.
    """

    def __init__(self, server: Server, name: str) -> None:
        """`name` is shown to operators as the peer of these sessions."""
        self.server = server
        self._name = name
        self._has_fetched = False
        """True if a fetch returned messages since the last publisher was delayed."""
        server.local_throttles.append(self)

    async def open(self) -> LocalClient:
        """Open a session of the broker. Raises BusConnectionError if the server has ended."""
        await trio.lowlevel.checkpoint()
        if self.server.has_ended:
            raise BusConnectionError("this server has ended")
        self.server.update_clock()
        broker = self.server.broker
        session = broker.open_internal_session(self._name)
        client = self.server.local_clients[session.session_id] = LocalClient(self.server, session)
        return client

    def fetch_from_memory(
        self, class_id: int, request: FetchRequest
    ) -> tuple[FetchReply, list[FrameBatch]] | None:
        """Answer a Fetch request at once, without encoding it.

        Returns:
            The reply and its frames, which are valid until the next await; None if the messages are
            not in memory.

        Raises:
            RemoteProtocolError: The request is refused.
        """
        self.server.update_clock()
        result = self.server.broker.fetch_handler.fetch_from_memory(class_id, request)
        self._has_fetched = self._has_fetched or (result is not None and bool(result[1]))
        return result

    # PublisherThrottle ----------------------------------------------------------------------------

    def create_delay(self, *, has_other_consumers: bool) -> PublisherDelay | None:
        has_fetched, self._has_fetched = self._has_fetched, False
        return self._wait_for_readers if has_fetched else None

    @staticmethod
    async def _wait_for_readers(publisher: Session) -> None:
        """Let local readers process the fetched messages, and fetch more."""
        for _ in range(_DELAY_LOOP_TURNS):
            await trio.lowlevel.checkpoint()

    def __str__(self) -> str:
        return "this server"


class UserEndpoint:
    """Endpoint of the server for requests of one user, with the permissions of that user."""

    def __init__(self, server: Server, user: User | None, peer: str) -> None:
        """`user` is None on a server without users; `peer` is shown to operators."""
        self._server, self._user, self._peer = server, user, peer

    async def open(self) -> LocalClient:
        """Open a session of the broker. Raises BusConnectionError if the server has ended."""
        await trio.lowlevel.checkpoint()
        if self._server.has_ended:
            raise BusConnectionError("this server has ended")
        self._server.update_clock()
        session = self._server.broker.open_user_session(self._peer, self._user)
        client = self._server.local_clients[session.session_id] = LocalClient(self._server, session)
        return client


class LocalClient:
    """A client's connection to the broker.

    Implements `Transport` for the client and `LocalSessionOwner` for the server.
    """

    def __init__(self, server: Server, session: Session) -> None:
        self.session = session
        self._server = server
        self._has_ended = False
        """True if the session is closed. Earlier replies can still be read."""
        self._disconnect_error: RemoteProtocolError | None = None
        self._is_disconnected = False
        """True if the server has disconnected the client; its reader then ends the session."""
        self._readable = trio.Event()
        self._resumed = trio.Event()
        self._send_delay: PublisherDelay | None = None
        """Delay of the next `send`, because receivers of messages are behind."""

    def flush(self) -> bool:
        """Wake the reader if there are bytes to read. Returns True: sent bytes need no flush."""
        if not self.session.outbox.is_idle:
            self._readable.set()
        return True

    # Called by the server -------------------------------------------------------------------------

    def resume_reading(self) -> None:
        """Let the client send again."""
        self._resumed.set()

    def disconnect(self, error: RemoteProtocolError | None = None) -> None:
        """End the session, with `error` as the reason."""
        self._is_disconnected, self._disconnect_error = True, error
        self._readable.set()
        self._resumed.set()

    # Called by the client -------------------------------------------------------------------------

    def send(self, data: memoryview) -> int:
        session, space = self.session, self._server.buffer.writable
        if self._has_ended or self._is_disconnected or session.is_closed:
            return len(data)  # Like a socket: the reader gets the end of the stream.
        if session.is_reading_paused or self._send_delay is not None:
            return 0
        count = min(len(data), len(space))
        space[:count] = data[:count]
        try:
            self._server.receive(session, count)
            self._send_delay = self._server.create_delay()
        except RemoteProtocolError as error:
            self._end(error)
        return count

    async def wait_sendable(self) -> None:
        await trio.lowlevel.checkpoint()
        if (delay := self._send_delay) is not None:
            self._send_delay = None
            await delay(self.session)
        while self.session.is_reading_paused and not (self._has_ended or self._is_disconnected):
            self._resumed = trio.Event()
            await self._resumed.wait()

    async def receive_into(self, space: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        while True:
            if (self._is_disconnected or self.session.is_closed) and not self._has_ended:
                self._end(self._disconnect_error or "cut off")
            if count := self._read_outbox(space):
                return count
            if self._has_ended:
                return 0
            if not self.session.outbox.is_idle:  # The outbox needs another call.
                self._server.flush_ready()
                await trio.lowlevel.checkpoint()
                continue
            self._readable = trio.Event()
            await self._readable.wait()

    def _read_outbox(self, space: memoryview) -> int:
        """Copy outgoing bytes into `space`. Returns their number."""
        outbox, tick = self.session.outbox, self._server.tick_number
        read_bytes, space_bytes, scanned_count = 0, len(space), 0
        while (
            read_bytes < space_bytes
            and scanned_count <= CONNECTION_SCAN_MESSAGES_MAX
            and (piece := outbox.peek(tick))
        ):
            scanned_count += outbox.scanned_count
            count = min(len(piece), space_bytes - read_bytes)
            space[read_bytes : read_bytes + count] = piece[:count]
            outbox.mark_sent(count, tick)
            read_bytes += count
        if read_bytes or self._server.broker.has_position_changes:
            self._server.flush_ready()  # Skipped messages may have freed space.
        return read_bytes

    def send_eof(self) -> None:
        self._end("closed by the client")

    def close(self) -> None:
        self._end("closed by the client")

    def _end(self, reason: str | RemoteProtocolError) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if isinstance(reason, RemoteProtocolError) and not self.session.is_closed:
            self._server.send_fatal_error(self.session, reason)
        self._server.on_closed(self, reason)
        self._readable.set()
        self._resumed.set()
