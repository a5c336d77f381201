"""Broker: the facade of the core, which a driver calls.

State changes only in `receive`, `apply_event`, `close_session`, `tick`, `run_due_wakeups`, and when
bytes are taken from an outbox. The driver moves bytes between sockets and sessions, sets the clock,
calls `tick`, and sends what outboxes contain.

    publish    bytes ─► Session ─► events ─► Broker ─► Store ─► Ring
    notify     Store ─► Outbox.enqueue(subscription) ─► session is listed by `end_turn`
    send       bytes ◄─ Outbox.peek ◄─ Subscription ◄─ Ring, when the socket can send

The outbox pulls frames from its subscriptions. They are not pushed into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import msgspec

from simplebus.core.authorization.durable_owners import DurableOwners
from simplebus.core.authorization.session_permissions import check_right, mask_unknown_class
from simplebus.core.broker.acknowledge import AckHandler
from simplebus.core.broker.fetch import FetchHandler, PendingPurge
from simplebus.core.broker.inquire import InquiryHandler
from simplebus.core.broker.subscription_manager import SubscriptionManager
from simplebus.core.clock import BrokerClock
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.group.group import BaseGroup
from simplebus.core.limits import (
    ACK_READ_DELAY_MESSAGES_MAX,
    CREATED_CLASSES_PER_TURN,
    MESSAGE_ID_MASK,
    MESSAGES_MAX,
    RECENT_PUBLISH_TICKS,
    TICKED_CLASSES_PER_TURN,
    TICKED_SESSIONS_PER_TURN,
)
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.producer_state import ProducerStates
from simplebus.core.protocol import frames
from simplebus.core.protocol.events import (
    AckedRange,
    AckedRanges,
    ConnectRequested,
    Event,
    FetchRequested,
    FrameRefused,
    InquireRequested,
    NackReceived,
    PublishedBatch,
    PublishedFrame,
    PurgeRequested,
    SubscribeRequested,
    TerminateReceived,
    UnsubscribeRequested,
    Version1Connected,
    Version1Subscribed,
    WorkingReceived,
)
from simplebus.core.protocol.inquiry import AcksInfo, AcksInquiry
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.protocol.requests import ErrorReply, SubscribeRequest
from simplebus.core.session.admission import ConnectionLimits, admit_session
from simplebus.core.session.pending_limits import (
    UncountedPendingBytes,
    check_session_pending,
    select_sessions_to_close,
)
from simplebus.core.session.rate_limits import SessionRateLimits
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2Decoder
from simplebus.core.settings import FullPolicy, Settings
from simplebus.core.statistics import BrokerStatistics
from simplebus.core.steps import drain_list
from simplebus.core.store.idle_classes import IdleClasses
from simplebus.core.store.publisher_confirms import PublisherConfirms
from simplebus.core.store.quotas import Quotas
from simplebus.core.store.refusal_sender import RefusalSender
from simplebus.core.store.store import Store
from simplebus.core.subscription.delayed_wakeups import DelayedWakeups
from simplebus.core.subscription.position import Position
from simplebus.core.users.permissions import AdminRight, Grants
from simplebus.core.users.user_directory import UserDirectory
from simplebus.core.users.users import User, Users

__all__ = ["Broker", "FullPolicy", "MessageClass", "Settings"]

# The Connect reply with this id would contain the delimiter and look like an empty frame.
_UNSENDABLE_SESSION_ID = int.from_bytes(frames.DELIMITER, "little")

RequestEvent = (
    SubscribeRequested | UnsubscribeRequested | FetchRequested | PurgeRequested | InquireRequested
)
"""Events that are answered by one frame of their type, or by an Error frame that names the type."""

_FRAME_TYPE_BY_REQUEST: dict[type[RequestEvent], int] = {
    SubscribeRequested: frames.SUBSCRIBE,
    UnsubscribeRequested: frames.UNSUBSCRIBE,
    FetchRequested: frames.FETCH,
    PurgeRequested: frames.PURGE,
    InquireRequested: frames.INQUIRE,
}


_SLOW_EVENTS = (
    *(AckedRanges, NackReceived, WorkingReceived, TerminateReceived),
    *(SubscribeRequested, ConnectRequested, Version1Connected),
)
"""Events that take long in large numbers; one read contains only some of them."""
_NEW_CHANNELS_PER_SLOW_EVENT = 64


class DriverActions(NamedTuple):
    """Actions of the driver at the end of a turn, in this order."""

    flush: list[int]
    """Ids of the sessions whose outboxes have something new."""
    close: list[tuple[Session, RemoteProtocolError]]
    """Sessions to close, each with the reason."""
    resume: list[Session]
    """Sessions to read from again: none of their messages wait for space."""


NO_ACTIONS = DriverActions([], [], [])


class PublishResult(NamedTuple):
    """Result of `Broker.publish_or_refuse`."""

    sequence: int
    """Sequence of the message, or of the earlier message with its id."""
    log_position: int
    """The message is durable when `Broker.is_durable` returns True for this position."""
    is_duplicate: bool
    """True if the message was not stored, because an earlier message has its id."""


class Broker:
    """Message broker without I/O."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        identity: str = "",
        run_id: str = "",
        commit_log: CommitLog | None = None,
    ) -> None:
        """Create a broker without classes.

        Args:
            settings: Settings; the defaults if None.
            identity: Id of this bus, which stays the same across restarts; empty if it is not
                unique.
            run_id: Id of this run of the bus; `identity` by default.
            commit_log: Receives everything that must outlive the process; None without a journal.

        Raises:
            ValueError: if a class may spill and there is no commit log.
        """
        self.settings = settings or Settings()
        if self.settings.has_spilling_class and commit_log is None:
            raise ValueError(
                "the policy spill stores messages on disk and needs a journal; set data_dir or "
                "use another policy"
            )
        self.user_directory = UserDirectory()
        self.clock = BrokerClock()
        """The driver sets `now` before each call."""
        self.sessions: dict[int, Session] = {}
        self._ready_session_ids: dict[int, None] = {}
        """Sessions that the driver must flush. Outboxes enter themselves."""
        self.rate_limits = SessionRateLimits(self.clock)
        self.connection_limits = ConnectionLimits(self.sessions, self.rate_limits)
        self.delayed_wakeups = DelayedWakeups(self.clock)
        producer_states = ProducerStates()
        self._refusal_sender = RefusalSender(commit_log, producer_states)
        self._send_refusal = self._refusal_sender.send_refusal
        self.refusal_counts = self._refusal_sender.refusal_counts
        self.store = Store(
            self.settings, self.clock, self._refusal_sender, self.delayed_wakeups, commit_log
        )
        self.commit_log = commit_log
        self.publisher_confirms = PublisherConfirms(
            commit_log,
            self.refusal_counts,
            self.clock,
        )
        self._confirm_stored = self.publisher_confirms.confirm_stored
        self.on_journal_advanced: Callable[[], None] | None = None
        """Called when more is durable, if set: another listener confirms messages by itself."""
        self._closing_sessions: list[tuple[Session, RemoteProtocolError]] = []
        self.subscription_manager = SubscriptionManager(
            self.store,
            identity=identity,
            run_id=run_id or identity,
            delayed_wakeups=self.delayed_wakeups,
            producer_states=producer_states,
            durable_owners=DurableOwners(
                self.user_directory, self.sessions, self._closing_sessions
            ),
            quotas=Quotas(self.user_directory, self.store),
            publisher_confirms=self.publisher_confirms,
        )
        self.idle_classes = IdleClasses(self.store)
        self.inquiry_handler = InquiryHandler(
            self.store, self.sessions, self.refusal_counts, identity=identity
        )
        self._ack_handler = AckHandler(self.store, self.refusal_counts)
        self.fetch_handler = FetchHandler(self.store)
        self.classes = self.store.classes
        self.budget = self.store.budget
        self.spill_manager = self.store.spill_manager
        self._changed_class_ids = self.store.position_changes.class_ids
        self._progressed_sessions = self.store.publish_queue.progressed_sessions
        self._next_session_id = 0
        self._resumed_sessions: dict[Session, None] = {}
        self._uncounted_pending = UncountedPendingBytes()
        self._pending_check: Iterator[list[tuple[Session, RemoteProtocolError]]] | None = None

    @property
    def tick_number(self) -> int:
        """Ticks of the ack timer so far."""
        return self.clock.tick

    @property
    def users(self) -> Users | None:
        """Users that may connect; None without authentication: everybody may do everything."""
        return self.user_directory.users

    # Sessions ------------------------------------------------------------------------------------

    def open_session(self, peer: str = "", *, address: str = "") -> Session:
        """Create the session of a new connection.

        Args:
            peer: Description of the peer for logs.
            address: Address of the peer, for rate limits per address.
        """
        session_id = self._next_session_id
        while session_id in self.sessions or session_id == _UNSENDABLE_SESSION_ID:
            session_id = (session_id + 1) & MESSAGE_ID_MASK
        self._next_session_id = (session_id + 1) & MESSAGE_ID_MASK
        session = Session(
            session_id,
            frame_bytes_max=self.settings.limits.frame_bytes,
            known_classes=self.classes,
            ready=self._ready_session_ids,
            peer=peer or f"session {session_id}",
            address=address,
            token_buckets=self.rate_limits.token_buckets_for(None, address),
            must_authenticate=self.users is not None,
        )
        self.sessions[session.session_id] = session
        return session

    def open_local_session(
        self,
        peer: str = "",
        *,
        user: str = "",
        grants: Grants | None = None,
        address: str = "",
        piece_messages_max: int = MESSAGES_MAX,
    ) -> Session:
        """Create a session for a client of another listener, which decodes its bytes and
        authenticated it.

        The listener passes events to `apply_event`, and reads the outbox as for a version 2
        session, in pieces of at most `piece_messages_max` messages.
        """
        session = self.open_session(peer)
        session.mark_local(user, grants, address, piece_messages_max=piece_messages_max)
        return session

    def open_internal_session(self, peer: str) -> Session:
        """Create a session for a part of the server, which has all permissions."""
        session = self.open_session(peer)
        session.mark_internal(frame_bytes_max=self.settings.limits.frame_bytes)
        return session

    def open_user_session(self, peer: str, user: User | None) -> Session:
        """Create a session for a user that another listener has authenticated.

        The session uses the binary protocol. `user` is None on a bus without users.
        """
        session = self.open_session(peer)
        session.authenticate(
            "" if user is None else user.name,
            None if user is None or self.users is None else self.users.get_grants(user),
            self.rate_limits.token_buckets_for(user, ""),
            frame_bytes_max=self.settings.limits.frame_bytes,
        )
        return session

    def apply_event(self, session: Session, event: Event) -> None:
        """Apply an event that another listener has decoded.

        Raises:
            RemoteProtocolError: (pending_limit) if too much waits for space; close the session
                then.
        """
        self._dispatch_event(session, event)
        check_session_pending(session, self.settings.limits)

    def publish_encoded(
        self, session: Session, class_id: int, channel: str, frame: memoryview
    ) -> None:
        """Publish a message that another listener has encoded.

        Args:
            session: A local session.
            class_id: Class of the message.
            channel: Channel of the message.
            frame: An Envelope frame with this channel and without times.

        Raises:
            RemoteProtocolError: As `apply_event`.
        """
        is_stored = self.store.publish_one(session, class_id, frame, channel)
        session.record_published_one(self.clock.tick)
        if not is_stored:
            check_session_pending(session, self.settings.limits)

    def publish_or_refuse(
        self,
        session: Session,
        class_id: int,
        channel: str,
        frame: memoryview,
        message_id: bytes = b"",
    ) -> PublishResult:
        """Publish a message that another listener has encoded, at once or not at all.

        Args:
            session: A local session.
            class_id: Class of the message.
            channel: Channel of the message.
            frame: An Envelope frame with this channel and without times.
            message_id: Id for deduplication; empty for none.

        Raises:
            RemoteProtocolError: as `Store.publish_or_refuse`: the message is not stored, and the
                session stays open.
        """
        message_ids, now = self.store.message_ids, self.clock.now
        sequence = message_ids.find(class_id, message_id, now) if message_id else None
        is_duplicate = sequence is not None
        if sequence is None:
            sequence = self.store.publish_or_refuse(session, class_id, frame, channel)
            if message_id:
                message_ids.add(class_id, message_id, sequence, now)
        else:
            self.refusal_counts[Reason.DUPLICATE] += 1
        session.record_published_one(self.clock.tick)
        log_position = 0 if self.commit_log is None else self.commit_log.log_position
        return PublishResult(sequence, log_position, is_duplicate)

    def is_durable(self, log_position: int, class_id: int | None = None) -> bool:
        """Return True if the messages up to a log position are as durable as confirms promise.

        With `class_id`, only messages of this class count.
        """
        commit_log = self.commit_log
        if commit_log is None or commit_log.is_durable(log_position):
            return True
        positions = {} if class_id is None else {class_id: log_position}
        return bool(positions) and commit_log.is_producer_durable(log_position, positions)

    def receive(self, session: Session, buffer: ReceiveBuffer, count: int) -> None:
        """Process bytes of a session.

        Args:
            session: An open session.
            buffer: The receive buffer.
            count: Number of new bytes in the buffer.

        Raises:
            RemoteProtocolError: if the peer broke the protocol. Everything before was applied; call
                `send_fatal_error` and close the session.
        """
        assert not session.is_closed
        handled_bytes = 0
        try:
            for event, end in session.receive_few(buffer, count):
                try:
                    self._dispatch_event(session, event)
                except BaseException:
                    session.expect_again(event)
                    raise
                handled_bytes = end
            if handled_bytes < count:
                self._receive_batches(session, buffer, count, handled_bytes)
        finally:
            if session.has_confirms:
                self._confirm_stored(session)
        if (
            session.parked_messages
            or session.receiver.tail
            or session.unprocessed
            or session.outbox.pending_bytes > self.settings.limits.pending_bytes
        ):
            check_session_pending(session, self.settings.limits)

    def _receive_batches(
        self, session: Session, buffer: ReceiveBuffer, count: int, handled_bytes: int
    ) -> None:
        """Process the bytes of a read behind the first `handled_bytes` in batches of frames."""
        limit = self.settings.limits.pending_bytes
        slow_event_count = 0.0
        channel_count = self.store.new_channel_count
        for event in session.receive(buffer, count, skipped_bytes=handled_bytes):
            if isinstance(event, _SLOW_EVENTS):
                slow_event_count += event.slow_event_count
            if not session.is_authenticated:
                admit_session(
                    self.users,
                    session,
                    event,
                    self.connection_limits,
                    self.refusal_counts,
                    frame_bytes_max=self.settings.limits.frame_bytes,
                )
            while session.is_request_pending:  # Not recognized as a long request.
                self.continue_request(session)
            self._dispatch_event(session, event)
            if session.outbox.pending_bytes > limit:
                break  # A small request can produce a large reply.
        channel_count = self.store.new_channel_count - channel_count
        slow_event_count += channel_count / _NEW_CHANNELS_PER_SLOW_EVENT
        session.adapt_read_size(count, slow_event_count)
        unhandled_count = (
            count if session.parked_messages else min(count, len(session.receiver.tail))
        )
        if unhandled_count:
            self._count_pending(unhandled_count)

    def _count_pending(self, size_bytes: int) -> None:
        """Count held bytes, and close sessions if all of them together exceed the total limit.

        With many sessions, each call continues the check of the total by some of them.
        """
        limit = self.settings.limits.total_pending_bytes
        if self._uncounted_pending.add(size_bytes, limit) and self._pending_check is None:
            self._pending_check = select_sessions_to_close(self.sessions.values(), limit)
        if self._pending_check is not None:
            closing = next(self._pending_check, None)
            if closing is None:
                self._pending_check = None
            else:
                self._closing_sessions += closing

    def send_fatal_error(self, session: Session, error: RemoteProtocolError) -> None:
        """Tell a version 2 peer why its session is about to be closed."""
        if session.has_confirms and not session.is_closed:
            session.outbox.release_confirm()  # The Error is the last frame.
            reply = ErrorReply(code=error.reason, message=error.sentence, fatal=True)
            session.outbox.queue_reply(frames.encode(frames.ERROR, content=reply.encode()))

    def end_some_subscriptions(self, session: Session) -> bool:
        """End some subscriptions of a session whose peer is gone, before `close_session`.

        Returns:
            True if the session has more subscriptions, which the next call ends.
        """
        return not session.is_closed and self.subscription_manager.end_some_subscriptions(session)

    def close_session(self, session: Session) -> None:
        """Close a session whose peer is gone.

        Its published messages stay. Its unacknowledged messages go to other or later subscriptions
        of the class.
        """
        if session.is_closed:
            return
        del self.sessions[session.session_id]
        if session.version2 is not None:
            self._release_producer(session, session.version2)
        self.subscription_manager.close_session(session)  # Parked messages may get the space.
        session.close()
        self.store.publish_queue.orphan(session)
        self._ready_session_ids.pop(session.session_id, None)

    def _release_producer(self, session: Session, decoder: Version2Decoder) -> None:
        """Record which messages of a publisher are stored, once. It sends the others again."""
        if not decoder.detach_producer():
            return
        producer, producer_states = decoder.producer, self.subscription_manager.producer_states
        if producer.key:
            first_number = session.confirmed_number
            ahead = decoder.build_unconfirmed_range(
                first_number, [batch for _, batch in session.parked_messages]
            )
            producer_states.set_progress(producer, first_number, ahead)
        self.store.publish_queue.discard(session)
        if producer.session_id == session.session_id:
            producer_states.mark_disconnected(producer, self.clock.now)

    @property
    def has_position_changes(self) -> bool:
        """True if `end_turn` has something to do, even if no bytes were taken from an outbox."""
        return bool(self._changed_class_ids)

    def end_turn(self) -> DriverActions:
        """Finish the work of the calls since the previous turn. Returns the actions of the driver.

        Trims classes whose positions have moved, advances spill readers, and confirms messages that
        were stored late. The driver calls it again after it has flushed, until nothing is left.
        """
        if self._changed_class_ids:
            self.apply_position_changes()
        if self.spill_manager is not None and self.spill_manager.readers:
            self.spill_manager.advance_readers()
        if self._progressed_sessions:
            self._confirm_progressed()
        if not (self._ready_session_ids or self._closing_sessions or self._resumed_sessions):
            return NO_ACTIONS
        resumed = self._pop_resumed_sessions() if self._resumed_sessions else []
        actions = DriverActions(
            list(self._ready_session_ids), self._closing_sessions.copy(), resumed
        )
        self._ready_session_ids.clear()
        self._closing_sessions.clear()
        return actions

    def _pop_resumed_sessions(self) -> list[Session]:
        """Return the sessions that can be read again since the last call."""
        resumed = [s for s in self._resumed_sessions if not (s.parked_messages or s.is_closed)]
        self._resumed_sessions.clear()
        return resumed

    def apply_position_changes(self) -> None:
        """Trim classes whose positions have moved, and end positions that exceed their limit."""
        while self._changed_class_ids:
            for position in self.store.apply_position_changes():
                self._end_slow_consumer(position)

    def has_other_ready_sessions(self, session_id: int) -> bool:
        """Return True if another session has something new to send."""
        return self.store.has_deferred_work or any(
            ready != session_id for ready in self._ready_session_ids
        )

    def _confirm_progressed(self) -> None:
        """Confirm messages that were stored late, and find the sessions that may be read again."""
        for session in self._progressed_sessions:
            if session.has_confirms:
                self._confirm_stored(session)
            if not session.parked_messages:
                self._resumed_sessions[session] = None
        self._progressed_sessions.clear()

    def mark_durable(self, batch_number: int, *, has_space: bool = True) -> None:
        """Record that write batches up to `batch_number` are durable.

        Args:
            batch_number: Number of the newest durable batch.
            has_space: False if the disk is full, so that no more messages are accepted.
        """
        commit_log = self.commit_log
        assert commit_log is not None
        commit_log.mark_durable(batch_number, has_space=has_space)
        self.publisher_confirms.journal_advanced()
        if self.on_journal_advanced is not None:
            self.on_journal_advanced()
        for cls in [
            cls for cls in self.store.publish_queue.blocked_classes if cls.spill is not None
        ]:
            self.store.publish_queue.retry(cls)  # Written messages can be evicted.
        if not commit_log.is_backlogged:
            for session in commit_log.paused_sessions:
                session.resume_after_journal()
                self._resumed_sessions[session] = None
            commit_log.paused_sessions.clear()

    def journal_failed(self, reason: Reason, detail: str) -> None:
        """Record that write batches cannot be written for now; `mark_durable` ends this state."""
        assert self.commit_log is not None
        if self.commit_log.write_error is None:
            self.publisher_confirms.journal_failed(reason, detail)
        self.commit_log.write_error = reason, detail

    def _end_taken_over_session(self, session: Session) -> Iterator[None]:
        """Close, in parts, a session whose program has connected again under the same name."""
        error = RemoteProtocolError(
            Reason.TAKEN_OVER, "this program has connected again under the same name"
        )
        decoder = session.version2
        assert decoder is not None
        while session.is_request_pending and not decoder.is_greeted:
            with suppress(RemoteProtocolError):  # Its Connect may be ending a former session, too.
                self.continue_request(session)
            yield
        self._closing_sessions.append((session, error))
        self._release_producer(session, decoder)
        while self.end_some_subscriptions(session):
            yield
        if not session.is_closed:  # The driver may have closed the session between parts.
            self.send_fatal_error(session, error)
            self.close_session(session)

    # Events --------------------------------------------------------------------------------------

    def _dispatch_event(self, session: Session, event: Event) -> None:
        match event:
            case PublishedFrame():
                self.store.publish_one(session, event.class_id, event.frame)
                session.record_published_one(self.clock.tick)
            case AckedRange():
                self._ack_handler.ack_range(
                    session, event.subscription_number, event.first, event.last
                )
            case PublishedBatch():
                if event.frames.count == 1:
                    self.store.publish_one(session, event.class_id, event.frames.data.data)
                else:
                    self.store.publish(session, event.class_id, event.frames, event.columns)
                session.record_published(self.clock.tick, event.frames.count)
            case AckedRanges():
                self._ack_handler.ack_ranges(session, event)
            case Version1Connected():
                self._start_request(
                    session, self.subscription_manager.connect_v1(session, event.class_ids)
                )
            case Version1Subscribed():
                self.subscription_manager.subscribe_v1(session, event.class_id)
            case ConnectRequested():
                self._start_request(session, self._handle_greeting(session, event))
            case NackReceived() | WorkingReceived() | TerminateReceived():
                parts = self._ack_handler.handle_nack_or_working(session, event)
                self._start_request(session, parts)
            case SubscribeRequested() | UnsubscribeRequested() | FetchRequested():
                self._handle_request(session, event)
            case PurgeRequested() | InquireRequested():
                self._handle_request(session, event)
            case FrameRefused():
                refusal = mask_unknown_class(session, event)
                if refusal.reason is Reason.UNKNOWN_CLASS and self.settings.declare_only:
                    hint = ", and --declare-only is on"
                    refusal = replace(refusal, message=f"{refusal.message}{hint}")
                self._send_refusal(session, refusal)
                if event.published_count:
                    session.record_published(self.clock.tick, event.published_count)

    def _start_request(self, session: Session, parts: Iterator[None]) -> None:
        """Process the first part of a request. `continue_request` processes the others."""
        session.set_pending_request(parts)
        self.continue_request(session)
        while session.is_request_pending and not session.can_split_reads:
            self.continue_request(session)

    def continue_request(self, session: Session) -> None:
        """Process the next part of the request of a session for which `is_request_pending`.

        The driver calls it again later while that is so, even if the peer is gone or the session
        was closed, and calls `receive` only afterwards.

        Raises:
            RemoteProtocolError: As `receive`.
        """
        parts = session.pending_request
        session.set_pending_request(None)
        for _ in parts or ():
            session.set_pending_request(parts)
            return

    def _handle_greeting(self, session: Session, greeting: ConnectRequested) -> Iterator[None]:
        decoder = session.version2
        assert decoder is not None
        if len(greeting.body.classes) > CREATED_CLASSES_PER_TURN:
            yield  # Decoding it has taken long.
            if session.is_closed:
                return
        try:
            checked = yield from self.subscription_manager.check_connect(session, greeting)
            if checked is None:
                return
            claim = checked.claim
            if claim is not None and claim.former_session_id is not None:
                former = self.sessions[claim.former_session_id]
                yield from self._end_taken_over_session(former)
            yield from self.subscription_manager.connect_v2(session, greeting, checked)
        except RemoteProtocolError as error:
            if not decoder.is_greeted:
                raise
            self._send_refusal(
                session,
                FrameRefused(
                    error.reason, error.sentence, frames.CONNECT, refers_to=greeting.request_number
                ),
            )

    def _handle_request(self, session: Session, request: RequestEvent) -> None:
        try:
            match request:
                case SubscribeRequested(
                    body=SubscribeRequest(start="last_values") | SubscribeRequest(seek=True)
                ):
                    self._start_request(session, self._subscribe_in_parts(session, request))
                case SubscribeRequested():
                    self.subscription_manager.subscribe_v2(session, request)
                case UnsubscribeRequested():
                    self._start_request(session, self._unsubscribe(session, request))
                case FetchRequested():
                    refuse = partial(self._refuse_request, session, request)
                    self.fetch_handler.fetch(session, request, refuse)
                case PurgeRequested() if self.fetch_handler.purge_if_remote(
                    session, request, partial(self._refuse_request, session, request)
                ):
                    pass
                case PurgeRequested():
                    last = self.fetch_handler.check_purge(session, request)
                    parts = self._purge_in_parts(session, request, last)
                    purge = PendingPurge(session, parts, self.delayed_wakeups, self.clock)
                    session.outbox.defer_reply(purge.try_reply)
                case InquireRequested(body=AcksInquiry()):
                    self._reply_when_acks_stored(session, request.request_number)
                case InquireRequested():
                    check_right(session, AdminRight.INQUIRE)
                    refuse = partial(self._refuse_request, session, request)
                    self.inquiry_handler.handle_inquiry(session, request, refuse)
        except RemoteProtocolError as error:
            self._refuse_request(session, request, error)

    def _unsubscribe(self, session: Session, request: UnsubscribeRequested) -> Iterator[None]:
        """End a subscription. Before that, append the dead letters of its position in parts, unless
        other members of a group stay.
        """
        while self.append_some_last_dead_letters(session, request.subscription_number):
            yield
        if session.is_closed:
            return
        try:
            self.subscription_manager.unsubscribe(session, request)
        except RemoteProtocolError as error:
            self._refuse_request(session, request, error)

    def has_last_dead_letters(self, session: Session, subscription_number: int) -> bool:
        """Return True if `append_some_last_dead_letters` has work to do."""
        subscription = session.subscriptions.get(subscription_number)
        return (
            subscription is not None
            and not subscription.has_other_members
            and self.store.has_dead_letters_to_append(subscription.position)
        )

    def append_some_last_dead_letters(self, session: Session, subscription_number: int) -> bool:
        """Append some dead letters of a subscription that will end. Does nothing if other members
        of its group stay.

        Returns:
            True if more dead letters are left, and there is space for them.
        """
        subscription = session.subscriptions.get(subscription_number)
        return (
            subscription is not None
            and not subscription.has_other_members
            and self.store.append_dead_letters_of(subscription.position)
        )

    def _subscribe_in_parts(self, session: Session, request: SubscribeRequested) -> Iterator[None]:
        """Subscribe to a class after work that is done in parts: finding its last values, and
        appending the dead letters of a position that is replaced.
        """
        cls = self.classes.get(request.class_id)
        if request.body.start == "last_values" and cls is not None and cls.spill is None:
            yield from cls.last_values.scan_in_parts()
        position = self.subscription_manager.find_replaced_position(request)
        while position is not None and self.store.append_dead_letters_of(position):
            yield
        if session.is_closed:
            return
        try:
            self.subscription_manager.subscribe_v2(session, request)
        except RemoteProtocolError as error:
            self._refuse_request(session, request, error)

    def request_progress(self) -> int:
        """Have the progress of all positions written with the next batches.

        Returns:
            The log position that is durable when all acks so far are stored; 0 if the promised
            durability does not require that.
        """
        commit_log = self.store.commit_log
        if commit_log is None or commit_log.is_remote or not commit_log.requires_durability:
            return 0
        return commit_log.append_progress_request(len(self.store.position_changes.progressed))

    def _reply_when_acks_stored(self, session: Session, request_number: int) -> None:
        commit_log = self.store.commit_log
        if commit_log is not None and commit_log.is_remote:
            raise RemoteProtocolError(
                Reason.BAD_REQUEST,
                "this server keeps acknowledgements in a JetStream cluster, which does not report "
                "when they are stored",
            )
        content = msgspec.json.encode(AcksInfo())
        reply = frames.encode(frames.INQUIRE, message_id=request_number, content=content)
        position = self.request_progress()
        self.publisher_confirms.reply_when_durable(session, reply, position, None)

    def _purge_in_parts(
        self, session: Session, request: PurgeRequested, end: int
    ) -> Iterator[None]:
        """Purge when earlier replies of the session are sent, because every position is examined.

        Does nothing if the session has ended before.
        """
        if session.is_closed:
            return
        try:
            yield from self.fetch_handler.purge(session, request, end)
        except RemoteProtocolError as error:
            self._refuse_request(session, request, error)

    def _refuse_request(
        self, session: Session, request: RequestEvent, error: RemoteProtocolError
    ) -> None:
        self._send_refusal(
            session,
            FrameRefused(
                error.reason,
                error.sentence,
                _FRAME_TYPE_BY_REQUEST[type(request)],
                class_id=getattr(request, "class_id", 0),
                refers_to=request.request_number,
            ),
        )

    def _end_slow_consumer(self, position: Position) -> None:
        """End a subscription whose backlog exceeds its limit."""
        pending = position.count_pending()
        sentence = (
            f"{pending} messages are pending, at most {position.delivery_policy.pending_max} "
            "are allowed"
        )
        self._notify_ended(position, Reason.SLOW_CONSUMER, sentence)
        self.subscription_manager.end_slow_consumer(position)

    def revoke_position(self, position: Position, error: RemoteProtocolError) -> None:
        """End a position that was granted before, with this error."""
        self._notify_ended(position, error.reason, error.sentence)
        self.subscription_manager.end_position(position)

    def _notify_ended(self, position: Position, reason: Reason, sentence: str) -> None:
        """Tell the sessions that hold subscriptions of a position that it has ended."""
        for holder in self.classes[position.class_id].find_subscriptions(position):
            session = self.sessions.get(holder.outbox.session_id)
            if session is not None:
                self.subscription_manager.drop_subscription(session, holder.subscription_number)
                self._send_refusal(
                    session,
                    FrameRefused(
                        reason,
                        sentence,
                        frames.SUBSCRIBE,
                        class_id=position.class_id,
                        refers_to=holder.request_number,
                    ),
                )

    # Time ----------------------------------------------------------------------------------------

    def tick(self) -> list[tuple[Session, RemoteProtocolError]]:
        """Advance the ack timer by one tick.

        Returns:
            The sessions that must be closed, each with the reason.
        """
        return list(chain.from_iterable(self.tick_in_parts()))

    def tick_in_parts(self) -> Iterator[list[tuple[Session, RemoteProtocolError]]]:
        """Advance the ack timer by one tick, in parts of bounded work for many sessions.

        Other calls of the broker are allowed between the parts.

        Yields:
            Sessions that must be closed, each with the reason.
        """
        self._pending_check = None  # Each tick checks the total of held bytes itself.
        self.clock.tick += 1
        self.store.timer_index = self.clock.tick % self.settings.ack_timeout
        ticked_count = 0
        for cls in list(self.classes.values()):
            for count in self._tick_positions(cls):
                ticked_count += count
                if ticked_count >= TICKED_CLASSES_PER_TURN:
                    ticked_count = 0
                    yield []
        for _ in self.store.tick_in_parts():
            yield []
        self.subscription_manager.tick()
        self.idle_classes.tick()
        pending_bytes, limit_bytes = 0, self.settings.limits.total_pending_bytes
        sessions = drain_list(list(self.sessions.values()))
        while examined := list(islice(sessions, TICKED_SESSIONS_PER_TURN)):
            part = [session for session in examined if not session.is_closed]
            yield self._tick_sessions(part)
            pending_bytes += sum(session.pending_bytes for session in part)
        if pending_bytes > limit_bytes:
            yield from select_sessions_to_close(self.sessions.values(), limit_bytes)

    def _tick_positions(self, cls: MessageClass) -> Iterator[int]:
        """Tick the positions of a class. Yields the cost of each part: that of a position is 1."""
        positions = list(cls.positions)
        for first in range(0, len(positions), TICKED_CLASSES_PER_TURN):
            part = positions[first : first + TICKED_CLASSES_PER_TURN]
            for position in part:
                if position not in cls.positions:
                    continue  # It has ended between the parts.
                if stalled_ticks := self._new_stalled_ticks(position):
                    position.unacked.postpone_ack_timeouts(stalled_ticks)
                for _ in position.tick_in_parts(self.clock.tick):
                    yield TICKED_CLASSES_PER_TURN
                if position not in cls.positions:
                    continue
                if (subscription := cls.subscriptions.get(position)) is not None:
                    if subscription.has_work:
                        subscription.outbox.enqueue(subscription)
                    if subscription.is_queued:
                        subscription.outbox.mark_ready()
                elif (group := cls.groups.get(position)) is not None:
                    for _ in group.tick_in_parts(self.clock.tick):
                        yield TICKED_CLASSES_PER_TURN
                    if position in cls.positions:
                        group.distribute_messages()
            yield len(part)
        yield 1

    def _new_stalled_ticks(self, position: Position) -> int:
        """Return for how many more ticks the version 1 client of a position has read nothing.

        A client cannot ack unread messages, and copies would wait behind the originals. The
        original client stops reading while it waits for threads, and its users check the order.
        """
        session = self.sessions.get(position.session_id)
        if session is None or not session.is_version1 or session.send_blocked_ticks < 2:
            return 0  # In the first blocked tick, bytes may have waited for a moment only.
        # The second one also counts the first, and the tick in which the client stopped reading.
        return 3 if session.send_blocked_ticks == 2 else 1

    def _tick_sessions(self, sessions: list[Session]) -> list[tuple[Session, RemoteProtocolError]]:
        """Check the timeouts of some sessions. Returns the sessions that must be closed."""
        limits, seconds = self.settings.limits, self.settings.tick_seconds
        overdue = []
        publish_queue = self.store.publish_queue
        is_short_of_memory = publish_queue.is_short_of_memory()
        for session in sessions:
            is_blocking = bool(publish_queue.blocked_classes) and self._is_blocking_publishers(
                session, is_short_of_memory
            )
            error = session.tick(limits, seconds, is_blocking_publishers=is_blocking)
            if error is not None:
                overdue.append((session, error))
            elif session.heartbeat_seconds and not session.outbox.is_idle:
                session.outbox.mark_ready()
        return overdue

    @property
    def next_wakeup(self) -> float:
        """Time of the next call of `run_due_wakeups` in seconds since 1970; infinite if none is
        due.
        """
        return min(self.delayed_wakeups.next_wakeup, self.publisher_confirms.next_wakeup)

    def run_due_wakeups(self) -> None:
        """Send the messages whose delay has passed, and the Confirms that have waited."""
        for target in self.delayed_wakeups.run_due_wakeups():
            if isinstance(target, Position):
                self.classes[target.class_id].enqueue_position(target)
            elif isinstance(target, BaseGroup):
                target.distribute_messages()
        self.publisher_confirms.release_due()

    def can_delay_read(self, session: Session) -> bool:
        """Return True if the next read of a session may be delayed so that acks arrive in batches.

        That is so for a peer that acks few messages at a time, has not published lately, and blocks
        no full class. Call it after each read.
        """
        return (
            0 < session.pop_recent_ack_count() <= ACK_READ_DELAY_MESSAGES_MAX
            and self.clock.tick - session.last_publish_tick >= RECENT_PUBLISH_TICKS
            and not self.is_blocking_publishers(session)
        )

    def is_blocking_publishers(self, session: Session) -> bool:
        """Return True if publishers wait for this session's acks."""
        publish_queue = self.store.publish_queue
        return bool(publish_queue.blocked_classes) and self._is_blocking_publishers(
            session, publish_queue.is_short_of_memory()
        )

    def _is_blocking_publishers(self, session: Session, is_short_of_memory: bool) -> bool:
        return any(
            window.floor == cls.floor() < cls.ring.head
            and cls.spill is None
            and (self.store.publish_queue.needs_space(cls) or is_short_of_memory)
            for subscription in session.subscriptions.values()
            if (cls := self.classes[subscription.class_id]) and (window := subscription.window)
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        self.apply_position_changes()
        memory = 0
        for cls in self.classes.values():
            cls.ring.check()
            cls.channels.check_invariants()
            memory += cls.ring.statistics().memory_bytes + cls.channels.memory_bytes
            cls.check_invariants()
            retains = bool(cls.retention) or cls.has_last_values
            retains |= self.store.oldest_dropper.drop_floor(cls) > 0
            assert cls.first_sequence == cls.floor() or (
                retains and cls.first_sequence < cls.floor()
            )
            assert cls.first_sequence <= cls.ring.floor
            for position in cls.positions:
                position.check_invariants()
            if not self.store.notifier.is_waiting(cls):
                for subscription in cls.subscriptions.values():
                    subscription.check_invariants()
            for group in cls.groups.values():
                group.check_invariants()
            for session in cls.blocked_sessions:
                assert session.parked_messages
                assert session.parked_messages[0][0] == cls.class_id
        orphaned_bytes = self.store.publish_queue.orphaned_bytes()
        assert set(self.store.publish_queue.blocked_classes) == {
            c for c in self.classes.values() if c.blocked_sessions
        }
        assert memory + orphaned_bytes == self.budget.used_bytes
        exceeds = any(cls.ring.is_over_limit for cls in self.classes.values())
        assert exceeds or self.budget.used_bytes <= self.budget.limit_bytes

    def statistics(self) -> BrokerStatistics:
        return BrokerStatistics(
            sessions=len(self.sessions),
            memory_bytes=self.budget.used_bytes,
            parked_bytes=sum(s.parked_bytes for s in self.store.publish_queue.blocked_sessions()),
            refused=dict(self.refusal_counts),
            classes=tuple(cls.statistics(self.clock.now) for cls in self.classes.values()),
        )
