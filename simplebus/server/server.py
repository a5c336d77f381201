"""The broker on a trio clock: connections bring bytes, a timer brings beats.

Rule 1: whatever changes the broker ends with `settle`: what became ready is sent, who has room
reads on. Between two awaits the broker belongs to one task.
Rule 2: one receive buffer serves all connections; nothing in it survives an await.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import trio

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import ACK_REST_SECONDS
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.protocol.requests import Auth
from simplebus.core.session.session import Session
from simplebus.core.users.rate_limit import Rate
from simplebus.core.users.users import User, Users
from simplebus.jetstream.backend import Cluster
from simplebus.server.connection import Connection
from simplebus.server.journal.pump import Keeping
from simplebus.server.latency import Timing
from simplebus.server.listeners import host_of
from simplebus.server.preauth.address_limits import AddressLimits
from simplebus.server.preauth.auth_worker import Gatekeeper
from simplebus.server.preauth.closing import ClosingConnections
from simplebus.server.preauth.eviction import Strangers
from simplebus.server.preauth.greeting import Heard, introduction
from simplebus.server.preauth.queue import Anteroom
from simplebus.server.tls.certificates import ReloadableCertificate
from simplebus.server.tls.handshake import TlsConnection

log = logging.getLogger("simplebus.server")

# A host that leaves bytes unacknowledged this long is gone.
_UNANSWERED_SECONDS_MAX = 30.0
_UNANSWERED_CHECK_TICKS = 5
_BULK_BYTES = 64 * 1024

_WORDS = ("frames were refused", "acks were ignored")
"""What became of frames that counted under a reason: others, and acknowledgements."""


class Holder(Protocol):
    """A door whose clients may fall behind what is published at another."""

    def feeds_anybody(self) -> bool:
        """Whether what came last is for somebody there who is not behind."""

    def holds(self, *, others: bool) -> bool:
        """Whether somebody is behind whom to wait for; `others` are fed by the same publisher."""

    async def hold(self, publisher: Session) -> None:
        """Wait a little for who is behind."""


class Guest(Protocol):
    """What a door needs to know of whoever has a session."""

    @property
    def session(self) -> Session: ...
    def flush(self) -> object:
        """There is something to be sent."""

    def room(self) -> None:
        """What waited for room is stored."""

    def cut(self, error: RemoteProtocolError | None = None) -> None:
        """Stop serving it, for this reason."""


class Part(Guest, Protocol):
    """A client that is a part of the server."""

    def close(self) -> None:
        """End it, now."""


class Traffic(NamedTuple):
    """Of some connections."""

    messages: int = 0
    """Published by them."""
    received_bytes: int = 0
    sent_bytes: int = 0

    def with_(self, session: Session) -> Traffic:
        """And of one more."""
        return Traffic(
            self.messages + session.handled_count,
            self.received_bytes + session.receiver.received_bytes,
            self.sent_bytes + session.outbox.sent_bytes,
        )


def new_identity() -> str:
    """Of a bus that knows nothing yet."""
    return secrets.token_hex(8)


class Engine:
    """Drives one broker. Enter `run` in a nursery; then `serve` each accepted socket."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        identity: str = "",
        ledger: CommitLog | None = None,
    ) -> None:
        """See `Broker`; a bus that keeps nothing has an identity of its own."""
        run = new_identity()
        self.broker = Broker(settings, identity=identity or run, run_id=run, commit_log=ledger)
        self.keeping: Keeping | None = None
        """What the broker's ledger is handed to."""
        self.cluster: Cluster | None = None
        """Or, of a door before a cluster, this."""
        self.certificates: ReloadableCertificate | None = None
        """With it, clients of the binary door must use TLS."""
        self.gatekeeper: Gatekeeper | None = None
        self.anteroom = Anteroom()
        self.strangers = Strangers()
        self.more_strangers: list[Strangers] = []
        """Those at other doors."""
        self.farewells = ClosingConnections()
        self.addresses = AddressLimits()
        self.buffer = ReceiveBuffer()
        self.connections: dict[int, Connection[Session]] = {}
        """By session id."""
        self.own: dict[int, Part] = {}
        """Clients that are parts of this server, likewise."""
        self.cut_off: Counter[Reason] = Counter()
        """Connections closed by us, by reason."""
        self.accepted = 0
        self._gone = Traffic()
        self.doors: list[Callable[[], bool]] = []
        """Called when something has changed: each sends what became ready at another door, and
        says whether that may have changed the broker."""
        self.guest_finders: list[Callable[[int], Connection[Any] | None]] = []
        """Called with the id of a session that has no connection here: each says which one at
        another door has it."""
        self.holders: list[Holder] = []
        """Other doors, whose clients may be filled by what comes through this one."""
        self.timing: Timing | None = None
        """Where it is measured how long things take; None where nobody wants to know."""
        self.parts: list[Holder] = []
        """Where clients that are parts of this server come in."""
        self._is_bulk = False
        """Whether much came last."""
        self._held_by: Holder | None = None
        self._feeds_others = False
        """Whether what came last was for others than those who are behind at another door."""
        self._nursery: trio.Nursery | None = None
        self.has_ended = False
        self._settled = trio.Event()
        self._said: Counter[str] = Counter()
        self._resting = trio.lowlevel.ParkingLot()
        self._epoch = 0.0
        """What is added to the loop's clock to have seconds since 1970."""
        self._due_scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Every connection is a task in here."""
        self._epoch = time.time() - trio.current_time()
        self.read_clock()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._wake_due)
            nursery.start_soon(self.anteroom.run)
            task_status.started()
            try:
                await self._beat()
            finally:
                self.has_ended = True
                for part in list(self.own.values()):
                    part.close()

    def read_clock(self) -> float:
        """Tell the broker what time it is. Every door does, before it brings anything. Returns the
        loop's time."""
        now = trio.current_time()
        self.broker.clock.now = now + self._epoch
        return now

    async def _wake_due(self) -> None:
        """Send what was put off, when its time comes."""
        while True:
            with trio.CancelScope() as self._due_scope:
                self._set_alarm()
                await trio.sleep_forever()
            self.read_clock()
            try:
                self.broker.run_due_wakeups()
                self.settle()
            except Exception:
                log.exception("sending what was put off failed")

    def _set_alarm(self) -> None:
        """Have `_wake_due` go on when the next message that was put off is due."""
        due = self.broker.next_wakeup
        at = due - self._epoch if due < math.inf else math.inf
        if at != self._due_scope.deadline:
            self._due_scope.deadline = at

    async def _beat(self) -> None:
        """The ack timer. Beats missed in a stall are left out: nobody could have acked in it."""
        tick_seconds = self.broker.settings.tick_seconds
        due = trio.current_time() + tick_seconds
        while True:
            await trio.sleep_until(due)
            due = max(due + tick_seconds, trio.current_time() + tick_seconds / 2)
            try:
                self.tick()
            except Exception:
                log.exception("a beat of the ack timer failed")

    def tick(self) -> None:
        self.read_clock()
        self._say_what_was_lost()
        if self.keeping is not None:
            self.keeping.tick()
        for session, error in self.broker.tick():
            self._cut(session, error)
        if self.broker.tick_number % _UNANSWERED_CHECK_TICKS == 0:
            for connection in list(self.connections.values()):
                if connection.unanswered_seconds() > _UNANSWERED_SECONDS_MAX:
                    self._cut(
                        connection.session,
                        RemoteProtocolError(
                            Reason.STALLED,
                            f"the peer's host has not answered for {_UNANSWERED_SECONDS_MAX:g} s",
                        ),
                    )
        self.settle()

    def _say_what_was_lost(self) -> None:
        """One line for each reason that counted something since the last beat."""
        counts = Counter(
            {
                _WORDS[r.startswith("ack_")] + f" ({r})": n
                for r, n in self.broker.refusal_counts.items()
            }
        )
        for cls in self.broker.classes.values():
            for reason, count in cls.count_undelivered().items():
                counts[f"messages of class {cls.class_id} were dropped ({reason})"] = count
        for what, count in (counts - self._said).items():
            log.warning("%d %s", count, what)
        self._said = counts

    @property
    def is_drained(self) -> bool:
        """Whether nothing that is stored would be lost to a subscriber who is connected."""
        if self.keeping is not None:
            return True
        return not any(cls.has_lagging_consumer for cls in self.broker.classes.values())

    async def drained(self) -> None:
        """Wait until all that is stored for subscribers is acknowledged, unless it is kept past the
        process."""
        while not self.is_drained:
            self._settled = trio.Event()
            await self._settled.wait()

    async def rest(self, session: Session) -> None:
        """Wait for the clients of another door that this one has filled, or for the common end of
        a short rest: see ACK_REST_SECONDS."""
        if self._held_by is not None:
            await self._held_by.hold(session)
            return
        if not self._resting:
            self.start_soon(self._end_rest)
        await self._resting.park()

    async def _end_rest(self) -> None:
        await trio.sleep(ACK_REST_SECONDS)
        self._resting.unpark_all()

    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None:
        assert self._nursery is not None, "the engine is not running"
        self._nursery.start_soon(task)

    def serve(self, sock: socket.socket, peer: str) -> None:
        """Take over a connected, non-blocking socket, or refuse it."""
        self.accepted += 1
        most = self.broker.settings.limits.connections
        full = RemoteProtocolError(Reason.TOO_MANY_CONNECTIONS, f"{most} connections are open")
        if not self.lets_in(sock, peer):
            return
        if len(self.connections) >= most and not self.strangers.make_room(full):
            self._count(full.reason, peer, full.sentence)
            self.addresses.remove_connection(host_of(peer))
            sock.close()
            return
        session = self.broker.open_session(peer, address=host_of(peer))
        connection: Connection[Session] = (
            Connection(sock, session, self)
            if self.certificates is None
            else TlsConnection(sock, session, self, self.certificates)
        )
        self.connections[session.session_id] = connection
        if self.gatekeeper is not None or self.certificates is not None:
            connection.makes_room()
        self.start_soon(connection.run)

    def make_room(self, peer: str) -> bool:
        """Where descriptors run out: close one that was told to go anyway; else have a stranger
        leave for this peer, of the door that has most of them. Returns whether there was any."""
        if self.farewells.close_oldest():
            return True
        full = RemoteProtocolError(Reason.TOO_MANY_CONNECTIONS, "too many files are open")
        return max((self.strangers, *self.more_strangers), key=len).make_room(full)

    def lets_in(self, sock: socket.socket, peer: str) -> bool:
        """Whether a peer's address may have one more connection; else the socket is closed."""
        refused = self.addresses.register_connection(host_of(peer), trio.current_time())
        if refused is not None:
            self._count(refused[0], peer, refused[1])
            sock.close()
        return refused is None

    def adopt_users(self, users: Users | None) -> None:
        """From now on whoever comes has to be one of these. Whoever is inside, and is none of them,
        or may do something else now, is disconnected."""
        before, self.broker.users = self.broker.users, users
        if users is not None:
            users.called = self.broker.store.class_registry.find_dead_letter_sources
        if users is not None and self.gatekeeper is not None:
            self.gatekeeper.adopt(users)
        else:
            self.gatekeeper = Gatekeeper(users) if users is not None else None
        self.broker.rate_limits.apply_users(users)
        if before == users:
            return
        known = {user.name: user for user in before.users} if before is not None else {}
        for session in list(self.broker.sessions.values()):
            was = known.get(session.user)
            is_same = users is not None and was is not None and users.still_has(was)
            is_asked = (
                session.is_authenticated and not session.is_local and not session.is_internal
            )
            if users is not None and is_asked and not is_same:
                error = RemoteProtocolError(Reason.UNAUTHORIZED, "its user is not as it was")
                self._cut(session, error)

    def adopt_rates(self, of_each_address: Rate) -> None:
        """From now on connections publish no faster than their users may, nor all of one address
        together than this."""
        broker = self.broker
        broker.rate_limits.set_address_rate(of_each_address)
        for session in broker.sessions.values():
            if not session.is_local:
                meters = broker.rate_limits.token_buckets_for(
                    self.user_named(session.user), session.address
                )
                broker.store.publish_queue.rate_queue.set_token_buckets(session, meters)

    def end_rates(self) -> None:
        """Nobody who has published too fast waits any more."""
        self.broker.rate_limits.remove_limits()
        self.read_clock()
        self.broker.store.publish_queue.rate_queue.handle_wakeup()
        self.settle()

    def user_named(self, name: str) -> User | None:
        """Who that is now; None for nobody."""
        return self.broker.users.named(name) if self.broker.users is not None else None

    def introduction(self, heard: Heard) -> tuple[bool, Auth | None]:
        return introduction(heard)

    def knows(self, auth: Auth) -> bool:
        users = self.broker.users
        return users is None or users.knows(auth)

    def receive(self, session: Session, count: int) -> None:
        """`count` fresh bytes of this session are in the buffer. Raises RemoteProtocolError."""
        now, timing = self.read_clock(), self.timing
        self._is_bulk = count >= _BULK_BYTES
        try:
            self.broker.receive(session, self.buffer, count)
        finally:
            if timing is not None:
                timing.noted(now)
            self._feeds_others = bool(self.holders) and (
                self.broker.has_other_ready_sessions(session.session_id)
                or any(holder.feeds_anybody() for holder in self.holders)
            )
            self.settle()
            if timing is not None:
                timing.sent(now, session)

    @property
    def tick_number(self) -> int:
        return self.broker.tick_number

    def may_rest(self, session: Session) -> bool:
        rests = self.broker.can_delay_read(session)
        self._held_by = None if rests or not self._is_bulk else self._reading_parts()
        for holder in self.holders:
            if holder.holds(others=self._feeds_others):
                self._held_by = holder
        return rests or self._held_by is not None

    def _reading_parts(self) -> Holder | None:
        """Whoever of this server's own reads what is published: a publisher that is faster than
        they are leaves them their turns."""
        return next((part for part in self.parts if part.holds(others=False)), None)

    def holds_back(self, session: Session) -> bool:
        return self.broker.is_blocking_publishers(session)

    def fail(self, session: Session, error: RemoteProtocolError) -> None:
        self.broker.send_fatal_error(session, error)

    def settle(self) -> None:
        """Send what became ready, and let those read on whose messages found room."""
        self._settled.set()
        broker = self.broker
        if self.timing is not None and self.timing.asked:
            self.timing.reached()
        busy = True
        while busy:
            while ready := broker.drain_writable():
                for session_id in ready:
                    if connection := self._connection(session_id):
                        connection.flush()
            busy = False
            for settle in self.doors:
                if settle():
                    busy = True
        for session, error in broker.drain_closing():
            self._cut(session, error)
        self._set_alarm()
        for session in broker.drain_resumed():
            if connection := self._connection(session.session_id):
                connection.room()
        if self.keeping is not None:
            self.keeping.hand_over()
        if self.cluster is not None and self.cluster.hand_over():
            self.settle()

    def _connection(self, session_id: int) -> Connection[Any] | Guest | None:
        """Whose a session of the broker is, at whichever door it came in."""
        found: Connection[Any] | Guest | None = self.connections.get(session_id)
        found = found or self.own.get(session_id)
        if found is None:
            others = (find(session_id) for find in self.guest_finders)
            found = next((other for other in others if other is not None), None)
        return found

    def closed(self, connection: Guest, reason: str | RemoteProtocolError) -> None:
        """A connection has ended."""
        session = connection.session
        self.say_closed(f"session {session.session_id}", session.peer, reason)
        self._gone = self._gone.with_(session)
        if self.own.pop(session.session_id, None) is None:
            self.connections.pop(session.session_id, None)
            self.addresses.remove_connection(session.address)
        self.broker.close_session(session)
        self.settle()

    def traffic(self) -> Traffic:
        """What was read from all connections there ever were, and sent."""
        total = self._gone
        for connection in (*self.connections.values(), *self.own.values()):
            total = total.with_(connection.session)
        return total

    def say_closed(self, what: str, peer: str, reason: str | RemoteProtocolError) -> None:
        """Count or log the end of a connection, at whichever door."""
        if isinstance(reason, RemoteProtocolError):
            self._count(reason.reason, peer, reason.sentence)
        else:
            log.debug("%s from %s: %s", what, peer, reason)

    def _cut(self, session: Session, error: RemoteProtocolError) -> None:
        if connection := self._connection(session.session_id):
            connection.cut(error)

    def _count(self, reason: Reason, peer: str, sentence: str) -> None:
        self.cut_off[reason] += 1
        log.warning("%s: disconnected (%s): %s", peer, reason, sentence)
