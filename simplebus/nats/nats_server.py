"""NATS server: publishing, subscribing and delivery for all NATS clients.

All state changes happen in `receive`, `close_session`, `tick` and when an outbox is read. There is
no socket, clock or thread: a driver passes bytes and times, and sends the bytes of the outboxes.

    bytes ─► NatsParser ─► events ─► NatsServer ─► SubjectRoutes ─► sinks ─► NatsOutbox ─► bytes
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

import numpy as np

from simplebus.core.broker.broker import Broker
from simplebus.core.channel.matches import pages_of
from simplebus.core.errors import Reason
from simplebus.core.limits import HEADROOM_BYTES, Limits
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.steps import drain_list, run_to_end
from simplebus.core.users.users import User, Users
from simplebus.nats import subjects
from simplebus.nats.bus.acked import AckedSubscription
from simplebus.nats.bus.bus_adapter import BusAdapter
from simplebus.nats.errors import NatsError, error_line, stale_connection
from simplebus.nats.limits import (
    BLOCKED_READ_INTERVAL_SECONDS,
    CHECKED_CLIENTS_PER_TURN,
    CONNECT_COST_BYTES,
    COPIED_IN_TURN_BYTES_MAX,
    DEAD_LETTERS_COST_BYTES,
    DISCONNECT_COST_CHECKS,
    EVENT_COST_BYTES,
    FIRST_PING_SECONDS,
    FOUND_SINK_COST_BYTES,
    FREED_BYTES_PER_TURN,
    FREED_PIECES_PER_TURN,
    IMMEDIATE_REMOVALS_MAX,
    KEPT_INPUT_BYTES_MIN,
    NO_RESPONDERS_COST_BYTES,
    PING_COST_BYTES,
    SEARCHED_SINKS_PER_TURN_MAX,
    SEARCHED_SUBJECT_COST_BYTES,
    SEARCHED_SUBJECTS_PER_TURN_MAX,
    SENT_AFTER_LONG_TURN_MAX,
    SINGLE_DELIVERY_COST_BYTES,
    SUBSCRIBE_COST_BYTES,
    UNSUBSCRIBE_COST_BYTES,
)
from simplebus.nats.protocol import encode, handshake
from simplebus.nats.protocol.events import (
    ClientEvent,
    Connect,
    LazyMessages,
    MixedBatch,
    Ping,
    Pong,
    Pub,
    Sub,
    UniformBatch,
    Unsub,
    iter_messages,
)
from simplebus.nats.protocol.parser import NatsParser
from simplebus.nats.server.authenticate import (
    Authenticator,
    authorization_violation,
    check_user_connections,
    count_user_connections,
    is_same_user,
)
from simplebus.nats.server.class_permissions import SubjectClasses
from simplebus.nats.server.message_delivery import (
    MessageDelivery,
    share_body,
)
from simplebus.nats.server.permissions import OpenReplies
from simplebus.nats.server.routes import SinkRows, SubjectRoutes, SubjectSinks
from simplebus.nats.server.session import NatsSession, NatsSubscription, PendingRequest
from simplebus.nats.server.slow_consumers import (
    NatsRateLimits,
    SlowConsumer,
    SlowConsumerMonitor,
)
from simplebus.nats.server.subscription_memory import memory_limit
from simplebus.nats.settings import NatsSettings
from simplebus.nats.statistics import NatsServerStatistics

_OK = b"+OK\r\n"
_PING = b"PING\r\n"
_TOO_MANY_SUBSCRIPTIONS = error_line("maximum subscriptions exceeded")

_SESSIONS_PER_STEP = 250
"""Sessions that one step of the statistics counts."""


class NatsServer:
    """Protocol state of all NATS clients of one listener."""

    def __init__(
        self,
        settings: NatsSettings | None = None,
        *,
        server_id: str = "",
        seed: int = 0,
        secret: bytes = b"",
        broker: Broker | None = None,
        on_pending: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a server without sessions.

        Args:
            settings: Limits, users and permissions.
            server_id: Identifier sent in INFO.
            seed: Seed of the random choice of queue group members.
            secret: Secret key of the nonces that clients sign with their nkeys.
            broker: Broker whose classes subjects are bound to; None for a server without classes.
            on_pending: Called when `drain_ready`, `drain_disconnecting` or `drain_errors` may have
                something to return. Without this call, they return nothing.
        """
        self.settings = settings or NatsSettings()
        self.server_id = server_id
        self.now = 0.0
        """Current time in seconds; the driver sets it before each call."""
        self.sessions: dict[int, NatsSession] = {}
        """Open sessions by client id."""
        bus_limits = broker.settings.limits if broker else Limits()
        self.routes = SubjectRoutes(np.random.default_rng(seed), bus_limits)
        subject_classes = SubjectClasses()
        self.delivery = MessageDelivery(self.routes, subject_classes)
        self.authenticator = Authenticator(
            self.settings.users,
            self.routes.table,
            secret,
            subject_classes,
            self.delivery.add_cost,
        )
        self.denied_count = 0
        """Operations that permissions did not allow."""
        self.slow_consumer_count = 0
        """Clients disconnected as slow consumers."""
        self.closed_in_messages = self.closed_in_bytes = 0
        self.closed_out_messages = self.closed_out_bytes = 0
        """Traffic of closed sessions."""
        self.slow_consumer_monitor = SlowConsumerMonitor(
            self.settings.limits, total_pending_bytes=bus_limits.total_pending_bytes
        )
        self.next_client_id = 1
        self._ready_sessions: dict[NatsSession, None] = {}
        self._disconnecting: list[tuple[NatsSession, NatsError]] = []
        self._finished: deque[AckedSubscription] = deque()
        """Subscriptions that end when the dead letters of their positions are appended."""
        self._discarded_output: deque[memoryview] = deque()
        self._errors: list[Exception] = []
        self._on_pending = on_pending
        self.bus_adapter: BusAdapter | None = None
        self.rate_limits = NatsRateLimits(broker)
        if broker is not None:
            self.bus_adapter = BusAdapter(
                broker, self.routes, clients=self, subject_classes=subject_classes
            )
            broker.connection_limits.external_counters.append(
                partial(count_user_connections, self.sessions)
            )
        self._liveness_checks: list[tuple[float, int]] = []
        """Heap of (time, client id): when to check each client next. Each client has one entry."""

    # Sessions ------------------------------------------------------------------------------------

    def open_session(
        self,
        peer: str,
        *,
        ip: str = "",
        host: str = "",
        port: int = 0,
        is_handshake_pending: bool = False,
    ) -> NatsSession:
        """Create the session of a new connection and queue its INFO.

        Args:
            peer: Name of the client in logs.
            ip: Address of the client.
            host: Local address that the client connected to.
            port: Local port that the client connected to.
            is_handshake_pending: True if TLS comes first; `start_idle_timer` is called after it.
        """
        settings, authenticator, client_id = self.settings, self.authenticator, self.next_client_id
        self.next_client_id += 1
        info = handshake.make_info(
            settings,
            server_id=self.server_id,
            host=host,
            port=port,
            client_id=client_id,
            client_ip=ip,
            auth_required=authenticator.requires_connect,
            nonce=authenticator.make_nonce(client_id),
        )
        session = NatsSession(
            info,
            NatsParser(settings.limits, self.routes.table),
            peer=peer,
            slow_pending_bytes=self.slow_consumer_monitor.slow_pending_bytes,
            owner=self,
        )
        session.is_identified = authenticator.users is None
        self.rate_limits.start_session(session)
        self.sessions[client_id] = session
        session.send(info.line())
        if not is_handshake_pending:
            self.start_idle_timer(session)
        return session

    def start_idle_timer(self, session: NatsSession) -> None:
        """Start measuring how long the client is silent."""
        session.last_received_at = self.now
        limits = self.settings.limits
        seconds = min(FIRST_PING_SECONDS, limits.ping_seconds)
        if self.authenticator.requires_connect:
            seconds = limits.auth_seconds
        heapq.heappush(self._liveness_checks, (self.now + seconds, session.client_id))

    def receive(self, session: NatsSession, buffer: ReceiveBuffer, count: int) -> None:
        """Handle `count` new bytes of a session in the buffer.

        Raises:
            NatsError: The client violated the protocol. All commands before the violation were
                applied; the caller calls `send_error` and closes the session.
        """
        assert not session.is_closed
        assert not session.is_request_pending
        self.delivery.begin_turn()
        session.last_received_at = self.slow_consumer_monitor.now = self.now
        if not session.is_identified:
            self._identify_without_connect(session, buffer.raw[HEADROOM_BYTES])
        events = 0
        for event in session.parser.receive(buffer, count):
            events += 1
            if type(event) is Pub:
                self._publish(session, event)
            else:
                self._handle_event(session, event)
            if session.is_disconnecting:
                break
            if (
                session.pending_request is not None
                or session.parser.has_unread_messages
                or (self.delivery.is_turn_over and session.can_split_reads)
            ):
                session.unprocessed.put_back([session.parser.unread(buffer, count)])
                break
        if (request := session.pending_request) is not None:
            request.read_bytes, request.event_count = count, events
            self._end_turn(session, request)
        else:
            session.adapt_read_size(
                count,
                output_bytes=self.delivery.cost_bytes,
                fan_out_bytes=self.delivery.fan_out_bytes,
                event_count=events,
            )
            self._end_read(session)
        if (kept_bytes := session.kept_input_bytes) > KEPT_INPUT_BYTES_MIN:
            self.slow_consumer_monitor.add_kept_input(session, min(count, kept_bytes))
            if self.slow_consumer_monitor.is_memory_check_due:
                self._on_pending()

    def continue_request(self, session: NatsSession) -> None:
        """Process the next part of the pending request of a session."""
        request = session.pending_request
        assert request is not None
        self.delivery.begin_turn()
        self.slow_consumer_monitor.now = self.now
        self._process_in_turn(session, request)
        self._end_turn(session, request)
        if session.is_request_pending:
            return
        session.adapt_read_size(
            request.read_bytes,
            output_bytes=request.cost_bytes,
            fan_out_bytes=request.fan_out_bytes,
            event_count=request.event_count,
        )
        self.slow_consumer_monitor.new_slow_sessions.update(request.slow_sessions)
        self._end_read(session)

    def _end_turn(self, session: NatsSession, request: PendingRequest) -> None:
        """Add the cost and the slow receivers of a turn to those of the request."""
        request.cost_bytes += self.delivery.cost_bytes
        request.fan_out_bytes += self.delivery.fan_out_bytes
        request.slow_sessions.update(
            self.slow_consumer_monitor.collect_slow_sessions(session, self._ready_sessions)
        )

    def _end_read(self, session: NatsSession) -> None:
        """Choose the time of the next read of a session."""
        if session.token_buckets:
            self.rate_limits.charge(session)
        if self.slow_consumer_monitor.new_slow_sessions or session.has_stalled:
            local_session = session.local_session
            local_session_id = -1 if local_session is None else local_session.session_id
            has_other_receivers = (
                self.bus_adapter is not None
                and self.bus_adapter.broker.has_other_ready_sessions(local_session_id)
            )
            session.stall = self.slow_consumer_monitor.create_session_stall(
                session, self._ready_sessions, has_other_receivers=has_other_receivers
            )

    @property
    def should_send_later(self) -> bool:
        """True if the input processed last took long and has many receivers."""
        return self.delivery.is_turn_long and len(self._ready_sessions) > SENT_AFTER_LONG_TURN_MAX

    def has_ready_fast_session(self) -> bool:
        """Return True if a session that is not slow has new output."""
        return not all(
            self.slow_consumer_monitor.is_slow(session) for session in self._ready_sessions
        )

    def _identify_without_connect(self, session: NatsSession, first_byte: int) -> None:
        """Identify a client by its certificate, its address or as the anonymous user, unless the
        first byte begins CONNECT.
        """
        if first_byte in b"cC" or session.parser.tail_bytes:
            return
        user = self.authenticator.find_user_by(
            None, certificate_names=session.certificate_names, address=session.address
        )
        if user is None:
            raise authorization_violation("received a command before CONNECT, which is required")
        self._set_user(session, user)

    def send_error(self, session: NatsSession, error: NatsError) -> None:
        """Queue the error line of `error`, if it has one. The caller then closes the session."""
        if not session.is_closed and error.line:
            session.outbox.append(error.line)

    def close_session(self, session: NatsSession) -> None:
        """Remove a session and its subscriptions. Unacked messages of classes are redelivered."""
        if session.is_closed:
            return
        while session.is_request_pending:
            with suppress(NatsError):  # No client can receive the error.
                self.continue_request(session)
        session.is_closed = session.is_disconnecting = True
        del self.sessions[session.client_id]
        self.closed_in_messages += session.in_messages
        self.closed_in_bytes += session.in_bytes
        self.closed_out_messages += session.out_messages
        self.closed_out_bytes += session.outbox.sent_bytes
        while self.end_some_acked_subscriptions(session):
            pass
        if self.bus_adapter is not None:
            self.bus_adapter.close_local_session(session)
        self._end_all_subscriptions(session)
        self._ready_sessions.pop(session, None)

    def drain_ready(self) -> list[NatsSession]:
        """Return the sessions that have new output since the last call."""
        ready = list(self._ready_sessions)
        self.slow_consumer_monitor.track(self._ready_sessions)
        self._ready_sessions.clear()
        return ready

    def drain_disconnecting(self) -> list[tuple[NatsSession, NatsError]]:
        """Return the sessions to disconnect, with the reasons."""
        disconnecting, self._disconnecting = self._disconnecting, []
        return disconnecting

    def statistics(self) -> NatsServerStatistics:
        """Return the current counters."""
        return run_to_end(self.statistics_in_steps())

    def statistics_in_steps(self) -> Generator[None, None, NatsServerStatistics]:
        """Return the same in steps, because there may be many clients.

        Traffic of a client that leaves between the steps is counted once.
        """
        in_messages, in_bytes = self.closed_in_messages, self.closed_in_bytes
        out_messages, out_bytes = self.closed_out_messages, self.closed_out_bytes
        subscriptions = pending_bytes = 0
        for number, session in enumerate(drain_list(list(self.sessions.values())), 1):
            if number % _SESSIONS_PER_STEP == 0:
                yield
            subscriptions += len(session.subscriptions)
            in_messages += session.in_messages
            in_bytes += session.in_bytes
            out_messages += session.out_messages
            out_bytes += session.outbox.sent_bytes
            pending_bytes += session.outbox.pending_bytes
        return NatsServerStatistics(
            clients=len(self.sessions),
            accepted=self.next_client_id - 1,
            subscriptions=subscriptions,
            in_messages=in_messages,
            in_bytes=in_bytes,
            out_messages=out_messages,
            out_bytes=out_bytes,
            pending_bytes=pending_bytes,
            denied=self.denied_count,
            slow_consumers=self.slow_consumer_count,
        )

    def drain_errors(self) -> list[Exception]:
        """Return internal errors for the log."""
        errors, self._errors = self._errors, []
        return errors + self.delivery.drain_errors()

    def report_error(self, error: Exception) -> None:
        """Note an internal error in a batch. The rest of the batch is not delivered."""
        self._errors.append(error)
        self._on_pending()
        self.delivery.discard_gathered()

    def tick(self) -> None:
        """Disconnect slow and silent clients and remove abandoned subscriptions. Called every
        second.
        """
        for _ in self.tick_in_parts():
            pass

    def tick_in_parts(self) -> Iterator[None]:
        """Do the work of `tick` in parts, each for a limited number of clients.

        Other calls are allowed between the parts.
        """
        self.remove_some()
        self.free_discarded_output()
        self.slow_consumer_monitor.now = self.now
        yield from self._disconnect_in_parts(self.slow_consumer_monitor.find_slow_consumers())
        checks, now, count = self._liveness_checks, self.now, 0
        while checks and checks[0][0] <= now:
            _, client_id = heapq.heappop(checks)
            session = self.sessions.get(client_id)
            count += 1
            if session is not None and not session.is_disconnecting:
                cost = _disconnect_cost(session)
                heapq.heappush(checks, (self._check_liveness(session), client_id))
                count += cost * session.is_disconnecting
            if count >= CHECKED_CLIENTS_PER_TURN:
                count = 0
                yield

    def check_memory_in_parts(self) -> Iterator[None]:
        """Disconnect the largest clients if all clients together exceed their limit, in parts.

        Other calls are allowed between the parts. The driver calls it when
        `slow_consumer_monitor.is_memory_check_due`, because much input may arrive within one tick.
        """
        yield from self._disconnect_in_parts(self.slow_consumer_monitor.find_over_memory())

    def _disconnect_in_parts(self, parts: Iterator[list[SlowConsumer]]) -> Iterator[None]:
        count = 0
        for slow in parts:
            for session, error in slow:
                if session.is_disconnecting:
                    continue
                count += _disconnect_cost(session)
                self._disconnect_slow_consumer(session, error)
                if count >= CHECKED_CLIENTS_PER_TURN:
                    count = 0
                    yield
            yield

    def _check_liveness(self, session: NatsSession) -> float:
        """Send a PING or disconnect a silent client. Returns the time of the next check."""
        limits, now = self.settings.limits, self.now
        if session.is_authenticating:
            return now + limits.auth_seconds
        if not session.is_identified and self.authenticator.requires_connect:
            self.disconnect(
                session,
                NatsError(
                    Reason.HELLO_TIMEOUT,
                    f"received no CONNECT within {limits.auth_seconds:g} s",
                    error_text="Authentication Timeout",
                    closed_reason="Authentication Timeout",
                ),
            )
            return now
        # The server does not read from a paused client, so it cannot see a PONG.
        if (
            session.is_reading_paused
            or session.is_request_pending
            or self.rate_limits.is_paused(session)
        ):
            return now + limits.ping_seconds
        quiet_until = session.last_received_at + limits.ping_seconds
        if session.is_first_ping_sent or not session.is_first_pong_sent:
            if now < quiet_until:
                return quiet_until
            if session.unanswered_ping_count >= limits.pings_max:
                self.disconnect(session, stale_connection(session.unanswered_ping_count))
                return now
        session.is_first_ping_sent = True
        session.unanswered_ping_count += 1
        session.send(_PING)
        return now + limits.ping_seconds

    def can_read_while_blocked(self, session: NatsSession) -> bool:
        """Return True if the server may read from a client with messages that wait for space.

        Acks of the client may free that space. Otherwise it is read every
        `BLOCKED_READ_INTERVAL_SECONDS` while it has few blocked bytes, so that the server receives
        other commands and PONGs.
        """
        if self.bus_adapter is None or self.bus_adapter.is_blocking_publishers(session):
            return True
        is_due = self.now - session.last_received_at >= BLOCKED_READ_INTERVAL_SECONDS
        return is_due and self.bus_adapter.has_few_parked_bytes(session)

    def send_lame_duck_in_parts(self) -> Iterator[None]:
        """Announce the shutdown to clients that accept INFO at any time, in parts.

        Other calls are allowed between the parts. The sessions of one part are ready together.
        """
        sessions = drain_list(list(self.sessions.values()))
        while part := list(islice(sessions, CHECKED_CLIENTS_PER_TURN)):
            for session in part:
                session.send_info(ldm=True)
            yield

    def disconnect(self, session: NatsSession, error: NatsError) -> None:
        """Schedule a session for closing. Nothing more is sent to it."""
        if session.is_disconnecting:
            return
        self._disconnecting.append((session, error))
        self._on_pending()
        # If acked subscriptions are left, `close_session` ends all subscriptions.
        if not self.end_some_acked_subscriptions(session):
            self._end_all_subscriptions(session)

    def handle_slow(self, session: NatsSession) -> None:
        """Let publishers wait for a session with many pending bytes, or disconnect it."""
        error = self.slow_consumer_monitor.add_slow(session)
        if error is not None:
            self._disconnect_slow_consumer(session, error)

    def _disconnect_slow_consumer(self, session: NatsSession, error: NatsError) -> None:
        """Disconnect a slow client without an error line and discard its output."""
        self.slow_consumer_count += 1
        self._discarded_output.extend(session.discard_output())
        self.disconnect(session, error)

    @property
    def has_discarded_output(self) -> bool:
        """True if `free_discarded_output` has work to do."""
        return bool(self._discarded_output)

    def free_discarded_output(self) -> None:
        """Free some of the output of slow clients that were disconnected."""
        freed_bytes = freed_count = 0
        while (
            self._discarded_output
            and freed_bytes < FREED_BYTES_PER_TURN
            and freed_count < FREED_PIECES_PER_TURN
        ):
            freed_bytes += len(self._discarded_output.popleft())
            freed_count += 1

    def mark_ready(self, session: NatsSession) -> None:
        """Record that the outbox of a session has new bytes."""
        if not self._ready_sessions:
            self._on_pending()
        self._ready_sessions[session] = None

    def mark_gathering(self, session: NatsSession) -> None:
        """Record that a session has gathered the first messages of the current batch."""
        self.delivery.mark_gathering(session)

    # Events --------------------------------------------------------------------------------------

    def _handle_event(self, session: NatsSession, event: ClientEvent) -> None:
        """Apply an event other than `Pub`, which `receive` passes to `_publish`."""
        match event:
            case UniformBatch():
                sinks = self.routes.match(event.first_message.subject)
                if self._can_publish_uniform(session, event):
                    session.in_bytes += event.count * len(event.first_message.body)
                    self._publish_batch(session, event, [(sinks, None)])
                else:
                    self._publish_singly(session, event, [sinks] * event.count)
            case MixedBatch():
                event = self._limit_searches(session, event)
                if not self._search_routes(session, event):
                    self._publish_singly(session, event, [None] * event.count)
                elif self._can_publish_mixed(session, event):
                    body_bytes = int((event.bounds[1:] - event.body_starts).sum())
                    session.in_bytes += body_bytes - 2 * event.count
                    self._publish_batch(
                        session, event, self.routes.split_by_sinks(event.subject_numbers)
                    )
                else:
                    sinks_by_row = self.routes.match_each(event.subject_numbers)
                    self._publish_singly(session, event, sinks_by_row)
            case Ping():
                self.delivery.cost_bytes += PING_COST_BYTES
                if not self._defers_pong(session):
                    session.send(encode.PONG)
                session.is_first_pong_sent = True
                if session.has_sent_connect and not session.is_connect_answered:
                    self._send_connect_info(session)
            case Pong():
                self.delivery.cost_bytes += PING_COST_BYTES
                session.unanswered_ping_count = 0
            case Sub():
                if self._finished:
                    self._run_in_turns(session, self._subscribe_in_steps(session, event))
                else:
                    self._subscribe(session, event)
            case Unsub():
                self._run_in_turns(session, self._unsubscribe_in_steps(session, event))
            case Connect():
                self._handle_connect(session, event)

    def _defers_pong(self, session: NatsSession) -> bool:
        """Return True if a PONG must wait until the messages of the client are durable.

        The first PONG after CONNECT does not wait: clients expect no INFO before it.
        """
        is_answering_connect = session.has_sent_connect and not session.is_connect_answered
        return (
            session.local_session is not None
            and not is_answering_connect
            and self.bus_adapter is not None
            and self.bus_adapter.defers_pong(session)
        )

    def _send_connect_info(self, session: NatsSession) -> None:
        """Send INFO after the first PONG that follows CONNECT, as nats-server does."""
        session.is_connect_answered = True
        session.send_info(connect_info=True)

    def _send_ok(self, session: NatsSession) -> None:
        if session.options.verbose:
            session.send(_OK)

    def _handle_connect(self, session: NatsSession, event: Connect) -> None:
        """Authenticate a client. A repeated CONNECT ends its subscriptions."""
        self.delivery.cost_bytes += CONNECT_COST_BYTES
        options, user = self.authenticator.handle_connect(session, event.options_json)
        session.options = options
        session.parser.accepts_headers = options.headers
        steps = self._accept_connect_in_steps(session, user, self.authenticator)
        self._run_in_turns(session, steps)

    def _accept_connect_in_steps(
        self, session: NatsSession, user: User | None, authenticator: Authenticator
    ) -> Generator[None, None, None]:
        """Set the user of a session, whom `authenticator` has accepted. If the client has sent
        CONNECT before, end its subscriptions first.
        """
        if session.has_sent_connect:
            for subscription in self._acked_subscriptions(session):
                if self.delivery.is_turn_over:
                    yield
                self.delivery.cost_bytes += UNSUBSCRIBE_COST_BYTES
                yield from self._end_in_steps(subscription)
            self._end_all_subscriptions(session)
        if self.authenticator is not authenticator and not _is_valid_user(
            user, self.authenticator.users
        ):
            raise authorization_violation("its user was removed or changed by a reload")
        session.has_sent_connect = True
        self._set_user(session, user)
        self._send_ok(session)

    def _set_user(self, session: NatsSession, user: User | None) -> None:
        """Apply the user of a session. Raises NatsError if the user has too many connections."""
        if self.bus_adapter is not None and not is_same_user(session.user, user):
            check_user_connections(self.bus_adapter.broker.connection_limits, user)
            self.bus_adapter.close_local_session(session)  # It belongs to the previous user.
        self.rate_limits.set_user(session, user)
        session.user, session.subject_grants = user, self.authenticator.subject_grants(user)
        session.class_grants = self.authenticator.local_session_grants(user)
        responses = session.subject_grants.responses if session.subject_grants else None
        session.open_replies = OpenReplies(responses, lambda: self.now) if responses else None
        if user is not None:
            session.has_sent_connect = True
        session.is_identified = True

    # Publishing ----------------------------------------------------------------------------------

    def _can_publish_uniform(self, session: NatsSession, event: UniformBatch) -> bool:
        """Return True if no message of the batch needs a reply or a check of its own."""
        head, options = event.first_message, session.options
        return not (
            options.verbose
            or (options.pedantic and not subjects.is_literal(head.subject))
            or (
                session.subject_grants
                and not session.subject_grants.publish_cache.get(head.subject)
            )
            or (head.reply and (options.no_responders or subjects.is_reserved_reply(head.reply)))
        )

    def _can_publish_mixed(self, session: NatsSession, event: MixedBatch) -> bool:
        """Return True if no message of the batch needs a reply or a check of its own."""
        return not (
            session.options.verbose
            or session.options.pedantic
            or (
                session.subject_grants
                and not session.subject_grants.publish_cache.get_many(event.subject_numbers).all()
            )
            or self.routes.is_scattered(event.subject_numbers)
        )

    def _limit_searches(self, session: NatsSession, event: MixedBatch) -> MixedBatch:
        """Return the leading messages of a batch, so that few subjects must be searched, and few
        permissions decided. The other messages are parsed again in a later turn.
        """
        if not session.can_split_reads:
            return event
        numbers = event.subject_numbers
        count = self.routes.count_until_searched(numbers, SEARCHED_SUBJECTS_PER_TURN_MAX)
        if session.subject_grants:
            cache = session.subject_grants.publish_cache
            max_cost_bytes = SEARCHED_SUBJECTS_PER_TURN_MAX * SEARCHED_SUBJECT_COST_BYTES
            max_decisions = max(1, max_cost_bytes // cache.decision_cost_bytes)
            count = min(count, cache.count_until_decided(numbers, max_decisions))
        if count == event.count:
            return event
        session.parser.unread_messages(event, count)
        return event.first_messages(count)

    def _search_routes(self, session: NatsSession, event: MixedBatch) -> bool:
        """Find the sinks of all subjects of a batch. Returns False if that takes several turns."""
        max_sinks = SEARCHED_SINKS_PER_TURN_MAX if session.can_split_reads else math.inf
        sink_count, subject_count = self.routes.search(event.subject_numbers, max_sinks)
        self.delivery.cost_bytes += sink_count * FOUND_SINK_COST_BYTES
        self.delivery.cost_bytes += subject_count * SEARCHED_SUBJECT_COST_BYTES
        return sink_count <= max_sinks

    def _publish_singly(
        self,
        session: NatsSession,
        event: UniformBatch | MixedBatch,
        sinks_by_row: Sequence[SubjectSinks | None],
    ) -> None:
        """Publish a batch message by message. The sinks are None if they are to be searched."""
        is_search_pending = None in sinks_by_row
        sink_count = sum([len(sinks or ()) for sinks in sinks_by_row])
        cost_bytes = event.count * EVENT_COST_BYTES + sink_count * (
            SINGLE_DELIVERY_COST_BYTES + event.mean_message_bytes
        )
        may_lack_responders = session.options.no_responders and isinstance(event, UniformBatch)
        if session.can_split_reads and (
            may_lack_responders or is_search_pending or not self.delivery.fits_into_turn(cost_bytes)
        ):
            event = event.copy(self.routes.table)
            steps = self._publish_singly_in_steps(session, event, sinks_by_row)
            self._start_request(session, steps, event.size_bytes)
            return
        for _ in self._publish_singly_in_steps(session, event, sinks_by_row):
            pass

    def _publish_singly_in_steps(
        self,
        session: NatsSession,
        event: UniformBatch | MixedBatch,
        sinks_by_row: Sequence[SubjectSinks | None],
    ) -> Iterator[None]:
        """Publish a batch message by message, with a step at the end of each turn but the last.

        `sinks_by_row` are used while routes stay unchanged, unless they are None.
        """
        routes, generation = self.routes, self.routes.generation
        messages = iter_messages(event, routes.table.names)
        for sinks, message in zip(sinks_by_row, messages, strict=True):
            # A search may find very many sinks.
            if self.delivery.is_turn_over or (sinks is None and self.delivery.is_turn_long):
                yield
            if self._begin_publication(session, message):
                if sinks is None or routes.generation != generation:
                    sinks = routes.match(message.subject)
                yield from self._publish_in_steps(session, message, sinks)

    def _publish(self, session: NatsSession, message: Pub) -> None:
        """Publish one message."""
        if not self._begin_publication(session, message):
            return
        sinks = self.routes.match(message.subject)
        if session.can_split_reads and not self.delivery.fits_message(message, sinks):
            message = share_body(message, len(sinks))
            if message.shared_end is None:
                message = message.copy()
            steps = self._publish_in_steps(session, message, sinks)
            self._start_request(session, steps, len(message.body))
            return
        is_accepted = self.delivery.deliver_message(message, sinks, session)
        if self._needs_no_responders(session, message, is_accepted=is_accepted):
            self._start_request(session, self._send_no_responders_in_steps(session, message), 0)

    def _publish_in_steps(
        self, session: NatsSession, message: Pub, sinks: SubjectSinks
    ) -> Iterator[None]:
        """Publish an accepted message, with a step at the end of each turn but the last."""
        steps = self.delivery.deliver_message_in_steps(message, sinks, session)
        del sinks  # It would keep subscriptions that end meanwhile.
        is_accepted = yield from steps
        if self._needs_no_responders(session, message, is_accepted=is_accepted):
            yield from self._send_no_responders_in_steps(session, message)

    def _begin_publication(self, session: NatsSession, message: Pub) -> bool:
        """Count and check a message. Returns False if the client may not publish it."""
        session.in_messages += 1
        session.in_bytes += len(message.body)
        if session.options.pedantic and not subjects.is_literal(message.subject):
            session.send(error_line("Invalid Publish Subject"))
        if session.subject_grants and not self._can_publish(session, message.subject):
            self._send_denied(session, f"Publish to {subjects.quote(message.subject)}")
            return False
        if message.reply and subjects.is_reserved_reply(message.reply):
            self._send_denied(session, f"Publish with Reply of {subjects.quote(message.reply)}")
            return False
        if session.options.verbose:
            session.send(_OK)
        return True

    @staticmethod
    def _needs_no_responders(session: NatsSession, message: Pub, *, is_accepted: bool) -> bool:
        """Return True if a request was accepted by no receiver, and the client expects a status."""
        return bool(message.reply) and not is_accepted and session.options.no_responders

    def _start_request(self, session: NatsSession, steps: Iterator[None], kept_bytes: int) -> None:
        """Process a request in turns, beginning with this one, or with the next one if copying the
        messages has taken much of this one.

        Args:
            session: The session of the client.
            steps: Does the work, with a step at the end of each turn but the last.
            kept_bytes: Size of the copied messages of the request.
        """
        assert session.pending_request is None
        request = PendingRequest(steps, kept_bytes)
        if kept_bytes > COPIED_IN_TURN_BYTES_MAX:
            session.pending_request = request
        else:
            self._process_in_turn(session, request)

    def _run_in_turns(self, session: NatsSession, steps: Generator[None, None, None]) -> None:
        """Run the steps of a request in turns, or to their end if reads are not split."""
        if session.can_split_reads:
            self._start_request(session, steps, 0)
        else:
            run_to_end(steps)

    @staticmethod
    def _process_in_turn(session: NatsSession, request: PendingRequest) -> None:
        """Process a request until the turn is over; it is pending if that was not the end."""
        session.pending_request = None  # Also if a step fails.
        for _ in request.steps:
            session.pending_request = request
            return

    def _can_publish(self, session: NatsSession, subject: bytes) -> bool:
        assert session.subject_grants is not None
        return session.subject_grants.publish_cache.get(subject) or (
            session.open_replies is not None and session.open_replies.use_reply(subject)
        )

    def _send_denied(self, session: NatsSession, action: str) -> None:
        self.denied_count += 1
        session.send(error_line(f"Permissions Violation for {action}"))

    def _publish_batch(
        self, session: NatsSession, event: UniformBatch | MixedBatch, targets: list[SinkRows]
    ) -> None:
        """Publish a batch at once. Its bytes are counted already."""
        session.in_messages += event.count
        if session.can_split_reads and not self.delivery.fits_batch(event, targets):
            event = event.copy(self.routes.table)
            steps = self.delivery.deliver_batch_in_steps(event, targets, session)
            self._start_request(session, steps, event.size_bytes)
            return
        self.delivery.deliver_batch(event, targets, session)

    def deliver(self, messages: Pub | UniformBatch | MixedBatch | LazyMessages) -> None:
        """Deliver stored messages. A mixed batch must have `subject_names`."""
        if self.delivery.deliver_from_bus(messages):
            self._on_pending()

    def deliver_reply(self, message: Pub, *, receiver: NatsSession | None) -> None:
        """Deliver a reply of the bus to the subscriptions of `receiver`; None for all clients."""
        if self.delivery.deliver_reply(message, receiver):
            self._on_pending()

    def allow_waiting_deliveries(self) -> None:
        """Deliver messages of the bus with many receivers in several turns.

        The driver then calls `begin_turn` after it has sent the output of a turn, and
        `deliver_waiting` in later turns while `has_waiting_deliveries`. `on_pending` informs it. It
        does not read from clients whose last input added to a queue that is full.
        Without this call, all messages are delivered at once.
        """
        self.delivery.allow_waiting()

    def begin_turn(self) -> None:
        """Begin a turn without cost."""
        self.delivery.begin_turn()

    @property
    def has_waiting_deliveries(self) -> bool:
        """True if `deliver_waiting` has work to do."""
        return self.delivery.has_waiting

    def deliver_waiting(self) -> None:
        """Deliver messages that wait, for one turn."""
        self.delivery.begin_turn()
        self.slow_consumer_monitor.now = self.now
        self.delivery.deliver_waiting()

    def add_read_cost(self, cost_bytes: int) -> None:
        """Add to the cost of the current turn, in bytes of output."""
        self.delivery.add_cost(cost_bytes)

    def _send_no_responders_in_steps(self, session: NatsSession, message: Pub) -> Iterator[None]:
        """Send status 503 to the requester, if it subscribed to its reply subject. Not counted as
        a message.

        Has a step at the end of each turn but the last, unless reads are not split.
        """
        status, sinks = encode.no_responders_message(message), self.routes.match(message.reply)
        del message  # Its body may be a view of the input.
        self.delivery.cost_bytes += NO_RESPONDERS_COST_BYTES
        for page in pages_of(sinks):
            if self.delivery.is_turn_over and session.can_split_reads:
                yield
            self.delivery.cost_bytes += len(page) * FOUND_SINK_COST_BYTES
            for sink in page:
                if (
                    isinstance(sink, NatsSubscription)
                    and sink.session is session
                    and not sink.has_ended
                ):
                    session.send(encode.encode_message(status, sink.sid, headers=True))
                    return

    # Subscribing ---------------------------------------------------------------------------------

    def _subscribe_in_steps(self, session: NatsSession, event: Sub) -> Generator[None, None, None]:
        """Handle SUB. Before that, end finished subscriptions in turns: one of them may hold the
        requested durable or group.
        """
        while self._finished:
            self._end_next_finished()
            self.delivery.cost_bytes += DEAD_LETTERS_COST_BYTES
            if self.delivery.is_turn_over:
                yield
        if not session.is_disconnecting:
            self._subscribe(session, event)

    def _subscribe(self, session: NatsSession, event: Sub) -> None:
        self.delivery.cost_bytes += SUBSCRIBE_COST_BYTES
        limits, grants = self.settings.limits, session.subject_grants
        is_class_request = self.bus_adapter is not None and self.bus_adapter.is_class_request(
            event.subject
        )
        # The bus adapter checks requests for classes.
        if grants and not (is_class_request or grants.can_subscribe(event.subject, event.queue)):
            queue = f" using queue {subjects.quote(event.queue)}" if event.queue else ""
            self._send_denied(session, f"Subscription to {subjects.quote(event.subject)}{queue}")
            return
        if limits.max_subs and len(session.subscriptions) >= limits.max_subs:
            session.send(_TOO_MANY_SUBSCRIPTIONS)
            return
        if event.sid not in session.subscriptions:
            if not subjects.is_legal(event.subject):
                session.send(error_line("Invalid Subject"))
                return
            if subjects.is_too_deep(event.subject):
                self._send_denied(
                    session, f"Subscription to {subjects.quote(event.subject)}, too many tokens"
                )
                return
            if is_class_request:
                assert self.bus_adapter is not None
                acked = self.bus_adapter.subscribe(session, event)
                if acked is None:
                    return
                session.subscriptions[event.sid] = acked
            else:
                denied = grants.delivery_filter(event.subject, event.queue) if grants else None
                subscription = NatsSubscription(
                    session, event.subject, event.queue, event.sid, denied
                )
                if not self.routes.subscribe(subscription):
                    session.send(_TOO_MANY_SUBSCRIPTIONS)
                    return
                session.subscriptions[event.sid] = subscription
        self._send_ok(session)

    def _unsubscribe_in_steps(
        self, session: NatsSession, event: Unsub
    ) -> Generator[None, None, None]:
        """Handle UNSUB. The subscription ends now, or after `max_messages`."""
        self.delivery.cost_bytes += SUBSCRIBE_COST_BYTES
        subscription = session.subscriptions.get(event.sid)
        if subscription is not None:
            if not subscription.is_finished:
                subscription.max_messages = event.max_messages
                if isinstance(subscription, AckedSubscription):
                    assert self.bus_adapter is not None
                    self.bus_adapter.limit_messages(subscription)
            if event.max_messages <= subscription.delivered_count:
                yield from self._end_in_steps(subscription)
        self._send_ok(session)

    def _end_in_steps(self, subscription: NatsSubscription) -> Generator[None, None, None]:
        """Remove a subscription. Before that, append the dead letters of its position in turns."""
        if isinstance(subscription, AckedSubscription):
            assert self.bus_adapter is not None
            while self.bus_adapter.append_some_last_dead_letters(subscription):
                self.delivery.cost_bytes += DEAD_LETTERS_COST_BYTES
                if self.delivery.is_turn_over:
                    yield
        self.end_subscription(subscription)

    def finish_subscription(self, subscription: NatsSubscription) -> None:
        """End a subscription that has received its `max_messages`, later if dead letters of its
        position must be appended before.
        """
        if (
            isinstance(subscription, AckedSubscription)
            and subscription.session.can_split_reads
            and self.bus_adapter is not None
            and self.bus_adapter.has_last_dead_letters(subscription)
        ):
            self._finished.append(subscription)
            self._on_pending()
            return
        self.end_subscription(subscription)

    @property
    def has_removals(self) -> bool:
        """True if `remove_some` has work to do."""
        return bool(self._finished) or self.routes.has_abandoned

    def remove_some(self) -> None:
        """Remove some subscriptions: of clients that have left, or finished ones."""
        if not self._finished:
            self.routes.remove_abandoned()
            return
        self._end_next_finished()

    def _end_next_finished(self) -> None:
        """Append some dead letters of the next finished subscription, and end it if these were the
        last.
        """
        assert self.bus_adapter is not None
        subscription = self._finished.popleft()
        if self.bus_adapter.append_some_last_dead_letters(subscription):
            self._finished.appendleft(subscription)
        else:
            self.end_subscription(subscription)

    def end_subscription(self, subscription: NatsSubscription) -> None:
        """Remove a subscription."""
        if not subscription.remove_from_session():
            return
        if isinstance(subscription, AckedSubscription):
            assert self.bus_adapter is not None
            self.bus_adapter.unsubscribe(subscription)
        else:
            self.routes.unsubscribe(subscription)

    def _acked_subscriptions(self, session: NatsSession) -> list[AckedSubscription]:
        return [] if self.bus_adapter is None else self.bus_adapter.acked_subscriptions(session)

    def end_some_acked_subscriptions(self, session: NatsSession) -> bool:
        """End the next acked subscriptions of a session that disconnects. Nothing more is sent.

        Returns:
            True if the session has more acked subscriptions.
        """
        session.is_disconnecting = True
        adapter = self.bus_adapter
        return adapter is not None and adapter.end_some_acked_subscriptions(session)

    def _end_all_subscriptions(self, session: NatsSession) -> None:
        """Remove all subscriptions of a session, which has no acked ones. If they are many, their
        routes are removed in later turns.
        """
        if len(session.subscriptions) <= IMMEDIATE_REMOVALS_MAX:
            for subscription in list(session.subscriptions.values()):
                self.end_subscription(subscription)
            return
        self.routes.abandon_all(session, session.take_subscriptions())


def _disconnect_cost(session: NatsSession) -> int:
    """Return the number of checks of clients that take as long as disconnecting this one."""
    return DISCONNECT_COST_CHECKS + min(len(session.subscriptions), IMMEDIATE_REMOVALS_MAX)


def apply_settings_in_parts(server: NatsServer, settings: NatsSettings) -> Iterator[None]:
    """Apply reloaded settings: to new sessions at once, and to the others in parts.

    Sessions with a changed user or permissions are disconnected.
    """
    before, now = server.authenticator.users, settings.users
    bus = server.bus_adapter.broker.settings.limits if server.bus_adapter is not None else Limits()
    server.settings = settings
    server.slow_consumer_monitor.set_limits(
        settings.limits, total_pending_bytes=bus.total_pending_bytes
    )
    server.routes.subscription_memory.limit_bytes = memory_limit(bus)
    are_users_changed = before != now
    if are_users_changed:
        server.authenticator = server.authenticator.with_users(now)
    for number, session in enumerate(drain_list(list(server.sessions.values())), 1):
        if number % CHECKED_CLIENTS_PER_TURN == 0:
            yield
        if session.info.connect_urls != settings.connect_urls:
            session.set_connect_urls(settings.connect_urls)
        if (
            are_users_changed
            and not session.is_disconnecting
            and session.client_id in server.sessions
            and session.is_identified
            and not _is_valid_user(session.user, now)
        ):
            server.disconnect(
                session, authorization_violation("its user was removed or changed by a reload")
            )


def _is_valid_user(user: User | None, users: Users | None) -> bool:
    """Return True if `users` contains the user unchanged, or if there is no authentication and no
    user.
    """
    if users is None or user is None:
        return users is None and user is None
    return users.has_unchanged(user)
