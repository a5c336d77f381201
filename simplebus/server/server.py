"""The trio server of one broker and its binary connections.

Every change of the broker ends with `flush_ready`, which sends the bytes that are ready and resumes
publishers. All connections share one receive buffer; its content is valid until the next await.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy.ma  # noqa: F401 - `np.unique` imports it at its first call, for 15 ms.
import trio

from simplebus.core.broker.broker import NO_ACTIONS, Broker, Settings
from simplebus.core.broker.wait_reasons import format_count, format_message_count
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import DEAD_LETTER_REASONS, Reason, RemoteProtocolError
from simplebus.core.limits import (
    ACK_READ_DELAY_SECONDS,
    CHANGED_SESSIONS_PER_TURN,
    POSITIONS_PER_TURN,
    PROGRESS_SECONDS,
    TICKED_CLASSES_PER_TURN,
)
from simplebus.core.protocol.opening import Opening, WrongProtocolError
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.protocol.requests import Auth
from simplebus.core.session.session import Session
from simplebus.core.steps import drain_list
from simplebus.core.users.rate_limit import RateLimit
from simplebus.core.users.users import User, Users
from simplebus.jetstream.backend import JetStreamBackend
from simplebus.logs.event_logger import EventLogger
from simplebus.server import process
from simplebus.server.connection import Connection
from simplebus.server.journal.pump import JournalPump
from simplebus.server.listeners import host_from_address
from simplebus.server.observability.latency import LatencyRecorder
from simplebus.server.preauth.address_limits import AddressLimits
from simplebus.server.preauth.auth_worker import AuthWorker
from simplebus.server.preauth.closing import ClosingConnections
from simplebus.server.preauth.eviction import EvictableConnections
from simplebus.server.preauth.greeting import Greeting, parse_greeting
from simplebus.server.preauth.queue import PreAuthQueue
from simplebus.server.tls.certificates import ReloadableCertificate
from simplebus.server.tls.handshake import TlsConnection
from simplebus.server.turns import SendTurns, SlowRequestTurns
from simplebus.server.wrong_port import WrongPortCheck

log = EventLogger("simplebus.server")

# A host that does not acknowledge TCP data for this long is unreachable.
_UNACKED_SECONDS_MAX = 30.0
_UNACKED_CHECK_TICKS = 5
_UNACKED_CHECKS_PER_TURN = 128
_LOGGED_CLASSES_MAX = 20
"""New classes that are logged one by one in a tick."""
_BULK_BYTES = 64 * 1024
# A wakeup is postponed only when it is this close: moving a timer takes time.
_WAKEUP_MARGIN_SECONDS = 0.0025


PublisherDelay = Callable[[Session], Awaitable[None]]
"""Waits for consumers that are behind before the publisher is read again."""


class PublisherThrottle(Protocol):
    """A source of back-pressure: can delay publishers because its own consumers are behind."""

    def create_delay(self, *, has_other_consumers: bool) -> PublisherDelay | None:
        """Return the delay for the consumers that the latest input left behind; None if there are
        none.

        `has_other_consumers` is True if the same publisher also feeds consumers elsewhere.
        """


class ClientListener(Protocol):
    """A listener of another protocol that delivers messages of the broker to its clients."""

    def flush_clients(self) -> None:
        """Send the messages that are ready for the listener's clients."""

    def has_keeping_up_consumers(self) -> bool:
        """Return True if the latest messages also went to a consumer that is not behind."""


class SessionOwner(Protocol):
    """Interface of the object that moves the bytes of a broker session."""

    @property
    def session(self) -> Session: ...
    def flush(self) -> object:
        """Send the session's new outgoing bytes."""

    def resume_reading(self) -> None:
        """Read again: the session's queued messages are stored."""

    def disconnect(self, error: RemoteProtocolError | None = None) -> None:
        """Close the connection, with `error` as the reason."""


class LocalSessionOwner(SessionOwner, Protocol):
    """Owner of a session inside the server process."""

    def close(self) -> None:
        """Close the connection at once."""


class LifecycleCommands(NamedTuple):
    """Commands of operators that arrive by signal or by HTTP."""

    start_reload: Callable[[], bool]
    """Reads the configuration again. Returns False if the server has no configuration file."""
    start_drain: Callable[[], None]
    """Starts the shutdown."""


COUNTED_SESSIONS_PER_STEP = 512


class Traffic(NamedTuple):
    """Totals of several sessions."""

    messages: int = 0
    """Published messages."""
    received_bytes: int = 0
    sent_bytes: int = 0

    def with_sessions(self, sessions: Collection[Session]) -> Traffic:
        """Return these totals plus those of `sessions`."""
        return Traffic(
            self.messages + sum(session.handled_count for session in sessions),
            self.received_bytes + sum(session.receiver.received_bytes for session in sessions),
            self.sent_bytes + sum(session.outbox.sent_bytes for session in sessions),
        )


def new_bus_id() -> str:
    """Return a random id for a bus without a data directory."""
    return secrets.token_hex(8)


class Server:
    """Drives one broker: connections, ticks and flushes.

    Start `run` in a nursery, then call `serve` with each accepted socket.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        bus_id: str = "",
        commit_log: CommitLog | None = None,
    ) -> None:
        """`bus_id` identifies stored data; a server that stores nothing gets a random one."""
        run = new_bus_id()
        self.broker = Broker(settings, identity=bus_id or run, run_id=run, commit_log=commit_log)
        self.broker.store.limit_turns(POSITIONS_PER_TURN)
        self._is_progress_scheduled = False
        """True if `_write_progress` runs."""
        self.journal_pump: JournalPump | None = None
        """Writes the commit log to the journal; None without a data directory."""
        self.jetstream: JetStreamBackend | None = None
        """Stores all classes in a JetStream cluster; None if this process stores them."""
        self.certificate: ReloadableCertificate | None = None
        """If set, binary clients must use TLS."""
        self.auth_worker: AuthWorker | None = None
        self.preauth_queue = PreAuthQueue()
        self.slow_request_turns = SlowRequestTurns()
        self.had_large_read = trio.Event()
        """Set after a large read from any client."""
        self.send_turns = SendTurns(self.start_soon, self.flush_ready)
        self.evictable_connections = EvictableConnections()
        self.other_evictable_connections: list[EvictableConnections] = []
        """Unauthenticated connections of the other listeners."""
        self.closing_connections = ClosingConnections()
        self.address_limits = AddressLimits()
        self.wrong_port_check = WrongPortCheck()
        self.buffer = ReceiveBuffer()
        self.connections: dict[int, Connection[Session]] = {}
        """Binary connections by session id."""
        self.local_clients: dict[int, LocalSessionOwner] = {}
        """Clients inside the server process by session id."""
        self.disconnect_counts: Counter[Reason] = Counter()
        """Connections that the server closed, by reason."""
        self.accepted_count = 0
        self._closed_traffic = Traffic()
        self.listeners_to_flush: dict[ClientListener, None] = {}
        """Other listeners with messages for their clients since their last flush. A listener adds
        itself, so an idle listener costs nothing.
        """
        self.connection_finders: list[Callable[[int], Connection[Any] | None]] = []
        """Functions that return another listener's connection for a session id, or None."""
        self.throttles: dict[PublisherThrottle, None] = {}
        """Other listeners whose consumers fell behind because of the latest input."""
        self.latency: LatencyRecorder | None = None
        """Latency measurement; None if monitoring is off."""
        self.local_throttles: list[PublisherThrottle] = []
        """Throttles of the clients inside the server process."""
        self._is_bulk_read = False
        """True if the latest read returned many bytes."""
        self._read_delay: PublisherDelay | None = None
        """Delay of the publisher that was read last, besides that for acks."""
        self._has_other_consumers = False
        """True if the latest messages also went to consumers that are not behind."""
        self._nursery: trio.Nursery | None = None
        self.has_ended = False
        self.lifecycle: LifecycleCommands | None = None
        """Commands of operators; None before the ready line and during the shutdown."""
        self._is_updating_patterns = False
        self._is_running_deferred_work = False
        """True if `_run_deferred_work` runs."""
        self._drain_check: trio.Event | None = None
        """Set after each change of the broker while `wait_drained` waits."""
        self._logged_class_count = 0
        """Number of classes created by clients that are logged."""
        self._logged_counts: Counter[tuple[str, Reason]] = Counter()
        self._delayed_reads = trio.lowlevel.ParkingLot()
        self._clock_offset = 0.0
        """Offset from the event loop's clock to Unix time, in seconds."""
        self._wakeup_scope = trio.CancelScope()
        self._scheduled_wakeup = math.inf
        """Time for which `_run_wakeups` is scheduled, by the broker's clock."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Each connection runs as a task of this nursery."""
        self._clock_offset = time.time() - trio.current_time()
        self.update_clock()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._run_wakeups)
            nursery.start_soon(self.preauth_queue.run)
            task_status.started()
            try:
                await self._run_ticks()
            finally:
                self.has_ended = True
                for local_client in list(self.local_clients.values()):
                    local_client.close()

    def update_clock(self) -> float:
        """Set the broker's clock and return the event loop's time.

        Every listener calls this before it passes input to the broker.
        """
        now = trio.current_time()
        self.broker.clock.now = now + self._clock_offset
        return now

    async def _run_wakeups(self) -> None:
        """Send delayed messages when they are due."""
        while True:
            with trio.CancelScope() as self._wakeup_scope:
                self._update_wakeup_deadline()
                await trio.sleep_forever()
            self.update_clock()
            try:
                self.broker.run_due_wakeups()
                self.flush_ready()
            except Exception:
                log.exception("delayed_delivery.failed", "sending delayed messages failed")

    def _update_wakeup_deadline(self) -> None:
        """Wake `_run_wakeups` when the broker's next delayed message is due."""
        due = self._scheduled_wakeup = self.broker.next_wakeup
        at = due - self._clock_offset if due < math.inf else math.inf
        if at != self._wakeup_scope.deadline:
            self._wakeup_scope.deadline = at

    async def _run_ticks(self) -> None:
        """Tick periodically. Ticks missed during a stall are skipped: no client could ack
        meanwhile.
        """
        tick_seconds = self.broker.settings.tick_seconds
        due = trio.current_time() + tick_seconds
        while True:
            await trio.sleep_until(due)
            due = max(due + tick_seconds, trio.current_time() + tick_seconds / 2)
            try:
                for _ in self.tick_in_parts():
                    await trio.lowlevel.checkpoint()
                    self.update_clock()
            except Exception:
                log.exception("ack_timer.failed", "a tick of the ack timer failed")

    def tick(self) -> None:
        """Run one step of the ack timer and the checks that go with it."""
        for _ in self.tick_in_parts():
            pass

    def tick_in_parts(self) -> Iterator[None]:
        """Run one step of the ack timer and the checks that go with it.

        Other work is allowed at each yield, so that many sessions do not delay it.
        """
        self.update_clock()
        yield from self._log_losses()
        self._log_new_classes()
        if self.journal_pump is not None:
            self.journal_pump.tick()
        yield
        for overdue in self.broker.tick_in_parts():
            for session, error in overdue:
                self._disconnect(session, error)
            self.flush_ready()
            yield
        if not self._is_updating_patterns and self.broker.store.update_some_patterns():
            self._is_updating_patterns = True
            self.start_soon(self._update_patterns)
        if self.broker.tick_number % _UNACKED_CHECK_TICKS == 0:
            for number, connection in enumerate(drain_list(list(self.connections.values())), 1):
                if number % _UNACKED_CHECKS_PER_TURN == 0:
                    yield
                if connection.unacked_seconds() > _UNACKED_SECONDS_MAX:
                    self._disconnect(
                        connection.session,
                        RemoteProtocolError(
                            Reason.STALLED,
                            f"the peer's host has not acknowledged data for "
                            f"{_UNACKED_SECONDS_MAX:g} s",
                        ),
                    )
        self.flush_ready()

    async def _update_patterns(self) -> None:
        """Index patterns of new subscriptions, and remove those of ended ones, in small steps."""
        try:
            while self.broker.store.update_some_patterns():
                await self.slow_request_turns.wait_turn()
        finally:
            self._is_updating_patterns = False

    async def _run_deferred_work(self) -> None:
        """Continue work for classes with very many subscriptions, some in each turn."""
        try:
            while self.broker.store.has_deferred_work:
                await trio.lowlevel.checkpoint()  # Other clients are served between two turns.
                self.broker.store.continue_deferred_work()
                self.flush_ready()
        finally:
            self._is_running_deferred_work = False

    def _log_losses(self) -> Iterator[None]:
        """Log one line per reason for frames and messages dropped since the previous tick."""
        counts: Counter[tuple[str, Reason]] = Counter()
        for reason, count in self.broker.refusal_counts.items():
            counts["", reason] = count
        for number, cls in enumerate(list(self.broker.classes.values()), 1):
            if number % TICKED_CLASSES_PER_TURN == 0:
                yield
            undelivered_counts = yield from cls.count_undelivered_in_steps()
            for reason, count in undelivered_counts.items():
                counts[cls.label, reason] = count
        for (class_name, reason), count in (counts - self._logged_counts).items():
            _log_loss(class_name, reason, count)
        self._logged_counts = counts

    def _log_new_classes(self) -> None:
        """Log the classes that clients have created, or that were removed, since the previous
        tick.
        """
        for label in self.broker.idle_classes.pop_removed():
            log.info(
                "class.removed",
                "class {class_name} was removed, because it was unused for --idle-class-timeout",
                class_name=label,
            )
        registry = self.broker.store.class_registry
        new_count = registry.created_count - self._logged_class_count
        self._logged_class_count = registry.created_count
        if not new_count:
            return
        newest = islice(reversed(registry.classes.values()), new_count)
        created = [cls for cls in newest if cls.created_by][::-1]
        for cls in created[:_LOGGED_CLASSES_MAX]:
            log.info(
                "class.created",
                "class {class_name} was created by {creator}",
                class_name=cls.name or str(cls.class_id),
                creator=cls.created_by,
                user=cls.creator,
            )
        if more := created[_LOGGED_CLASSES_MAX:]:
            log.info(
                "classes.created",
                "clients created {classes}",
                classes=format_count(len(more), "further class"),
                count=len(more),
            )

    @property
    def is_drained(self) -> bool:
        """True if no connected subscriber would lose a stored message when the server stops, and
        none waits for its turn of sending.
        """
        if self.broker.store.has_deferred_work or self.send_turns.has_waiting:
            return False
        if self.journal_pump is not None:
            return True
        return not any(cls.has_lagging_consumer for cls in self.broker.classes.values())

    async def wait_drained(self) -> None:
        """Wait until stored messages are acknowledged; if a journal keeps them, only until every
        subscriber has had its turn of sending.
        """
        while not self.is_drained:
            self._drain_check = trio.Event()
            await self._drain_check.wait()

    def count_unwritten(self) -> int:
        """Return the number of accepted messages that the journal does not contain yet."""
        commit_log, classes = self.broker.commit_log, self.broker.classes
        if commit_log is None or self.journal_pump is None:
            return 0
        heads = [
            (unwritten_class_id, classes[unwritten_class_id].ring.head)
            for unwritten_class_id in commit_log.unwritten_class_ids
        ]
        return sum(head - commit_log.written_head(class_id, head) for class_id, head in heads)

    @property
    def journal_error(self) -> str:
        """Reason for which the journal cannot be written now; empty if it can."""
        commit_log = self.broker.commit_log
        if self.journal_pump is None or commit_log is None or commit_log.write_error is None:
            return ""
        return commit_log.write_error[1]

    async def delay_read(self, session: Session) -> None:
        """Wait for consumers that are behind, or until the shared end of a short read delay.

        The read delay lets acks accumulate, see ACK_READ_DELAY_SECONDS.
        """
        if self._read_delay is not None:
            await self._read_delay(session)
            return
        if not self._delayed_reads:
            self.start_soon(self._end_read_delay)
        await self._delayed_reads.park()

    async def _write_progress(self) -> None:
        """Record the latest acks soon, also if nothing else happens."""
        await trio.sleep(PROGRESS_SECONDS)
        self._is_progress_scheduled = False
        self.update_clock()
        self.flush_ready()

    async def _end_read_delay(self) -> None:
        await trio.sleep(ACK_READ_DELAY_SECONDS)
        self._delayed_reads.unpark_all()

    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None:
        """Start a task. An internal error in the task is logged and ends nothing else."""
        assert self._nursery is not None, "the server is not running"
        self._nursery.start_soon(process.run_logged, task, name=task)

    def serve(self, sock: socket.socket, peer: str) -> None:
        """Serve a connected, non-blocking socket, or close it if a limit is reached."""
        self.accepted_count += 1
        connections_max = self.broker.settings.limits.connections
        full = RemoteProtocolError(
            Reason.TOO_MANY_CONNECTIONS, f"{connections_max} connections are open"
        )
        if not self.admit_address(sock, peer):
            return
        is_full = len(self.connections) >= connections_max
        if is_full and not self.evictable_connections.evict_one(full):
            self._log_disconnect(full.reason, peer, full.sentence)
            self.address_limits.remove_connection(host_from_address(peer))
            sock.close()
            return
        session = self.broker.open_session(peer, address=host_from_address(peer))
        connection: Connection[Session] = (
            Connection(sock, session, self)
            if self.certificate is None
            else TlsConnection(sock, session, self, self.certificate)
        )
        self.connections[session.session_id] = connection
        if self.auth_worker is not None or self.certificate is not None:
            connection.make_evictable()
        self.start_soon(connection.run)

    def free_descriptor(self, peer: str) -> bool:
        """Close one connection because file descriptors run out.

        Prefers connections that are closing already, then an unauthenticated connection of the
        listener that has most of them. Returns False if no connection can be closed.
        """
        if self.closing_connections.close_oldest():
            return True
        full = RemoteProtocolError(Reason.TOO_MANY_CONNECTIONS, "too many files are open")
        return max(
            (self.evictable_connections, *self.other_evictable_connections), key=len
        ).evict_one(full)

    def admit_address(self, sock: socket.socket, peer: str) -> bool:
        """Return True if the peer's address may open a connection; otherwise close the socket."""
        refused = self.address_limits.register_connection(
            host_from_address(peer), trio.current_time()
        )
        if refused is not None:
            self._log_disconnect(refused[0], peer, refused[1])
            sock.close()
        return refused is None

    def replace_users(self, users: Users | None) -> None:
        """Apply a new user table, and disconnect the sessions of removed or changed users."""
        for _ in self.replace_users_in_parts(users):
            pass

    def replace_users_in_parts(self, users: Users | None) -> Iterator[None]:
        """Like `replace_users`, in parts: the table is replaced in the first one."""
        before = self.broker.users
        self.broker.user_directory.replace_users(users)
        if users is not None:
            users.resolve_class_name = self.broker.store.class_registry.find_dead_letter_sources
        if users is not None and self.auth_worker is not None:
            self.auth_worker.replace_users(users)
        else:
            self.auth_worker = AuthWorker(users) if users is not None else None
        self.broker.rate_limits.apply_users(users)
        if before == users:
            return
        users_before = {user.name: user for user in before.users} if before is not None else {}
        # Sessions that authenticate from now on do so with the new table.
        sessions = drain_list(
            [
                session
                for session in self.broker.sessions.values()
                if session.is_authenticated and not session.is_local and not session.is_internal
            ]
        )
        for number, session in enumerate(sessions, 1):
            if number % CHANGED_SESSIONS_PER_TURN == 0:
                yield
            was = users_before.get(session.user)
            is_same = users is not None and was is not None and users.has_unchanged(was)
            if users is not None and not is_same:
                error = RemoteProtocolError(
                    Reason.UNAUTHORIZED, f"user {session.user!r} was removed or changed"
                )
                self._disconnect(session, error)

    def apply_rate_limits(self, address_rate: RateLimit) -> None:
        """Apply the publish rate limits of users, and `address_rate` to each address."""
        for _ in self.apply_rate_limits_in_parts(address_rate):
            pass

    def apply_rate_limits_in_parts(self, address_rate: RateLimit) -> Iterator[None]:
        """Like `apply_rate_limits`, in parts: for new sessions in the first one."""
        broker = self.broker
        broker.rate_limits.set_address_rate(address_rate)
        sessions = drain_list(list(broker.sessions.values()))
        for number, session in enumerate(sessions, 1):
            if number % CHANGED_SESSIONS_PER_TURN == 0:
                yield
            if not (session.is_local or session.is_closed):
                token_buckets = broker.rate_limits.token_buckets_for(
                    self.find_user(session.user), session.address
                )
                broker.store.publish_queue.set_token_buckets(session, token_buckets)

    def remove_rate_limits(self) -> None:
        """Lift all publish rate limits and resume the publishers that wait for them."""
        self.broker.rate_limits.remove_limits()
        self.update_clock()
        self.broker.store.publish_queue.handle_wakeup()
        self.flush_ready()

    def find_user(self, name: str) -> User | None:
        """Return the user with this name, or None."""
        return self.broker.user_directory.find_by_name(name)

    def find_wrong_port(self, data: bytes, *, has_tls: bool) -> WrongProtocolError | None:
        return self.wrong_port_check.find_error(data, Opening.BUS_CONNECT, has_tls=has_tls)

    def parse_greeting(self, greeting: Greeting) -> tuple[bool, Auth | None]:
        return parse_greeting(greeting)

    def is_valid_auth(self, auth: Auth) -> bool:
        users = self.broker.users
        return users is None or users.is_authentic(auth)

    def receive(self, session: Session, count: int) -> None:
        """Process `count` bytes of `session` in the receive buffer. Raises RemoteProtocolError."""
        now, latency = self.update_clock(), self.latency
        self._is_bulk_read = count >= _BULK_BYTES
        self.throttles.clear()
        try:
            self.broker.receive(session, self.buffer, count)
        finally:
            if latency is not None:
                latency.record_applied(now)
            if self.listeners_to_flush or self.throttles:
                self._has_other_consumers = self.broker.has_other_ready_sessions(
                    session.session_id
                ) or any(
                    listener.has_keeping_up_consumers() for listener in self.listeners_to_flush
                )
            self.flush_ready()
            if latency is not None:
                latency.record_sent(now, session)

    @property
    def tick_number(self) -> int:
        return self.broker.clock.tick

    def should_delay_read(self, session: Session) -> bool:
        rests = self.broker.can_delay_read(session)
        self._read_delay = self.create_delay()
        if self._read_delay is None and self._is_bulk_read and not rests:
            self._read_delay = _first_delay(self.local_throttles, has_other_consumers=False)
        return rests or self._read_delay is not None

    def create_delay(self) -> PublisherDelay | None:
        """Return the delay for the consumers of other listeners that the latest input left behind;
        None if there are none.
        """
        throttles = list(self.throttles)
        self.throttles.clear()
        return _first_delay(throttles, has_other_consumers=self._has_other_consumers)

    def is_blocking_publishers(self, session: Session) -> bool:
        return self.broker.is_blocking_publishers(session)

    def send_fatal_error(self, session: Session, error: RemoteProtocolError) -> None:
        self.broker.send_fatal_error(session, error)

    def flush_ready(self) -> None:
        """Send the bytes that are ready on every listener, and resume publishers after their
        messages are stored.
        """
        if self._drain_check is not None:
            self._drain_check.set()
        broker = self.broker
        self.send_turns.begin_turn()
        if self.latency is not None and self.latency.pending_batches:
            self.latency.record_durable()
        while (actions := broker.end_turn()) is not NO_ACTIONS or self.listeners_to_flush:
            for session_id in actions.flush:
                owner = self.connections.get(session_id) or self._find_session_owner(session_id)
                if owner is not None:
                    self.send_turns.flush(owner)
            for session, error in actions.close:
                self._disconnect(session, error)
            for session in actions.resume:
                if connection := self._find_session_owner(session.session_id):
                    connection.resume_reading()
            if not actions.flush and self.listeners_to_flush:  # This may change the broker.
                listener, _ = self.listeners_to_flush.popitem()
                listener.flush_clients()
        if broker.store.has_deferred_work and not self._is_running_deferred_work:
            self._is_running_deferred_work = True
            self.start_soon(self._run_deferred_work)
        if (due := broker.next_wakeup) != self._scheduled_wakeup and (
            due < self._scheduled_wakeup
            or self._scheduled_wakeup < broker.clock.now + _WAKEUP_MARGIN_SECONDS
        ):
            self._update_wakeup_deadline()
        if self.journal_pump is not None:
            self.journal_pump.submit_pending()
            if not self._is_progress_scheduled and self.journal_pump.has_deferred_progress:
                self._is_progress_scheduled = True
                self.start_soon(self._write_progress)
        if self.jetstream is not None and self.jetstream.end_turn():
            self.flush_ready()

    def continue_request(self, session: Session) -> None:
        """Process the next part of the pending request of a session. Raises RemoteProtocolError."""
        self.update_clock()
        self.throttles.clear()
        self.broker.continue_request(session)
        self.flush_ready()

    def _find_session_owner(self, session_id: int) -> Connection[Any] | SessionOwner | None:
        """Return the owner of a broker session on any listener, or None."""
        found: Connection[Any] | SessionOwner | None = self.connections.get(session_id)
        if found is None:
            found = self.local_clients.get(session_id)
        if found is None:
            found_owners = (find(session_id) for find in self.connection_finders)
            found = next((owner for owner in found_owners if owner is not None), None)
        return found

    def end_some_subscriptions(self, session: Session) -> bool:
        """End some subscriptions of a disconnected client. Returns True if there are more."""
        has_more = self.broker.end_some_subscriptions(session)
        self.flush_ready()
        return has_more

    def on_closed(self, connection: SessionOwner, reason: str | RemoteProtocolError) -> None:
        """Remove a connection that has ended."""
        session = connection.session
        self.log_closed(f"session {session.session_id}", session.peer, reason)
        self._closed_traffic = self._closed_traffic.with_sessions([session])
        if self.local_clients.pop(session.session_id, None) is None:
            self.connections.pop(session.session_id, None)
            self.address_limits.remove_connection(session.address)
        self.broker.close_session(session)
        self.flush_ready()

    def total_traffic(self) -> Generator[None, None, Traffic]:
        """Return the totals of all connections since the start, in steps.

        Traffic of a client that leaves between the steps is counted once.
        """
        owners = drain_list([*self.connections.values(), *self.local_clients.values()])
        total = self._closed_traffic
        while part := list(islice(owners, COUNTED_SESSIONS_PER_STEP)):
            total = total.with_sessions([owner.session for owner in part])
            yield
        return total

    def log_closed(
        self, connection_kind: str, peer: str, reason: str | RemoteProtocolError
    ) -> None:
        """Log the end of a connection of any listener, and count it if the server closed it."""
        if isinstance(reason, RemoteProtocolError):
            self._log_disconnect(reason.reason, peer, reason.sentence)
        else:
            log.debug(
                "connection.closed",
                "{connection} from {peer}: {reason}",
                connection=connection_kind,
                peer=peer,
                reason=reason,
            )

    def disconnect_session(self, session_id: int) -> bool:
        """Close the connection of a session, for an operator. Returns False without one."""
        owner = self._find_session_owner(session_id)
        if owner is not None:
            owner.disconnect()
        return owner is not None

    def _disconnect(self, session: Session, error: RemoteProtocolError) -> None:
        if connection := self._find_session_owner(session.session_id):
            connection.disconnect(error)

    def _log_disconnect(self, reason: Reason, peer: str, sentence: str) -> None:
        self.disconnect_counts[reason] += 1
        log.warning(
            "connection.dropped",
            "{peer}: disconnected ({reason}): {sentence}",
            peer=peer,
            reason=reason,
            sentence=sentence,
        )


def _first_delay(
    throttles: Iterable[PublisherThrottle], *, has_other_consumers: bool
) -> PublisherDelay | None:
    """Return the first delay that a throttle creates, or None."""
    delays = (each.create_delay(has_other_consumers=has_other_consumers) for each in throttles)
    return next((delay for delay in delays if delay is not None), None)


def _log_loss(class_name: str, reason: Reason, count: int) -> None:
    """Log frames and messages that were lost since the previous tick for one reason."""
    if not class_name and reason.startswith("ack_"):
        log.warning(
            "acks.ignored",
            "ignored {acks} ({reason})",
            acks=format_count(count, "ack"),
            reason=reason,
            count=count,
        )
    elif not class_name:
        log.warning(
            "frames.refused",
            "refused {frames} ({reason})",
            frames=format_count(count, "frame"),
            reason=reason,
            count=count,
        )
    elif reason in DEAD_LETTER_REASONS:
        log.warning(
            "messages.dead_lettered",
            "moved {messages} of class {class_name} to dead letters ({reason})",
            messages=format_message_count(count),
            class_name=class_name,
            reason=reason,
            count=count,
        )
    else:
        log.warning(
            "messages.dropped",
            "dropped {messages} of class {class_name} ({reason})",
            messages=format_message_count(count),
            class_name=class_name,
            reason=reason,
            count=count,
        )
