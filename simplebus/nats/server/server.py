"""The NATS door: who publishes, who is sent what.

Rule 1: everything happens in `receive`, `close`, `tick` and in taking bytes from an outbox. No
socket, no clock, no thread; a driver brings bytes, beats and clock readings, and sends what
outboxes show.

    bytes ─► Parser ─► events ─► Front ─► Routes ─► sinks ─► Outbox ─► bytes
"""

from __future__ import annotations

import heapq
from functools import partial

import msgspec
import numpy as np

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import Reason
from simplebus.core.limits import HEADROOM_BYTES, Limits
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.nats import subjects
from simplebus.nats.bus.acked import AckedSubscription
from simplebus.nats.bus.bus_session import Classes
from simplebus.nats.errors import NatsError, error_line, stale_connection
from simplebus.nats.limits import (
    DROPPED_AT_ONCE,
    EVENT_BYTES,
    FIRST_PING_SECONDS,
    HELD_SECONDS,
    KEPT_BYTES_MIN,
    SUBSCRIPTION_BYTES,
    TAKER_BYTES,
)
from simplebus.nats.protocol import encode, handshake
from simplebus.nats.protocol.events import (
    Connect,
    ClientEvent,
    MixedBatch,
    Ping,
    Pong,
    Indexes,
    Pub,
    UniformBatch,
    Sub,
    Unsub,
    iter_messages,
)
from simplebus.nats.protocol.parser import NatsParser
from simplebus.nats.server.authenticate import (
    Gate,
    check_visits,
    connections_of,
    is_same,
    violation,
)
from simplebus.nats.server.class_permissions import BoundClasses
from simplebus.nats.server.permissions import Replies
from simplebus.nats.server.routes import Routes, Sinks
from simplebus.nats.server.session import NatsSession, Written
from simplebus.nats.server.slow_consumers import Limited, Pace
from simplebus.nats.server.subscription import Sink, Subscription
from simplebus.nats.server.subscription_memory import limit_of
from simplebus.nats.server.users import NatsAuth, NatsUser
from simplebus.nats.settings import NatsSettings
from simplebus.nats.statistics import NatsServerStatistics, collect_statistics

_OK = b"+OK\r\n"
_PING = b"PING\r\n"
_PONG = b"PONG\r\n"
_TOO_MANY = error_line("maximum subscriptions exceeded")


class Front:
    """See the module's law for how it is driven."""

    def __init__(
        self,
        settings: NatsSettings | None = None,
        *,
        server_id: str = "",
        seed: int = 0,
        secret: bytes = b"",
        broker: Broker | None = None,
    ) -> None:
        """`seed` decides which members of queue groups are chosen; `secret`, which nobody else may
        know, what clients sign that have a key. Without a broker no subject has to do with a
        class."""
        self.settings = settings or NatsSettings()
        self.server_id = server_id
        self.now = 0.0
        """The driver sets it before it brings anything."""
        self.sessions: dict[int, NatsSession] = {}
        """By client id."""
        bus = broker.settings.limits if broker else Limits()
        self.routes = Routes(np.random.default_rng(seed), bus)
        bound = BoundClasses()
        self.gate = Gate(self.settings.auth, self.routes.table, secret, bound)
        self.denied = 0
        """How often something was asked for that permissions do not allow."""
        self.slow_consumers = 0
        """Clients cut off because they took too little."""
        self.gone_in_messages = self.gone_in_bytes = 0
        self.gone_out_messages = self.gone_out_bytes = 0
        """Of clients that are gone."""
        self.pace = Pace(self.settings.limits, total=bus.total_pending_bytes)
        self.next_client_id = 1
        self._ready: dict[NatsSession, None] = {}
        self._gathering: list[NatsSession] = []
        """For whom something is gathered of the batch that is looked at."""
        self._made = 0
        """Bytes that were written of the read that is looked at."""
        self._cut: list[tuple[NatsSession, NatsError]] = []
        self._faults: list[Exception] = []
        self.classes: Classes | None = None
        self.limited = Limited(broker)
        if broker is not None:
            self.classes = Classes(
                broker,
                self.routes,
                deliver=self.deliver,
                weigh=self._weigh,
                cut=self.cut,
                fault=self._note_fault,
                bound=bound,
            )
            broker.connection_limits.external_counters.append(
                partial(connections_of, self.sessions)
            )
        self._due: list[tuple[float, int]] = []
        """When to look after which client: a heap, with each client once."""

    # Sessions ------------------------------------------------------------------------------------

    def open(
        self, peer: str, *, ip: str = "", host: str = "", port: int = 0, is_early: bool = False
    ) -> NatsSession:
        """A client has connected to this host and port, from this address. If that is early,
        something else comes before it may speak; then `start` says that it may."""
        settings, gate, client_id = self.settings, self.gate, self.next_client_id
        self.next_client_id += 1
        info = handshake.info(
            settings,
            server_id=self.server_id,
            host=host,
            port=port,
            client_id=client_id,
            client_ip=ip,
            auth_required=self.gate.asks,
            nonce=gate.nonce(client_id),
        )
        session = NatsSession(
            info,
            NatsParser(settings.limits, self.routes.table),
            peer=peer,
            pending_mark=self.pace.mark,
            ready=self._make_ready,
            gathers=self._gathering.append,
            end=self._end,
            overflow=self._fell_behind,
        )
        session.is_connected = not gate.auth.required
        self.limited.open(session)
        self.sessions[client_id] = session
        session.send(info.line())
        if not is_early:
            self.start(session)
        return session

    def start(self, session: NatsSession) -> None:
        """From now on it is measured how long the client says nothing."""
        session.heard_at = self.now
        limits = self.settings.limits
        first = min(FIRST_PING_SECONDS, limits.ping_seconds)
        first = limits.auth_seconds if self.gate.asks else first
        heapq.heappush(self._due, (self.now + first, session.client_id))

    def receive(self, session: NatsSession, buffer: ReceiveBuffer, count: int) -> None:
        """`count` fresh bytes of this session are in the buffer.

        Raises NatsError after everything before the offence was applied; `fail` and close the
        session then.
        """
        assert not session.is_closed
        self._made = 0
        session.heard_at = self.pace.now = self.now
        if not session.is_connected:
            self._begin(session, buffer.raw[HEADROOM_BYTES])
        events = 0
        for event in session.parser.receive(buffer, count):
            events += 1
            self._apply(session, event)
            if session.is_cut:
                break
        session.took(count, made=self._made, events=events)
        self.limited.charge(session)
        if session.parser.tail_bytes > KEPT_BYTES_MIN:
            for late, error in self.pace.begun(session, min(count, session.parser.tail_bytes)):
                self._give_up(late, error)
        if self.pace.has_behind or session.has_held:
            guest = session.deliveries.guest.session_id if session.deliveries else -1
            elsewhere = self.classes is not None and self.classes.broker.has_other_ready_sessions(
                guest
            )
            session.hold = self.pace.hold_of(session, self._ready, elsewhere=elsewhere)

    def feeds_anybody(self) -> bool:
        """Whether there is something new for anybody who is not behind."""
        return not all(self.pace.is_behind(session) for session in self._ready)

    def _begin(self, session: NatsSession, first: int) -> None:
        """A client of which it is not known who it is says something that begins with this byte.
        Where nobody has to say it, it is known by that, unless this is the beginning of CONNECT."""
        if first in b"cC" or session.parser.tail_bytes:
            return
        user = self.gate.silent_user or self.gate.auth.at_all_doors(
            None, "", certified=session.certificate_names, address=session.address
        )
        if user is None:
            raise violation("it said something else before CONNECT")
        self._let_in(session, user)

    def fail(self, session: NatsSession, error: NatsError) -> None:
        """A session is to be closed for this reason: tell its client, if there is a word."""
        if not session.is_closed and error.line:
            session.outbox.put(error.line)

    def close(self, session: NatsSession) -> None:
        """The client is gone, and all that it has subscribed to."""
        if session.is_closed:
            return
        session.is_closed = session.is_cut = True
        del self.sessions[session.client_id]
        self.gone_in_messages += session.in_messages
        self.gone_in_bytes += session.in_bytes
        self.gone_out_messages += session.out_messages
        self.gone_out_bytes += session.outbox.sent_bytes
        if self.classes is not None:
            self.classes.leave(session)  # What it held of classes is given back in one go.
        self._drop_all(session)
        self._ready.pop(session, None)

    def take_ready(self) -> list[NatsSession]:
        """Sessions whose outbox has something new. Each is named once until taken."""
        ready = list(self._ready)
        self.pace.keep_all(self._ready)
        self._ready.clear()
        return ready

    def take_cut(self) -> list[tuple[NatsSession, NatsError]]:
        """Sessions to be cut off, and why."""
        cut, self._cut = self._cut, []
        return cut

    def statistics(self) -> NatsServerStatistics:
        """A snapshot."""
        return collect_statistics(self)

    def take_faults(self) -> list[Exception]:
        """What went wrong through faults of ours, to be logged."""
        faults, self._faults = self._faults, []
        return faults

    def _note_fault(self, error: Exception) -> None:
        """Something went wrong within a batch: what is left of it goes to nobody."""
        self._faults.append(error)
        for session in self._gathering:
            session.forget_gathered()
        self._gathering.clear()

    def tick(self) -> None:
        """One beat: who is overdue, and what is to be forgotten?"""
        self.routes.tidy()
        self.pace.now = self.now
        for late, error in self.pace.overdue():
            self._give_up(late, error)
        due = self._due
        while due and due[0][0] <= self.now:
            _, client_id = heapq.heappop(due)
            session = self.sessions.get(client_id)
            if session is not None and not session.is_cut:
                heapq.heappush(due, (self._look_after(session), client_id))

    def _look_after(self, session: NatsSession) -> float:
        """See whether a client still lives. Returns when to look again."""
        limits, now = self.settings.limits, self.now
        if session.is_authenticating:
            return now + limits.auth_seconds
        if not session.is_connected and self.gate.asks:
            self.cut(
                session,
                NatsError(
                    Reason.HELLO_TIMEOUT,
                    f"it said no CONNECT within {limits.auth_seconds:g} s",
                    error_text="Authentication Timeout",
                    closed_reason="Authentication Timeout",
                ),
            )
            return now
        if session.is_reading_paused or self.limited.is_paused(
            session
        ):  # What it may say is not read.
            return now + limits.ping_seconds
        quiet_until = session.heard_at + limits.ping_seconds
        if session.is_probed or not session.is_greeted:
            if now < quiet_until:
                return quiet_until
            if session.pings >= limits.pings_max:
                self.cut(session, stale_connection(session.pings))
                return now
        session.is_probed = True
        session.pings += 1
        session.send(_PING)
        return now + limits.ping_seconds

    def reads_on(self, session: NatsSession) -> bool:
        """Whether a client whose messages wait for room is to be read from all the same: because
        its acknowledgements may make that room; or, now and then and as long as little waits, for
        what else it says."""
        if self.classes is None or self.classes.holds_back(session):
            return True
        is_due = self.now - session.heard_at >= HELD_SECONDS
        return is_due and self.classes.keeps_little(session)

    def say_lame_duck(self) -> None:
        """Tell clients that understand it, behind their first PONG, that this server will close."""
        for session in self.sessions.values():
            if session.is_informed and session.options.protocol:
                session.send(msgspec.structs.replace(session.info, ldm=True).line())

    def cut(self, session: NatsSession, error: NatsError) -> None:
        """Have a session closed, as soon as nothing else is under way. It is sent nothing more."""
        session.is_cut = True
        self._cut.append((session, error))
        self._drop_all(session)

    def _fell_behind(self, session: NatsSession) -> None:
        error = self.pace.note(session)
        if error is not None:
            self._give_up(session, error)

    def _give_up(self, session: NatsSession, error: NatsError) -> None:
        """A client is too slow: it is cut off without a word, and with what waits for it."""
        self.slow_consumers += 1
        session.forget_all()
        self.cut(session, error)

    def _make_ready(self, session: NatsSession) -> None:
        self._ready[session] = None

    # Events --------------------------------------------------------------------------------------

    def _apply(self, session: NatsSession, event: ClientEvent) -> None:
        match event:
            case Pub():
                self._publish(session, event)
            case UniformBatch():
                if self._is_plain_run(session, event):
                    self._publish_run(session, event)
                else:
                    self._publish_each(session, event)
            case MixedBatch():
                if self._is_plain_mix(session, event):
                    self._publish_mix(session, event)
                else:
                    self._publish_each(session, event)
            case Ping():
                session.send(_PONG)
                session.is_greeted = True
                if session.has_said_connect and not session.is_informed:
                    self._inform(session)
            case Pong():
                session.pings = 0
            case Sub():
                self._subscribe(session, event)
            case Unsub():
                self._unsubscribe(session, event)
            case Connect():
                self._connect(session, event)

    def _inform(self, session: NatsSession) -> None:
        """The first PONG behind a CONNECT is followed by INFO, for clients that understand it."""
        session.is_informed = True
        if session.options.protocol:
            session.send(msgspec.structs.replace(session.info, connect_info=True).line())

    def _ok(self, session: NatsSession) -> None:
        if session.options.verbose:
            session.send(_OK)

    def _connect(self, session: NatsSession, event: Connect) -> None:
        """A client says who it is. One that says it again loses its subscriptions."""
        options, user = self.gate.hear(session, event.options_json)
        session.options = options
        session.parser.accepts_headers = options.headers
        if session.has_said_connect:
            self._drop_all(session)
        session.has_said_connect = True
        self._let_in(session, user)
        self._ok(session)

    def _let_in(self, session: NatsSession, user: NatsUser | None) -> None:
        """It is known who it is. Raises NatsError for one that is there too often."""
        if self.classes is not None and not is_same(session.user, user):
            check_visits(self.classes.broker.connection_limits, user)
            self.classes.leave(session)  # As a guest of the broker it was somebody else.
        self.limited.enter(session, user)
        session.user, session.grants = user, self.gate.grants(user)
        session.rights = self.gate.guest_rights(user)
        responses = session.grants.responses if session.grants else None
        session.replies = Replies(responses, lambda: self.now) if responses else None
        if user is not None:
            session.has_said_connect = True
        session.is_connected = True

    # Publishing ----------------------------------------------------------------------------------

    def _is_plain_run(self, session: NatsSession, event: UniformBatch) -> bool:
        """Whether nothing is to be said or judged of each message."""
        head, options = event.first_message, session.options
        return not (
            options.verbose
            or (options.pedantic and not subjects.is_literal(head.subject))
            or (session.grants and not session.grants.publishing.one(head.subject))
            or (head.reply and (options.no_responders or subjects.is_reserved_reply(head.reply)))
        )

    def _is_plain_mix(self, session: NatsSession, event: MixedBatch) -> bool:
        """The same."""
        return not (
            session.options.verbose
            or session.options.pedantic
            or (session.grants and not session.grants.publishing.of(event.subject_numbers).all())
            or self.routes.is_scattered(event.subject_numbers)
        )

    def _publish_each(self, session: NatsSession, event: UniformBatch | MixedBatch) -> None:
        """One by one. Where each leads has been looked up for all, and holds until that changes."""
        routes, found = self.routes, None
        generation = routes.generation
        if isinstance(event, MixedBatch):
            found = routes.each(event.subject_numbers)
        for at, message in enumerate(iter_messages(event, routes.table.names)):
            if found is not None and routes.generation != generation:
                found = None
            self._publish(session, message, None if found is None else found[at])

    def _publish(self, session: NatsSession, message: Pub, sinks: Sinks | None = None) -> None:
        """`sinks` are where it leads, if that is known."""
        session.in_messages += 1
        session.in_bytes += len(message.body)
        if session.options.pedantic and not subjects.is_literal(message.subject):
            session.send(error_line("Invalid Publish Subject"))
        if session.grants and not self._may_publish(session, message.subject):
            self._deny(session, f"Publish to {subjects.quote(message.subject)}")
            return
        if message.reply and subjects.is_reserved_reply(message.reply):
            self._deny(session, f"Publish with Reply of {subjects.quote(message.reply)}")
            return
        self._ok(session)
        taken = False
        if sinks is None:
            sinks = self.routes.of(message.subject)
        self._made += EVENT_BYTES + len(sinks) * (TAKER_BYTES + len(message.body))
        for sink in sinks:
            taken |= sink.one(message, session)
        if message.reply and not taken and session.options.no_responders:
            self._say_nobody(session, message)

    def _may_publish(self, session: NatsSession, subject: bytes) -> bool:
        assert session.grants is not None
        return session.grants.publishing.one(subject) or (
            session.replies is not None and session.replies.may_answer(subject)
        )

    def _deny(self, session: NatsSession, what: str) -> None:
        self.denied += 1
        session.send(error_line(f"Permissions Violation for {what}"))

    def _publish_run(self, session: NatsSession, event: UniformBatch) -> None:
        session.in_messages += event.count
        session.in_bytes += event.count * len(event.first_message.body)
        sinks = self.routes.of(event.first_message.subject)
        self._made += len(sinks) * TAKER_BYTES
        for sink in sinks:
            sink.many(event, None, session)
        self._write(event)

    def _publish_mix(self, session: NatsSession, event: MixedBatch) -> None:
        session.in_messages += event.count
        session.in_bytes += int((event.bounds[1:] - event.body_starts).sum()) - 2 * event.count
        parts: dict[Sink, list[Indexes]] = {}
        for sinks, rows in self.routes.split(event.subject_numbers):
            self._made += len(sinks) * TAKER_BYTES
            for sink in sinks:
                if sink.is_ordered and rows is not None:
                    parts.setdefault(sink, []).append(rows)
                else:
                    sink.many(event, rows, session)
        for sink, those in parts.items():
            sink.many(event, np.sort(np.concatenate(those)), session)
        self._write(event)

    def deliver(self, messages: Pub | UniformBatch | MixedBatch) -> None:
        """Send what no client of this door publishes to whoever has subscribed to its subject. A
        mix has its own names."""
        if isinstance(messages, Pub):
            for sink in self.routes.of(messages.subject):
                sink.one(messages, None)
        elif self._gathering:  # Behind another batch.
            for message in iter_messages(messages):
                self.deliver(message)
        else:
            for sink, rows in self.routes.takers(messages):
                sink.many(messages, rows, None)
            self._write(messages)

    def _weigh(self, made: int) -> None:
        """What is looked at was as much work as this output is."""
        self._made += made

    def _write(self, messages: UniformBatch | MixedBatch) -> None:
        """Have those sessions write for which something was gathered."""
        written: Written = {}
        for session in self._gathering:
            self._made += session.write(messages, written)
        self._gathering.clear()

    def _say_nobody(self, session: NatsSession, message: Pub) -> None:
        """Tell a requester that nobody is there to answer, where it waits for the answer. It does
        not count as a message there."""
        answer = encode.no_responders_message(message)
        for sink in self.routes.of(message.reply):
            if isinstance(sink, Subscription) and sink.session is session and not sink.is_over:
                session.send(encode.encode_message(answer, sink.sid, headers=True))
                return

    # Subscribing ---------------------------------------------------------------------------------

    def _subscribe(self, session: NatsSession, event: Sub) -> None:
        self._made += SUBSCRIPTION_BYTES
        limits, grants = self.settings.limits, session.grants
        asks_class = self.classes is not None and self.classes.are_asked_for(event.subject)
        judges = None if asks_class else grants  # Of a class it is judged what it is.
        if judges and not judges.may_subscribe(event.subject, event.queue):
            queue = f" using queue {subjects.quote(event.queue)}" if event.queue else ""
            self._deny(session, f"Subscription to {subjects.quote(event.subject)}{queue}")
            return
        if limits.max_subs and len(session.subscriptions) >= limits.max_subs:
            session.send(_TOO_MANY)
            return
        if event.sid not in session.subscriptions:
            if not subjects.is_legal(event.subject):
                session.send(error_line("Invalid Subject"))
                return
            if subjects.is_too_deep(event.subject):
                what = f"Subscription to {subjects.quote(event.subject)}, too many tokens"
                self._deny(session, what)
                return
            if asks_class:
                assert self.classes is not None
                acked = self.classes.subscribe(session, event)
                if acked is None:
                    return
                session.subscriptions[event.sid] = acked
            else:
                denied = grants.filter(event.subject, event.queue) if grants else None
                subscription = Subscription(session, event.subject, event.queue, event.sid, denied)
                if not self.routes.subscribe(subscription):
                    session.send(_TOO_MANY)
                    return
                session.subscriptions[event.sid] = subscription
        self._ok(session)

    def _unsubscribe(self, session: NatsSession, event: Unsub) -> None:
        self._made += SUBSCRIPTION_BYTES
        subscription = session.subscriptions.get(event.sid)
        if subscription is not None:
            subscription.most = event.max_messages
            if event.max_messages <= subscription.delivered:
                self._end(subscription)
        self._ok(session)

    def _end(self, subscription: Subscription) -> None:
        """A subscription is no more."""
        if subscription.session.subscriptions.pop(subscription.sid, None) is None:
            return
        if isinstance(subscription, AckedSubscription):
            assert self.classes is not None
            self.classes.unsubscribe(subscription)
        else:
            self.routes.unsubscribe(subscription)

    def _drop_all(self, session: NatsSession) -> None:
        """All that a client has subscribed to ends. Where that is much it is forgotten little by
        little."""
        subscriptions = list(session.subscriptions.values())
        later = len(subscriptions) > DROPPED_AT_ONCE
        for subscription in subscriptions:
            if later and not isinstance(subscription, AckedSubscription):
                self.routes.abandon(subscription)
            else:
                self._end(subscription)
        session.subscriptions.clear()


def adopt(front: Front, settings: NatsSettings) -> None:
    """Have a front behave like this from now on."""
    before, now = front.gate.auth, settings.auth
    bus = front.classes.broker.settings.limits if front.classes is not None else Limits()
    front.settings = settings
    front.pace.adopt(settings.limits, total=bus.total_pending_bytes)
    front.routes.interest.limit = limit_of(bus)
    if before == now:
        return
    front.gate = front.gate.with_auth(now)
    for session in list(front.sessions.values()):
        if not session.is_cut and session.is_connected and not _may_stay(session, before, now):
            front.cut(session, violation("its user is not as it was"))


def _may_stay(session: NatsSession, before: NatsAuth, now: NatsAuth) -> bool:
    user = session.user
    if user is not None and user.shared is not None:
        name = user.name
        return (
            now.shared is not None
            and now.shared.still_has(user.shared)
            and before.shared_permissions.get(name) == now.shared_permissions.get(name)
        )
    if user is not None:
        return user in now.users and before.permissions(user) == now.permissions(user)
    return not now.required or (bool(now.token) and now.token == before.token)
