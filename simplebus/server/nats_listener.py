"""The NATS server on trio. It shares the event loop, buffer and nursery of `Server`.

Every change of the NATS server ends with `flush_ready`, which flushes all listeners. The server
flushes NATS clients only after the listener has entered itself in `Server.listeners_to_flush`.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial

import trio

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import CHANGED_SESSIONS_PER_TURN, STOPPED_CONNECTIONS_PER_TURN
from simplebus.core.protocol.opening import Opening
from simplebus.core.protocol.requests import Auth
from simplebus.core.steps import drain_list
from simplebus.core.users.users import Users
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.errors import NatsError, too_many_connections, unknown_operation
from simplebus.nats.limits import WAITING_DELIVERIES_STALL_SECONDS
from simplebus.nats.nats_server import NatsServer, apply_settings_in_parts
from simplebus.nats.protocol.handshake import parse_greeting
from simplebus.nats.server.message_delivery import WaitingDelivery
from simplebus.nats.server.session import NatsSession, PublisherStall
from simplebus.nats.server.slow_consumers import StallablePublisher
from simplebus.nats.settings import NatsSettings
from simplebus.server.connection import Connection
from simplebus.server.listeners import host_from_address
from simplebus.server.preauth.auth_worker import AuthWorker
from simplebus.server.preauth.eviction import EvictableConnections
from simplebus.server.preauth.greeting import Greeting
from simplebus.server.runtime import heap
from simplebus.server.server import PublisherDelay, Server
from simplebus.server.tls.certificates import ReloadableCertificate
from simplebus.server.tls.nats_upgrade import NatsTlsConnection

log = EventLogger("simplebus.server")

_TICK_SECONDS = 0.5
# Minimum number of ticks within the shortest time limit that ticks check.
_TICKS_PER_LIMIT_MIN = 4
_LOGGED_NAME_CHARACTERS = 80
# Time for which a shutdown reads from clients that keep publishing, and its poll interval.
_STOP_PUBLISHERS_MAX_SECONDS = 0.5
_STOP_PUBLISHERS_POLL_SECONDS = 0.005
# Maximum interval between two disconnects in lame duck mode.
_CLOSE_INTERVAL_MAX_SECONDS = 1.0


class NatsListener:
    """Drives one NATS server: connections, ticks and flushes.

    Start `run` in a nursery, then call `serve` with each accepted socket.
    """

    def __init__(
        self,
        server: Server,
        settings: NatsSettings | None = None,
        tls: ReloadableCertificate | None = None,
    ) -> None:
        self._tls = tls
        self.server = server
        self.nats_server = NatsServer(
            settings,
            server_id=secrets.token_hex(16).upper(),
            seed=secrets.randbits(64),
            broker=server.broker,
            secret=secrets.token_bytes(32),
            on_pending=self._request_flush,
        )
        self.nats_server.allow_waiting_deliveries()
        self._nats_auth_worker = AuthWorker(Users(()))
        """Checks the credentials of NATS users if the server has no users of its own."""
        self.buffer = server.buffer
        self.preauth_queue = server.preauth_queue
        self.slow_request_turns = server.slow_request_turns
        self.had_large_read = server.had_large_read
        self.evictable_connections = EvictableConnections()
        self.closing_connections = server.closing_connections
        self.connections: dict[int, Connection[NatsSession]] = {}
        """Connections by client id."""
        self.accepted_count = 0
        self._is_removing_subscriptions = self._is_delivering = self._is_draining = False
        self._is_checking_memory = self._is_freeing_output = False
        self._rate_limited_clients = trio.lowlevel.ParkingLot()
        """Clients that are not read from because they exceeded their rate limit."""
        self._started_deliveries: list[WaitingDelivery] = []
        """Deliveries of the bus that the latest input caused and that had to wait, one per
        class.
        """
        self._state_changed = trio.lowlevel.ParkingLot()
        """Tasks that wait for any change of the NATS server or the broker."""
        server.other_evictable_connections.append(self.evictable_connections)
        server.connection_finders.append(self._connection_of_session)

    def apply_settings_in_parts(self, settings: NatsSettings) -> Iterator[None]:
        """Apply new settings: to new clients at once, and to the others in parts. Disconnect the
        clients of removed or changed users.

        The settings of TLS stay, because the listener's certificate does.
        """
        self.nats_server.now = trio.current_time()
        previous = self.nats_server.settings
        settings = replace(
            settings,
            limits=replace(settings.limits, tls_seconds=previous.limits.tls_seconds),
            tls_required=previous.tls_required,
            tls_available=previous.tls_available,
            tls_verify=previous.tls_verify,
        )
        for _ in apply_settings_in_parts(self.nats_server, settings):
            self.flush_ready()
            yield
        self.flush_ready()

    def apply_rate_limits_in_parts(self) -> Iterator[None]:
        """Apply the publish rate limits of the server's users and addresses to all clients."""
        sessions = drain_list(list(self.nats_server.sessions.values()))
        for number, session in enumerate(sessions, 1):
            if number % CHANGED_SESSIONS_PER_TURN == 0:
                yield
            user = self.server.find_user(session.user.name) if session.user is not None else None
            session.set_token_buckets(
                self.server.broker.rate_limits.token_buckets_for(user, session.address)
            )
        self._rate_limited_clients.unpark_all()

    async def run(self) -> None:
        """Tick until cancelled."""
        limits = self.nats_server.settings.limits
        seconds = min(limits.auth_seconds, limits.ping_seconds, limits.write_seconds)
        while True:
            await trio.sleep(min(_TICK_SECONDS, seconds / _TICKS_PER_LIMIT_MIN))
            self.nats_server.now = trio.current_time()
            try:
                for _ in self.nats_server.tick_in_parts():
                    self.flush_ready()
                    await trio.lowlevel.checkpoint()
                    self.nats_server.now = trio.current_time()
                self.flush_ready()
            except Exception:
                log.exception("nats_tick.failed", "a tick of the NATS server failed")

    def serve(self, sock: socket.socket, peer: str) -> None:
        """Serve a connected, non-blocking socket, or refuse it if a limit is reached."""
        self.accepted_count += 1
        if not self.server.admit_address(sock, peer):
            return
        self.nats_server.now = trio.current_time()
        host, port = sock.getsockname()[:2]
        ip = host_from_address(peer)
        session = self.nats_server.open_session(
            peer, ip=ip, host=host, port=port, is_handshake_pending=self._tls is not None
        )
        session.on_repeated_connect = partial(self._recheck_auth, ip)
        limit_error = too_many_connections(self.nats_server.settings.limits.connections)
        is_full = len(self.connections) >= self.nats_server.settings.limits.connections
        is_over_limit = is_full and not self.evictable_connections.evict_one(limit_error)
        connection = self._create_connection(sock, session, is_over_limit=is_over_limit)
        self.connections[session.client_id] = connection
        self.start_soon(connection.run)
        if is_over_limit:
            self.nats_server.disconnect(session, limit_error)
        elif self.auth_worker is not None or self._tls is not None:
            connection.make_evictable()
        self.flush_ready()

    def _create_connection(
        self, sock: socket.socket, session: NatsSession, *, is_over_limit: bool
    ) -> Connection[NatsSession]:
        if self._tls is None:
            return Connection(sock, session, self)
        if is_over_limit:
            # A refused client gets its error in plain text: a handshake would cost too much.
            if self._tls.options.handshake_first:
                session.discard_output()
            return Connection(sock, session, self)
        return NatsTlsConnection(
            sock,
            session,
            self,
            self.nats_server,
            certificate=self._tls,
            handshake_seconds=self.nats_server.settings.limits.tls_seconds,
        )

    def receive(self, session: NatsSession, count: int) -> None:
        """Process `count` bytes of `session` in the receive buffer. Raises NatsError."""
        self.nats_server.now = self.server.update_clock()
        self._begin_input()
        try:
            self.nats_server.receive(session, self.buffer, count)
        finally:
            self._flush_receivers()

    def continue_request(self, session: NatsSession) -> None:
        """Process the next part of the pending request of a session."""
        self.nats_server.now = self.server.update_clock()
        self._begin_input()
        try:
            self.nats_server.continue_request(session)
        finally:
            self._flush_receivers()

    def _begin_input(self) -> None:
        """Forget the receivers that earlier input has left behind."""
        self.server.throttles.clear()
        self._started_deliveries = []

    def _flush_receivers(self) -> None:
        """Flush all listeners after input of a client: the receivers of its messages first."""
        if self in self.server.listeners_to_flush:
            self.server.send_turns.begin_turn(can_send=not self.nats_server.should_send_later)
            del self.server.listeners_to_flush[self]
            self.flush_clients()
        self.server.flush_ready()

    @property
    def auth_worker(self) -> AuthWorker | None:
        """Checks credentials; None if no client needs any."""
        if self.server.auth_worker is not None:
            return self.server.auth_worker
        return None if self.nats_server.settings.users is None else self._nats_auth_worker

    def is_valid_auth(self, auth: Auth) -> bool:
        users = self.nats_server.settings.users
        return users is not None and users.is_authentic(auth)

    def _recheck_auth(self, address: str, auth: Auth) -> None:
        if (auth_worker := self.auth_worker) is not None:
            auth_worker.recheck(auth, address, self.is_valid_auth)

    def find_wrong_port(self, data: bytes, *, has_tls: bool) -> RemoteProtocolError | None:
        error = self.server.wrong_port_check.find_error(
            data, Opening.NATS_COMMAND, has_tls=has_tls, tls_option="--nats-tls-cert"
        )
        # The client gets the error line of nats-server, the log has the explanation.
        return None if error is None else unknown_operation(error.sentence)

    def parse_greeting(self, greeting: Greeting) -> tuple[bool, Auth | None]:
        result = parse_greeting(greeting.data, greeting.searched_bytes)
        greeting.searched_bytes = len(greeting.data)
        return result

    def begin_draining(self) -> None:
        """Stop delaying publishers, so that everything that they have sent is read."""
        self._is_draining = True
        self._rate_limited_clients.unpark_all()
        self._state_changed.unpark_all()

    async def stop_publishers(self) -> None:
        """Disconnect clients without subscriptions, each when its received bytes are processed."""
        last = trio.current_time() + _STOP_PUBLISHERS_MAX_SECONDS
        has_publishers = True
        while has_publishers:
            has_publishers, is_late = False, trio.current_time() > last
            for number, connection in enumerate(drain_list(list(self.connections.values())), 1):
                if number % STOPPED_CONNECTIONS_PER_TURN == 0:
                    await trio.lowlevel.checkpoint()
                if connection.session.subscriptions or connection.session.is_closed:
                    continue
                has_publishers = True
                if is_late or not connection.has_unread():
                    connection.disconnect_after_input()
            await trio.sleep(_STOP_PUBLISHERS_POLL_SECONDS)

    async def wait_flushed(self) -> None:
        """Wait until all outgoing bytes are sent to the clients."""
        while self.nats_server.has_waiting_deliveries or not all(
            c.session.outbox.is_idle and not c.session.is_request_pending
            for c in self.connections.values()
        ):
            await self._wait_for_change()

    async def send_lame_duck(self) -> None:
        """Announce the shutdown to clients that accept INFO at any time."""
        for _ in self.nats_server.send_lame_duck_in_parts():
            self.flush_ready()
            await trio.lowlevel.checkpoint()

    async def run_lame_duck(self) -> None:
        """Ask clients to leave; after a grace period disconnect the rest one after the other."""
        limits = self.nats_server.settings.limits
        await self.send_lame_duck()
        with trio.move_on_after(limits.lame_duck_grace_seconds):
            await self._wait_all_closed()
        remaining = list(self.connections.values())
        for on_closed, connection in enumerate(remaining):
            connection.disconnect()
            if on_closed + 1 < len(remaining):
                await trio.sleep(
                    min(limits.lame_duck_seconds / len(remaining), _CLOSE_INTERVAL_MAX_SECONDS)
                )
        await self._wait_all_closed()

    async def _wait_all_closed(self) -> None:
        while self.connections:
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait until a listener was flushed."""
        self._request_flush()
        await self._state_changed.park()

    def _request_flush(self) -> None:
        """Let the next `Server.flush_ready` flush the NATS clients."""
        self.server.listeners_to_flush[self] = None

    def flush_ready(self) -> None:
        self._request_flush()
        self.server.flush_ready()

    def flush_clients(self) -> None:
        """Send the messages that are ready."""
        if self._state_changed:
            self._state_changed.unpark_all()
        nats_server, connections = self.nats_server, self.connections
        started = nats_server.delivery.pop_started()
        if started or nats_server.slow_consumer_monitor.new_slow_sessions:
            if self not in self.server.throttles:
                self._started_deliveries = []  # Other input has caused them.
            waiting = (each for each in self._started_deliveries if not each.has_ended)
            self._started_deliveries = [*waiting, *started]
            self.server.throttles[self] = None
        for session in nats_server.drain_ready():
            if session.client_id in connections:
                self.server.send_turns.flush(connections[session.client_id])
        for session, error in nats_server.drain_disconnecting():
            if session.client_id in connections:
                connections[session.client_id].disconnect(error)
        for fault in nats_server.drain_errors():
            log.error(
                "nats_delivery.failed",
                "delivering stored messages to NATS clients failed",
                exc_info=fault,
            )
        nats_server.begin_turn()
        if nats_server.has_removals and not self._is_removing_subscriptions:
            self._is_removing_subscriptions = True
            self.start_soon(self._remove_subscriptions)
        if nats_server.has_discarded_output and not self._is_freeing_output:
            self._is_freeing_output = True
            self.start_soon(self._free_discarded_output)
        if nats_server.slow_consumer_monitor.is_memory_check_due and not self._is_checking_memory:
            self._is_checking_memory = True
            self.start_soon(self._check_memory)
        if nats_server.has_waiting_deliveries and not self._is_delivering:
            self._is_delivering = True
            self.start_soon(self._deliver_waiting)

    def _connection_of_session(self, session_id: int) -> Connection[NatsSession] | None:
        """Return the connection of the NATS client that owns this broker session, or None."""
        assert self.nats_server.bus_adapter is not None
        session = self.nats_server.bus_adapter.nats_sessions.get(session_id)
        return None if session is None else self.connections.get(session.client_id)

    async def _remove_subscriptions(self) -> None:
        """Remove subscriptions in small steps, so that other tasks can run between them."""
        try:
            while self.nats_server.has_removals:
                self.nats_server.now = self.server.update_clock()
                self.nats_server.remove_some()
                self.server.flush_ready()
                await self.slow_request_turns.wait_turn()
        finally:
            self._is_removing_subscriptions = False

    async def _free_discarded_output(self) -> None:
        """Return the memory of slow clients to the system in small parts.

        Free memory between memory in use would otherwise stay resident: 1.8 GB after some clients
        with 1 GiB of pending output had been disconnected.
        """
        try:
            while self.nats_server.has_discarded_output:
                await self.slow_request_turns.wait_turn()
                self.nats_server.free_discarded_output()
                if not self.nats_server.has_discarded_output:
                    await heap.return_free_memory(self.slow_request_turns)
        finally:
            self._is_freeing_output = False

    async def _check_memory(self) -> None:
        """Disconnect the largest clients if all clients together exceed their limit."""
        try:
            while self.nats_server.slow_consumer_monitor.is_memory_check_due:
                for _ in self.nats_server.check_memory_in_parts():
                    self.flush_ready()
                    await trio.lowlevel.checkpoint()  # Other clients are served between two parts.
        finally:
            self._is_checking_memory = False

    async def _deliver_waiting(self) -> None:
        """Deliver messages of the bus that have many receivers, some in each turn."""
        try:
            while self.nats_server.has_waiting_deliveries:
                await trio.lowlevel.checkpoint()  # Other clients are served between two turns.
                self.nats_server.now = self.server.update_clock()
                self.nats_server.deliver_waiting()
                self._request_flush()
                self._flush_receivers()
        finally:
            self._is_delivering = False

    @property
    def tick_number(self) -> int:
        return self.server.broker.clock.tick

    def should_delay_read(self, session: NatsSession) -> bool:
        return (
            session.stall is not None
            or bool(self._started_deliveries)
            or (bool(session.token_buckets) and self.nats_server.rate_limits.is_paused(session))
        )

    def is_blocking_publishers(self, session: NatsSession) -> bool:
        self.nats_server.now = trio.current_time()
        return self.nats_server.can_read_while_blocked(session)

    def send_fatal_error(self, session: NatsSession, error: RemoteProtocolError) -> None:
        if isinstance(error, NatsError):
            self.nats_server.send_error(session, error)

    def end_some_subscriptions(self, session: NatsSession) -> bool:
        """End some acked subscriptions of a disconnected client. Returns True if there are more.

        `on_closed` removes subscriptions to subjects.
        """
        has_more = self.nats_server.end_some_acked_subscriptions(session)
        self.flush_ready()
        return has_more

    def on_closed(
        self, connection: Connection[NatsSession], reason: str | RemoteProtocolError
    ) -> None:
        """Remove a connection that has ended."""
        session = connection.session
        name = session.options.name[:_LOGGED_NAME_CHARACTERS]
        peer = f"{session.peer} ({name!r})" if name else session.peer
        self.server.log_closed(f"client {session.client_id}", peer, reason)
        self.connections.pop(session.client_id, None)
        self.server.address_limits.remove_connection(session.address)
        self.nats_server.close_session(session)
        self.flush_ready()

    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None:
        self.server.start_soon(task)

    async def delay_read(self, session: NatsSession) -> None:
        stall, session.stall = session.stall, None
        # The client did not publish these messages: it acked others, which made space for them.
        await self._wait_for_space(self._started_deliveries, session)
        if stall is not None:
            await self._wait_for_slow(stall, session)
        while pause_seconds := self.nats_server.rate_limits.pause_seconds(session):
            with trio.move_on_after(pause_seconds):
                await self._rate_limited_clients.park()
            self.server.update_clock()

    def has_keeping_up_consumers(self) -> bool:
        """Return True if the latest messages also went to a client that is not behind."""
        return self.nats_server.has_ready_fast_session()

    def create_delay(self, *, has_other_consumers: bool) -> PublisherDelay | None:
        """Return the delay of a publisher of another listener for the deliveries and the clients
        that are behind because of its latest input; None if there are none.

        `has_other_consumers` is True if that publisher also feeds consumers elsewhere.
        """
        monitor, stall = self.nats_server.slow_consumer_monitor, None
        if monitor.new_slow_sessions:
            monitor.now = trio.current_time()
            stall = monitor.create_stall(has_fast_receivers=has_other_consumers)
        waiting = [delivery for delivery in self._started_deliveries if not delivery.has_ended]
        self._started_deliveries = []
        if stall is None and not waiting:
            return None
        return partial(self._wait_for_receivers, waiting, stall)

    async def _wait_for_receivers(
        self,
        deliveries: list[WaitingDelivery],
        stall: PublisherStall | None,
        publisher: StallablePublisher,
    ) -> None:
        """Wait for deliveries and slow clients, for a limited time if the queues are not full."""
        with trio.move_on_after(WAITING_DELIVERIES_STALL_SECONDS):
            while not self._is_draining and not all(each.has_ended for each in deliveries):
                await self._wait_for_change()
        await self._wait_for_space(deliveries, publisher)
        if stall is not None:
            await self._wait_for_slow(stall, publisher)

    async def _wait_for_space(
        self, deliveries: list[WaitingDelivery], publisher: StallablePublisher
    ) -> None:
        """Wait while the queues of these deliveries are full."""
        is_full = self.nats_server.delivery.is_queue_full
        while any(map(is_full, deliveries)) and not (self._is_draining or publisher.is_closed):
            publisher.excuse_silence()
            await self._wait_for_change()
            # Publishers are read one after the other, so that they do not all fill a queue again.
            if not any(map(is_full, deliveries)):
                await self.slow_request_turns.wait_turn()

    async def _wait_for_slow(self, delay: PublisherStall, publisher: StallablePublisher) -> None:
        """Wait until the clients that `publisher` filled have caught up, for a limited time."""
        pace = self.nats_server.slow_consumer_monitor
        if self._is_draining:
            delay.shorten()
        with trio.move_on_after(delay.max_seconds):
            while pace.is_stall_needed(delay):
                await self._wait_for_change()
                if self._is_draining:
                    delay.shorten()
            return
        for session in delay.sessions:
            while (connection := self.connections.get(session.client_id)) is not None:
                can_send_more = connection.retry_send()
                await trio.lowlevel.checkpoint()  # Sending may take long.
                if not can_send_more:
                    break
        pace.now = trio.current_time()
        pace.stall_timed_out(delay, publisher)
