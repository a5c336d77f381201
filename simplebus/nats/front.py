"""The NATS door: who publishes, who is sent what.

Rule 1: everything happens in `receive`, `close`, `tick` and in taking bytes from an outbox. No
socket, no clock, no thread; a driver brings bytes, beats and clock readings, and sends what
outboxes show.

    bytes ─► Parser ─► events ─► Front ─► Routes ─► sinks ─► Outbox ─► bytes
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from simplebus.core.errors import Reason
from simplebus.core.receive import ReceiveBuffer
from simplebus.nats import connect, subjects
from simplebus.nats.connect import Info
from simplebus.nats.errors import NatsError, error_line
from simplebus.nats.events import (
    Connect,
    Event,
    Mix,
    Ping,
    Pong,
    Pub,
    Run,
    Sub,
    Unsub,
    singles,
)
from simplebus.nats.parser import Parser
from simplebus.nats.routes import Routes
from simplebus.nats.session import NatsSession, Written
from simplebus.nats.settings import NatsSettings
from simplebus.nats.subscription import Subscription

_OK = b"+OK\r\n"
_PONG = b"PONG\r\n"


class Front:
    """See the module's law for how it is driven."""

    def __init__(
        self,
        settings: NatsSettings | None = None,
        *,
        server_id: str = "",
        seed: int = 0,
    ) -> None:
        """`seed` decides which members of queue groups are chosen."""
        self.settings = settings or NatsSettings()
        self.server_id = server_id
        self.now = 0.0
        """The driver sets it before it brings anything."""
        self.sessions: dict[int, NatsSession] = {}
        """By client id."""
        self.routes = Routes(np.random.default_rng(seed))
        self.refused: Counter[Reason] = Counter()
        self._next_client_id = 1
        self._ready: dict[NatsSession, None] = {}
        self._made = 0
        """Bytes that were written of the read that is looked at."""
        self._cut: list[tuple[NatsSession, NatsError]] = []

    # Sessions ------------------------------------------------------------------------------------

    def open(self, peer: str, *, ip: str = "", host: str = "", port: int = 0) -> NatsSession:
        """A client has connected to this host and port, from this address."""
        settings, client_id = self.settings, self._next_client_id
        self._next_client_id += 1
        session = NatsSession(
            client_id,
            Parser(settings.limits, self.routes.table),
            peer=peer,
            pending_max=settings.limits.max_pending,
            ready=self._make_ready,
            end=self._end,
            overflow=self._end_slow,
        )
        self.sessions[client_id] = session
        info = Info(
            server_id=self.server_id,
            server_name=settings.server_name,
            version=connect.PROTOCOL_VERSION,
            proto=1,
            go="none",
            host=host,
            port=port,
            headers=True,
            max_payload=settings.limits.max_payload,
            client_id=client_id,
            client_ip=ip,
            tls_required=settings.tls_required,
            tls_available=settings.tls_available,
            tls_verify=settings.tls_verify,
        )
        session.send(info.line())
        return session

    def receive(self, session: NatsSession, buffer: ReceiveBuffer, count: int) -> None:
        """`count` fresh bytes of this session are in the buffer.

        Raises NatsError after everything before the offence was applied; `fail` and close the
        session then.
        """
        assert not session.closed
        self._made = 0
        for event in session.parser.receive(buffer, count):
            self._apply(session, event)
            if session.is_cut:
                break
        session.took(count, self._made)

    def fail(self, session: NatsSession, error: NatsError) -> None:
        """A session is to be closed for this reason: tell its client, if there is a word."""
        if not session.closed and error.line:
            session.outbox.put(error.line)

    def close(self, session: NatsSession) -> None:
        """The client is gone, and all that it has subscribed to."""
        if session.closed:
            return
        session.closed = True
        del self.sessions[session.client_id]
        self._drop_all(session)
        self._ready.pop(session, None)

    def take_ready(self) -> list[NatsSession]:
        """Sessions whose outbox has something new. Each is named once until taken."""
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def take_cut(self) -> list[tuple[NatsSession, NatsError]]:
        """Sessions to be cut off, and why."""
        cut, self._cut = self._cut, []
        return cut

    def tick(self) -> None:
        """One beat: who is overdue?"""

    def cut(self, session: NatsSession, error: NatsError) -> None:
        """Have a session closed, as soon as nothing else is under way."""
        session.is_cut = True
        self._cut.append((session, error))

    def _end_slow(self, session: NatsSession) -> None:
        """More waits for a client than may: it is cut off without a word, and with what waits."""
        most = self.settings.limits.max_pending
        error = NatsError(
            Reason.SLOW_CONSUMER,
            f"more than the {most} bytes wait for it that may",
            closed="Slow Consumer (Pending Bytes)",
        )
        session.forget_all()
        self.cut(session, error)

    def _make_ready(self, session: NatsSession) -> None:
        self._ready[session] = None

    # Events --------------------------------------------------------------------------------------

    def _apply(self, session: NatsSession, event: Event) -> None:
        match event:
            case Pub():
                self._publish(session, event)
            case Run() | Mix():
                if session.options.verbose or session.options.pedantic:
                    for message in singles(event, self.routes.table.names):
                        self._publish(session, message)
                elif isinstance(event, Run):
                    self._publish_run(session, event)
                else:
                    self._publish_mix(session, event)
            case Ping():
                session.send(_PONG)
                session.is_greeted = True
            case Pong():
                pass
            case Sub():
                self._subscribe(session, event)
            case Unsub():
                self._unsubscribe(session, event)
            case Connect():
                self._connect(session, event)

    def _ok(self, session: NatsSession) -> None:
        if session.options.verbose:
            session.send(_OK)

    def _connect(self, session: NatsSession, event: Connect) -> None:
        session.options = connect.options(event.options)
        session.parser.headers = session.options.headers
        self._drop_all(session)
        session.is_connected = True
        self._ok(session)

    # Publishing ----------------------------------------------------------------------------------

    def _publish(self, session: NatsSession, message: Pub) -> None:
        session.in_messages += 1
        session.in_bytes += len(message.body)
        if session.options.pedantic and not subjects.is_literal(message.subject):
            session.send(error_line("Invalid Publish Subject"))
        self._ok(session)
        taken = False
        sinks = self.routes.of(message.subject)
        self._made += len(sinks) * len(message.body)
        for sink in sinks:
            taken |= sink.one(message, session)
        if message.reply and not taken and session.options.no_responders:
            self._say_nobody(session, message)

    def _publish_run(self, session: NatsSession, event: Run) -> None:
        session.in_messages += event.count
        session.in_bytes += event.count * len(event.head.body)
        taken = False
        for sink in self.routes.of(event.head.subject):
            taken |= sink.many(event, None, session)
        self._write(event)
        if event.head.reply and not taken and session.options.no_responders:
            for _ in range(event.count):
                self._say_nobody(session, event.head)

    def _publish_mix(self, session: NatsSession, event: Mix) -> None:
        session.in_messages += event.count
        session.in_bytes += int((event.bounds[1:] - event.bodies).sum()) - 2 * event.count
        for sinks, rows in self.routes.split(event.subjects):
            for sink in sinks:
                sink.many(event, rows, session)
        self._write(event)

    def _write(self, messages: Run | Mix) -> None:
        """Have those sessions write for which something was gathered."""
        written: Written = {}
        for session in self._ready:
            self._made += session.write(messages, self.routes.table.names, written)

    def _say_nobody(self, session: NatsSession, message: Pub) -> None:
        """Tell a requester that nobody is there to answer."""
        status = b"NATS/1.0 503\r\nNats-Subject: " + message.subject + b"\r\n\r\n"
        size = b"%d" % len(status)
        answer = Pub(message.reply, b"", size, size, len(status), memoryview(status))
        for sink in self.routes.of(message.reply):
            if isinstance(sink, Subscription) and sink.session is session:
                sink.one(answer, None)
                return

    # Subscribing ---------------------------------------------------------------------------------

    def _subscribe(self, session: NatsSession, event: Sub) -> None:
        limits = self.settings.limits
        if not subjects.is_legal(event.subject):
            session.send(error_line("Invalid Subject"))
            return
        if event.sid not in session.subscriptions:
            if limits.max_subs and len(session.subscriptions) >= limits.max_subs:
                session.send(error_line("maximum subscriptions exceeded"))
                return
            subscription = Subscription(session, event.subject, event.queue, event.sid)
            session.subscriptions[event.sid] = subscription
            self.routes.subscribe(subscription)
        self._ok(session)

    def _unsubscribe(self, session: NatsSession, event: Unsub) -> None:
        subscription = session.subscriptions.get(event.sid)
        if subscription is not None:
            subscription.most = event.most
            if event.most <= subscription.delivered:
                self._end(subscription)
        self._ok(session)

    def _end(self, subscription: Subscription) -> None:
        """A subscription is no more."""
        del subscription.session.subscriptions[subscription.sid]
        self.routes.unsubscribe(subscription)

    def _drop_all(self, session: NatsSession) -> None:
        for subscription in list(session.subscriptions.values()):
            self._end(subscription)
