"""The NATS front on a trio clock, beside the engine whose loop, buffer and nursery it shares.

Rule 1: whatever changes the front ends with the engine's `settle`, which asks every door.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.requests import Auth
from simplebus.core.users.users import Users
from simplebus.nats.errors import NatsError, too_many_connections
from simplebus.nats.protocol.handshake import introduction
from simplebus.nats.server.server import Front, adopt
from simplebus.nats.server.session import NatsSession
from simplebus.nats.server.slow_consumer_count import PublisherStall, StallablePublisher
from simplebus.nats.server.users import NatsAuth, certificate_name_index
from simplebus.nats.settings import NatsSettings
from simplebus.server import process
from simplebus.server.connection import Connection
from simplebus.server.listeners import host_of
from simplebus.server.preauth.auth_worker import Gatekeeper
from simplebus.server.preauth.eviction import Strangers
from simplebus.server.preauth.greeting import Heard
from simplebus.server.server import Engine
from simplebus.server.tls.certificates import ReloadableCertificate
from simplebus.server.tls.nats_upgrade import NatsTlsConnection

log = logging.getLogger("simplebus.server")

_BEAT_SECONDS = 0.5
# And so often within the shortest time that is measured by it.
_BEATS_MIN = 4
_SHOWN_NAME_CHARACTERS = 80
# How long a drain reads on from who goes on publishing, and how often it looks.
_FINISH_SECONDS_MAX = 0.5
_FINISH_LOOK_SECONDS = 0.005
# Clients of a lame duck are closed no further apart than this.
_PAUSE_SECONDS_MAX = 1.0


class NatsDoor:
    """Drives one front. Start `run` in a nursery; then `serve` each accepted socket."""

    def __init__(
        self,
        engine: Engine,
        settings: NatsSettings | None = None,
        tls: ReloadableCertificate | None = None,
    ) -> None:
        self._tls = tls
        self.front = Front(
            settings,
            server_id=secrets.token_hex(16).upper(),
            seed=secrets.randbits(64),
            broker=engine.broker,
            secret=secrets.token_bytes(32),
        )
        self._users = _by_spelling(self.front.settings.auth)
        self.engine = engine
        self._own_gatekeeper = Gatekeeper(Users(()))
        """Of this door's own users, where those of all doors have none."""
        self.buffer = engine.buffer
        self.anteroom = engine.anteroom
        self.strangers = Strangers()
        self.farewells = engine.farewells
        self.connections: dict[int, Connection[NatsSession]] = {}
        """By client id."""
        self.accepted = 0
        self._is_tidying = self._is_finishing = False
        self._paused = trio.lowlevel.ParkingLot()
        """Clients that are not read from because they have published too fast."""
        self._freed = False
        """Whether much memory may be free since the last beat."""
        self._hold: Hold | None = None
        """Of a publisher at another door."""
        self._settled = trio.lowlevel.ParkingLot()
        """Whoever waits for a change."""
        engine.doors.append(self.settle_own)
        engine.holders.append(self)
        engine.more_strangers.append(self.strangers)
        engine.guest_finders.append(self._connection_of_guest)

    def adopt(self, settings: NatsSettings) -> None:
        """Behave like this from now on. Clients whose user is not as it was are disconnected."""
        self.front.now = trio.current_time()
        adopt(self.front, settings)
        self._users = _by_spelling(settings.auth)
        self.settle()

    def adopt_rates(self) -> None:
        """From now on clients publish no faster than the engine's users and addresses may."""
        for session in self.front.sessions.values():
            shared = session.user.shared_user if session.user is not None else None
            user = self.engine.user_named(shared.name if shared is not None else "")
            session.adopt(self.engine.broker.rate_limits.token_buckets_for(user, session.address))
        self._paused.unpark_all()

    async def run(self) -> None:
        """Beat until cancelled."""
        limits = self.front.settings.limits
        seconds = min(limits.auth_seconds, limits.ping_seconds, limits.write_seconds)
        while True:
            await trio.sleep(min(_BEAT_SECONDS, seconds / _BEATS_MIN))
            self.front.now = trio.current_time()
            try:
                self.front.tick()
                self.settle()
                if self._freed:
                    self._freed = False
                    process.give_back()
            except Exception:
                log.exception("a beat of the NATS door failed")

    def serve(self, sock: socket.socket, peer: str) -> None:
        """Take over a connected, non-blocking socket, or refuse it."""
        self.accepted += 1
        if not self.engine.lets_in(sock, peer):
            return
        self.front.now = trio.current_time()
        host, port = sock.getsockname()[:2]
        ip = host_of(peer)
        session = self.front.open(peer, ip=ip, host=host, port=port, is_early=self._tls is not None)
        session.hear_again = partial(self._hear_again, ip)
        full = too_many_connections(self.front.settings.limits.connections)
        is_full = len(self.connections) >= self.front.settings.limits.connections
        is_one_too_many = is_full and not self.strangers.make_room(full)
        connection = self._connection(sock, session, is_one_too_many=is_one_too_many)
        self.connections[session.client_id] = connection
        self.start_soon(connection.run)
        if is_one_too_many:
            self.front.cut(session, full)
        elif self.gatekeeper is not None or self._tls is not None:
            connection.makes_room()
        self.settle()

    def _connection(
        self, sock: socket.socket, session: NatsSession, *, is_one_too_many: bool
    ) -> Connection[NatsSession]:
        if self._tls is None:
            return Connection(sock, session, self)
        if is_one_too_many:
            # One too many is told so in clear: it is not worth a handshake.
            if self._tls.options.handshake_first:
                session.discard_output()
            return Connection(sock, session, self)
        return NatsTlsConnection(
            sock,
            session,
            self,
            self.front,
            certificate=self._tls,
            user_by_spelling=self._users,
            handshake_seconds=self.front.settings.limits.tls_seconds,
        )

    def receive(self, session: NatsSession, count: int) -> None:
        """`count` fresh bytes of this session are in the buffer. Raises NatsError."""
        self.front.now = self.engine.read_clock()
        try:
            self.front.receive(session, self.buffer, count)
        finally:
            self.settle_own()  # Messages go first, what else there is to do comes behind them.
            self.settle()

    @property
    def gatekeeper(self) -> Gatekeeper | None:
        """Of those who have to say who they are."""
        if self.engine.gatekeeper is not None:
            return self.engine.gatekeeper
        return self._own_gatekeeper if self.front.settings.auth.required else None

    def knows(self, auth: Auth) -> bool:
        return self.front.settings.auth.knows(auth)

    def _hear_again(self, address: str, words: Auth) -> None:
        if (gatekeeper := self.gatekeeper) is not None:
            gatekeeper.hear_again(words, address, self.knows)

    def introduction(self, heard: Heard) -> tuple[bool, Auth | None]:
        found = introduction(heard.data, heard.searched)
        heard.searched = len(heard.data)
        return found

    async def finish_publishers(self) -> None:
        """Stop reading from clients that have subscribed to nothing, each as soon as what it has
        sent so far is read."""
        self._is_finishing = True
        self._paused.unpark_all()
        self._settled.unpark_all()
        last = trio.current_time() + _FINISH_SECONDS_MAX
        while publishers := [c for c in self.connections.values() if not c.session.subscriptions]:
            late = trio.current_time() > last
            for connection in publishers:
                if late or not connection.has_unread():
                    connection.cut()
            await trio.sleep(_FINISH_LOOK_SECONDS)

    async def flushed(self) -> None:
        """Wait until every client has taken what waits for it."""
        while not all(c.session.outbox.is_idle for c in self.connections.values()):
            await self._settled.park()

    async def be_lame_duck(self) -> None:
        """Ask clients to leave; after a while close those that have not, one after the other."""
        limits = self.front.settings.limits
        self.front.say_lame_duck()
        self.settle()
        with trio.move_on_after(limits.lame_duck_grace_seconds):
            await self._empty()
        left = list(self.connections.values())
        for closed, connection in enumerate(left):
            connection.cut()
            if closed + 1 < len(left):
                await trio.sleep(min(limits.lame_duck_seconds / len(left), _PAUSE_SECONDS_MAX))
        await self._empty()

    async def _empty(self) -> None:
        while self.connections:
            await self._settled.park()

    def settle(self) -> None:
        self.engine.settle()

    def settle_own(self) -> bool:
        """Send what became ready. Returns whether any was a guest's: then the broker has changed,
        perhaps."""
        if self._settled:
            self._settled.unpark_all()
        front, connections = self.front, self.connections
        changed = False
        for session in front.drain_ready():
            if session.client_id in connections:
                connections[session.client_id].flush()
            if session.deliveries is not None:
                changed = True
        for session, error in front.drain_disconnecting():
            if session.client_id in connections:
                connections[session.client_id].cut(error)
            self._freed |= error.reason in (Reason.SLOW_CONSUMER, Reason.PENDING_LIMIT)
        for fault in front.drain_errors():
            log.error("what is stored could not be shown to NATS clients", exc_info=fault)
        if front.routes.has_abandoned and not self._is_tidying:
            self._is_tidying = True
            self.start_soon(self._tidy)
        return changed

    def _connection_of_guest(self, session_id: int) -> Connection[NatsSession] | None:
        """Whose a guest of the broker is."""
        assert self.front.classes is not None
        session = self.front.classes.guests.get(session_id)
        return None if session is None else self.connections.get(session.client_id)

    async def _tidy(self) -> None:
        """Others have their turn between any two parts of it."""
        while self.front.routes.has_abandoned:
            self.front.routes.tidy()
            await trio.lowlevel.checkpoint()
        self._is_tidying = False

    @property
    def tick_number(self) -> int:
        return self.engine.tick_number

    def may_rest(self, session: NatsSession) -> bool:
        return session.hold is not None or self.front.limited.is_paused(session)

    def holds_back(self, session: NatsSession) -> bool:
        self.front.now = trio.current_time()
        return self.front.reads_on(session)

    def fail(self, session: NatsSession, error: RemoteProtocolError) -> None:
        if isinstance(error, NatsError):
            self.front.fail(session, error)

    def closed(
        self, connection: Connection[NatsSession], reason: str | RemoteProtocolError
    ) -> None:
        """A connection has ended."""
        session = connection.session
        name = session.options.name[:_SHOWN_NAME_CHARACTERS]
        peer = f"{session.peer} ({name!r})" if name else session.peer
        self.engine.say_closed(f"client {session.client_id}", peer, reason)
        self.connections.pop(session.client_id, None)
        self.engine.addresses.remove_connection(session.address)
        self.front.close(session)
        self.settle()

    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None:
        self.engine.start_soon(task)

    async def rest(self, session: NatsSession) -> None:
        hold, session.hold = session.hold, None
        if hold is not None:
            await self._wait(hold, session)
        while pause := self.front.limited.pause_seconds(session):
            with trio.move_on_after(pause):
                await self._paused.park()
            self.engine.read_clock()

    def feeds_anybody(self) -> bool:
        return self.front.feeds_anybody()

    def holds(self, *, others: bool) -> bool:
        """Whether a publisher at another door is to wait for clients here that it has just filled:
        then `hold` is awaited. `others` says whether it has sent something to anybody there."""
        pace, self._hold = self.front.pace, None
        if pace.has_new_slow:
            pace.now = trio.current_time()
            self._hold = pace.hold(others=others)
        return self._hold is not None

    async def hold(self, publisher: Publisher) -> None:
        """Wait for them."""
        if self._hold is not None:
            await self._wait(self._hold, publisher)

    async def _wait(self, hold: Hold, publisher: Publisher) -> None:
        """Wait until those whom a publisher has filled have caught up, or long enough."""
        pace = self.front.pace
        if self._is_finishing:
            hold.shorten()
        with trio.move_on_after(hold.seconds):
            while pace.is_worth_it(hold):
                await self._settled.park()
                if self._is_finishing:
                    hold.shorten()
            return
        for session in hold.sessions:
            if connection := self.connections.get(session.client_id):
                connection.push()
        pace.now = trio.current_time()
        pace.waited_in_vain(hold, publisher)


def _by_spelling(auth: NatsAuth) -> dict[str, str]:
    """Whom a certificate may say one is."""
    return certificate_name_index([user.name for user in auth.users if user.name])
