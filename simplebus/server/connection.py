"""One socket's owner: reads into the engine's buffer, writes what the session's outbox shows.

Rule 1: no decisions here. What bytes mean, what is sent and who waits is the core's business.
Rule 2: a write is tried at once, by whoever made it possible; only what did not fit waits in a task
of its own. Reading pauses while this peer's messages wait for room: that is all our back-pressure.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import trio

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import (
    FAREWELL_SECONDS,
    GREETING_BYTES_MAX,
    HUNG_UP_SECONDS,
    TRICKLE_SECONDS,
)
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.protocol.requests import Auth
from simplebus.core.session.rate_limits import address_network
from simplebus.net.tls import TlsSocket, has_unread
from simplebus.server import process
from simplebus.server.preauth.auth_worker import Gatekeeper
from simplebus.server.preauth.closing import ClosingConnections
from simplebus.server.preauth.eviction import Strangers
from simplebus.server.preauth.greeting import Heard
from simplebus.server.preauth.queue import Anteroom

# Pieces sent in one turn before other connections get theirs.
_PIECES_PER_TURN = 4

_DISCARD_BYTES = 65_536

_TCP_INFO = struct.Struct("24x I 28x I")
"""From Linux's struct tcp_info: tcpi_unacked, and tcpi_last_ack_recv in milliseconds."""
_TCP_DATA = struct.Struct("52x I")
"""And tcpi_last_data_recv."""


class Outgoing(Protocol):
    """What waits to be sent to a peer; see `core.outbox.Outbox`."""

    @property
    def is_idle(self) -> bool: ...
    @property
    def pending_bytes(self) -> int: ...
    def peek(self, tick: int) -> memoryview: ...
    def mark_sent(self, count: int, tick: int) -> None: ...


class Conversation(Protocol):
    """What a connection needs to know of a session, whatever is spoken."""

    peer: str
    address: str
    admission_error: RemoteProtocolError | None
    """Why it is not to be let in, whoever it says to be."""
    is_authenticating: bool
    """Whether it has said who it is, and that is looked at: it waits for us."""
    is_closed: bool

    @property
    def outbox(self) -> Outgoing: ...
    @property
    def next_read_bytes(self) -> int: ...
    @property
    def is_reading_paused(self) -> bool: ...
    @property
    def can_free_space(self) -> bool:
        """Whether what it says may end its own waiting."""

    @property
    def can_receive_error(self) -> bool:
        """Whether it is sent what waits for it before it is closed."""


S = TypeVar("S", bound=Conversation)


class Door(Protocol[S]):
    """Where sessions of one protocol come in."""

    buffer: ReceiveBuffer

    @property
    def anteroom(self) -> Anteroom:
        """Where peers are until the door knows who they are."""

    strangers: Strangers
    farewells: ClosingConnections

    @property
    def gatekeeper(self) -> Gatekeeper | None:
        """Who hears peers before the door does; None where nobody is asked who it is."""

    def knows(self, auth: Auth) -> bool:
        """Whether this shows who one is, as far as it can be told at once."""

    def introduction(self, heard: Heard) -> tuple[bool, Auth | None]:
        """Whether enough was heard of a peer to know what it says of who it is, and that. Raises
        RemoteProtocolError."""

    @property
    def tick_number(self) -> int: ...
    def receive(self, session: S, count: int) -> None: ...
    def may_rest(self, session: S) -> bool:
        """Whether reading on a little later is better; then `rest` is awaited."""

    def holds_back(self, session: S) -> bool: ...
    def fail(self, session: S, error: RemoteProtocolError) -> None: ...
    def settle(self) -> None: ...
    def closed(self, connection: Connection[S], reason: str | RemoteProtocolError) -> None: ...
    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None: ...
    async def rest(self, session: S) -> None: ...


class Connection(Generic[S]):
    """A peer's socket and its session.

    Resources: owns the socket; `run` closes it. Errors: `run` lets none escape but Cancelled.
    """

    def __init__(self, sock: socket.socket, session: S, door: Door[S]) -> None:
        self.socket = sock
        self.session = session
        self.since = time.time()
        """When it was made."""
        self.wire: socket.socket | TlsSocket = sock
        """What is read from and written to: the socket, or TLS on it."""
        self.tls: TlsSocket | None = None
        self.place = address_network(session.address)
        self.guest = door.anteroom.enter(sock, (type(door), self.place))
        """As which it waits until it is inside."""
        self._door = door
        self._scope = trio.CancelScope()
        self._room = trio.Event()
        self._writing = False
        self._cut_for: RemoteProtocolError | None = None

    def makes_room(self) -> None:
        """Until its peer has said who it is, it goes where another one finds no place."""
        self._door.strangers.come(self.place, self.cut)

    async def run(self) -> None:
        """Serve the peer until it leaves, breaks the protocol or is cut off."""
        door, session, sock = self._door, self.session, self.socket
        space = door.buffer.space
        reason: str | RemoteProtocolError = "closed by the peer"
        try:
            with self._scope:
                await self.begin()
                wire, tls = self.wire, self.tls
                is_open = door.gatekeeper is None or await self._introduce(door.gatekeeper)
                self._is_known()
                while is_open:
                    if tls is not None and tls.unread:
                        await trio.lowlevel.checkpoint()
                    else:
                        await trio.lowlevel.wait_readable(sock)
                    # Another connection may have taken its place since; and who is cut off is not
                    # heard any more, though something has just come.
                    if session.is_closed or self._scope.cancel_called:
                        break
                    try:
                        count = wire.recv_into(space[: session.next_read_bytes])
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        reason = f"lost: {error.strerror or error}"
                        break
                    if count == 0:
                        break
                    door.receive(session, count)
                    if session.is_reading_paused:
                        await self._wait_for_room()
                    elif door.may_rest(session):
                        await door.rest(session)
        except RemoteProtocolError as error:
            reason = error
        except Exception as error:
            # A fault of ours costs this peer its connection, and nobody else anything.
            reason = process.blame(error, session.peer)
        finally:
            self._is_known()
            reason = self._cut_for or reason
            if isinstance(reason, RemoteProtocolError) and not session.is_closed:
                door.fail(session, reason)
            door.closed(self, reason)
            if self._say_farewell():
                door.farewells.add(self._close)
                door.start_soon(self._wait_for_hang_up)
            else:
                self._close()

    def _is_known(self) -> None:
        """It is inside, or gone."""
        self.guest.leave()
        self._door.strangers.go(self.cut)

    async def _introduce(self, gatekeeper: Gatekeeper) -> bool:
        """Hear who the peer says it is, and have it checked, before the session hears it. Returns
        False when the peer has left."""
        door, session, wire, space = self._door, self.session, self.wire, self._door.buffer.space
        guest = self.guest
        greetings = gatekeeper.greetings
        heard = greetings.open(self.cut)
        is_whole, auth = False, None
        try:
            while not is_whole:
                await (guest.turn() if has_unread(wire) else guest.readable())
                try:
                    count = wire.recv_into(space[:GREETING_BYTES_MAX])
                except BlockingIOError:
                    continue
                except OSError:
                    return False
                if count == 0:
                    return False
                heard.data += space[:count]
                is_whole, auth = door.introduction(heard)
                greetings.count(heard)
            session.is_authenticating = True
            try:
                await gatekeeper.hear(auth, session.address, door.knows)
            except RemoteProtocolError as error:
                session.admission_error = error  # In whose words it is told, the session knows.
            await guest.turn()  # What many have said may be known to be wrong at once.
            session.is_authenticating = False
        finally:
            greetings.close(heard)
        if session.is_closed:
            return False
        count = len(heard.data)
        space[:count] = heard.data
        door.receive(session, count)
        return True

    async def begin(self) -> None:
        """What comes before the conversation: nothing here. Raises RemoteProtocolError."""

    def cut(self, error: RemoteProtocolError | None = None) -> None:
        """Stop serving this peer, for this reason."""
        self._cut_for = error
        self.guest.end(self._scope)

    def _say_farewell(self) -> bool:
        """Send the last answers of a session that hears them, as far as the socket takes them.
        Returns whether there were any."""
        outbox = self.session.outbox
        if not self.session.can_receive_error or not outbox.pending_bytes:
            return False
        try:
            while outbox.pending_bytes and (piece := outbox.peek(self._door.tick_number)):
                count = self.wire.send(piece)
                outbox.sent(count, self._door.tick_number)
            self.wire.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    async def _wait_for_hang_up(self) -> None:
        """Closing a socket with bytes unread would take back what was just sent."""
        try:
            with trio.move_on_after(FAREWELL_SECONDS):
                while self.socket.fileno() >= 0:  # Others need its descriptor, perhaps.
                    await trio.lowlevel.wait_readable(self.socket)
                    if not self.socket.recv(_DISCARD_BYTES):
                        break
        except (trio.ClosedResourceError, OSError):
            pass
        finally:
            self._door.farewells.discard(self._close)
            self._close()

    def _close(self) -> None:
        if self.socket.fileno() < 0:
            return
        trio.lowlevel.notify_closing(self.socket)
        self.wire.close()

    def room(self) -> None:
        """The messages that waited for room are stored."""
        self._room.set()

    async def _wait_for_room(self) -> None:
        """Pause reading. A peer whose acks may make the room is read on slowly. Of one that has
        hung up, what it left is read, so that its socket is not kept."""
        self._room = trio.Event()
        seconds = TRICKLE_SECONDS if self.session.can_make_room else HUNG_UP_SECONDS
        while self.session.is_reading_paused and not self._has_hung_up():
            with trio.move_on_after(seconds):
                await self._room.wait()
            if self._door.holds_back(self.session):
                return

    def _has_hung_up(self) -> bool:
        return self._polled(select.POLLRDHUP)

    def has_unread(self) -> bool:
        """Whether something came, or the end of it, that was not read yet."""
        return self._polled(select.POLLIN)

    def _polled(self, events: int) -> bool:
        if self.socket.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self.socket, events)
        return bool(poll.poll(0))

    def flush(self) -> None:
        """Send what can be sent without waiting; a task of its own sends the rest."""
        if not self._writing and not self._send():
            self._writing = True
            self._door.start_soon(self._write)

    def push(self) -> None:
        """Send what can be sent though the system has not said that there is room: it does so only
        when there is much."""
        left = -1
        outbox = self.session.outbox
        while self._writing and self.socket.fileno() >= 0 and left != outbox.pending_bytes:
            left = outbox.pending_bytes
            if self._send():
                return

    def _send(self) -> bool:
        """Send until nothing is left (True), or until it is enough or too much (False)."""
        outbox, tick, wire = self.session.outbox, self._door.tick_number, self.wire
        try:
            for _ in range(_PIECES_PER_TURN):
                piece = outbox.peek(tick)
                if not piece:
                    # Or there is more to look at, in another turn.
                    return outbox.idle and self._is_on_its_way()
                count = wire.send(piece)
                outbox.mark_sent(count, tick)
                if count < len(piece):
                    return False
                if outbox.is_idle:
                    return self._is_on_its_way()
        except BlockingIOError:
            return False
        except OSError:
            self.cut()  # The reader learns the same from its own end, or is asleep.
            return True
        return outbox.idle and self._is_on_its_way()

    def _is_on_its_way(self) -> bool:
        """Whether nothing that was taken from the outbox waits in between."""
        if self.tls is None:
            return True
        self.tls.flush()
        return not self.tls.unsent

    async def _write(self) -> None:
        try:
            while self.socket.fileno() >= 0:  # Closed, perhaps, before the first turn.
                await trio.lowlevel.wait_writable(self.socket)
                done = self._send()
                self._door.settle()  # What was passed over may have made room.
                if done:
                    return
        except (trio.ClosedResourceError, OSError):
            return
        except Exception as error:
            process.blame(error, self.session.peer)
            self.cut()
        finally:
            self._writing = False

    def silent_seconds(self) -> float:
        """How long nothing has come from the peer's program; 0 if that is not known."""
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_DATA.size)
        except OSError:
            return 0.0
        (last_data_ms,) = _TCP_DATA.unpack(info)
        return float(last_data_ms) / 1000

    def unanswered_seconds(self) -> float:
        """How long the peer's host has not acknowledged bytes that are under way to it; 0 if none.

        A host that lives acknowledges at once, also when its program reads nothing.
        """
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return 0.0
        unacked, last_ack_ms = _TCP_INFO.unpack(info)
        return last_ack_ms / 1000 if unacked else 0.0
