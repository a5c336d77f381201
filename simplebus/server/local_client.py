"""A client that is part of the server: bytes go from hand to hand, without a socket.

Rule 1: to the broker it is a session like others, but nobody asks it who it is: it is the server's
own, and may do everything.
Rule 2: what it wrote has happened when `send` returns. What there is for it is taken by its reader,
in its turn.

    Wire ─► InsideLink.send ─────────► Broker
      ▲                                  │
      └──── InsideLink.receive_into ◄── Outbox
"""

from __future__ import annotations

import trio

from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.requests import FetchReply, FetchRequest
from simplebus.core.session.session import Session
from simplebus.server.server import Engine

_TURNS = 4
"""So often others have their turns before a publisher of much is read on: what it has said is seen,
made into something, and on its way then. With none, a burst holds up what is copied meanwhile."""


class Inside:
    """Where such clients find the server. A `Place`."""

    def __init__(self, engine: Engine, name: str) -> None:
        """`name` says who they are, to operators."""
        self.engine = engine
        self._name = name
        self._is_reading = False
        """Whether something was seen since a publisher was asked to wait last."""
        engine.parts.append(self)

    async def open(self) -> InsideLink:
        """A link to the broker, for one client. Raises BusConnectionError when the server ends."""
        await trio.lowlevel.checkpoint()
        if self.engine.has_ended:
            raise BusConnectionError("this server has ended")
        self.engine.read_clock()
        broker = self.engine.broker
        session = broker.open_session(self._name)
        session.is_authenticated = session.is_internal = True
        session.receiver.frame_bytes_max = broker.settings.limits.frame_bytes
        link = self.engine.own[session.session_id] = InsideLink(self.engine, session)
        return link

    def see(self, class_id: int, wish: FetchRequest) -> tuple[FetchReply, list[FrameBatch]] | None:
        """What a Fetch would be answered now, without the way there and back: frames are valid
        until the next await. None where that takes longer. Raises RemoteProtocolError."""
        self.engine.read_clock()
        found = self.engine.broker.fetch_handler.fetch_from_memory(class_id, wish)
        self._is_reading = self._is_reading or (found is not None and bool(found[1]))
        return found

    # What publishers wait for --------------------------------------------------------------------

    def feeds_anybody(self) -> bool:
        return False

    def holds(self, *, others: bool) -> bool:
        is_reading, self._is_reading = self._is_reading, False
        return is_reading

    async def hold(self, publisher: Session) -> None:
        """Let those who read go on with what they have seen, and see what follows."""
        for _ in range(_TURNS):
            await trio.lowlevel.checkpoint()

    def __str__(self) -> str:
        return "this server"


class InsideLink:
    """A client's link to the broker. To the client it is a `Link`, to the engine a `Guest`."""

    def __init__(self, engine: Engine, session: Session) -> None:
        self.session = session
        self._engine = engine
        self._is_over = False
        """Whether it has ended: what was answered before is still read."""
        self._cut_for: RemoteProtocolError | None = None
        self._is_cut = False
        """Whether the engine wants it ended: its reader does that."""
        self._arrived = trio.Event()
        self._room = trio.Event()

    def flush(self) -> bool:
        """There may be something to read; all that was sent is there."""
        if not self.session.outbox.is_idle:
            self._arrived.set()
        return True

    # What the engine says ------------------------------------------------------------------------

    def room(self) -> None:
        """It may say more."""
        self._room.set()

    def cut(self, error: RemoteProtocolError | None = None) -> None:
        """Stop serving it, for this reason."""
        self._is_cut, self._cut_for = True, error
        self._arrived.set()
        self._room.set()

    # What the client says ------------------------------------------------------------------------

    def send(self, data: memoryview) -> int:
        session, space = self.session, self._engine.buffer.space
        if self._is_over or self._is_cut or session.is_closed:
            return len(data)  # As a socket's: who reads learns that nobody listens.
        if session.is_reading_paused:
            return 0
        count = min(len(data), len(space))
        space[:count] = data[:count]
        try:
            self._engine.receive(session, count)
        except RemoteProtocolError as error:
            self._end(error)
        return count

    async def wait_sendable(self) -> None:
        await trio.lowlevel.checkpoint()
        while self.session.is_reading_paused and not (self._is_over or self._is_cut):
            self._room = trio.Event()
            await self._room.wait()

    async def receive_into(self, space: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        while True:
            if (self._is_cut or self.session.is_closed) and not self._is_over:
                self._end(self._cut_for or "cut off")
            if count := self._take(space):
                return count
            if self._is_over:
                return 0
            if not self.session.outbox.is_idle:  # It has more to look at, in another turn.
                self._engine.settle()
                await trio.lowlevel.checkpoint()
                continue
            self._arrived = trio.Event()
            await self._arrived.wait()

    def _take(self, space: memoryview) -> int:
        """Fill the space with what is there for the client. Returns how much it was."""
        outbox, tick = self.session.outbox, self._engine.tick_number
        taken, most = 0, len(space)
        while taken < most and (piece := outbox.peek(tick)):
            count = min(len(piece), most - taken)
            space[taken : taken + count] = piece[:count]
            outbox.mark_sent(count, tick)
            taken += count
        if taken:
            self._engine.settle()  # What was passed over may have made room.
        return taken

    def end(self) -> None:
        self._end("closed by the client")

    def close(self) -> None:
        self._end("closed by the client")

    def _end(self, reason: str | RemoteProtocolError) -> None:
        if self._is_over:
            return
        self._is_over = True
        if isinstance(reason, RemoteProtocolError) and not self.session.is_closed:
            self._engine.fail(self.session, reason)
        self._engine.closed(self, reason)
        self._arrived.set()
        self._room.set()
