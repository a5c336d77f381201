"""Publisher confirms: tells version 2 publishers which of their messages are durable.

A confirm is sent only when the journal has reached the durability that the publisher asked for.
Confirms of a session keep their order, and several that become due together are sent as one. A
confirm that may wait is sent in front of the next bytes to its session, but after
CONFIRM_WAIT_SECONDS at the latest. A reply about a durable waits in the same way. Later replies
about subscriptions wait behind it, and so do the messages of its subscription; other replies do
not.
"""

from __future__ import annotations

from collections import Counter

from simplebus.core.clock import BrokerClock
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason
from simplebus.core.limits import CONFIRM_WAIT_SECONDS
from simplebus.core.outbox import SendSource
from simplebus.core.protocol import frames
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.requests import ErrorReply
from simplebus.core.session.session import Session
from simplebus.core.subscription.delayed_wakeups import NEVER


class PublisherConfirms:
    """Confirms and durable replies that wait for the journal, per session."""

    def __init__(
        self,
        commit_log: CommitLog | None,
        refusal_counts: Counter[Reason],
        clock: BrokerClock,
    ) -> None:
        self._commit_log = commit_log
        self._refusal_counts = refusal_counts
        self._waiting_sessions: dict[Session, None] = {}
        """Sessions with confirms or replies that wait for the commit log."""
        self._clock = clock
        self._held_since: dict[Session, float] = {}
        """Sessions whose outbox may hold a confirm that can wait, and since when; oldest first."""

    def confirm_stored(self, session: Session) -> None:
        """Confirm what a version 2 session has published so far, now or when it is durable."""
        decoder, commit_log = session.version2, self._commit_log
        assert decoder is not None
        if session.is_closed:
            return
        stored_before = decoder.stored_before
        if stored_before == session.promised_number and not decoder.duplicate_count:
            if not decoder.may_confirm_wait:
                session.outbox.release_confirm()
            return
        if decoder.duplicate_count:
            self._refusal_counts[Reason.DUPLICATE] += decoder.pop_duplicate_count()
        if commit_log is None or not commit_log.must_defer_confirms:
            session.confirm_at_once(stored_before)
            self._send_confirm(session, stored_before)
            return
        # Messages refused because of the write error do not wait for the journal.
        position = (
            commit_log.log_position if commit_log.write_error is None else session.last_log_position
        )
        if commit_log.is_producer_durable(position, decoder.producer.remote_positions):
            session.confirm_at_once(stored_before)
            self._send_confirm(session, stored_before)
            return
        session.promise(stored_before, position)
        self._waiting_sessions[session] = None

    def reply_when_durable(
        self, session: Session, reply: bytes, log_position: int, held_feed: SendSource | None
    ) -> None:
        """Send `reply` when `log_position` is durable, after all earlier durable replies.

        The feed sends its messages after the reply.
        """
        commit_log = self._commit_log
        if not session.pending_replies and (
            commit_log is None or commit_log.is_durable(log_position)
        ):
            session.outbox.queue_reply(reply)
            return
        if held_feed is not None:
            session.outbox.pause(held_feed)
        session.pending_replies.append((log_position, reply, held_feed))
        self._waiting_sessions[session] = None
        if commit_log is not None and commit_log.write_error is not None:
            self._send_warning(session, commit_log.write_error)

    def journal_advanced(self) -> None:
        """Send the confirms and replies that are durable now."""
        assert self._commit_log is not None
        durable_position = self._commit_log.durable_position
        for session in list(self._waiting_sessions):
            pending_confirms, number = session.pending_confirms, None
            producer = session.producer
            remote_positions = producer.remote_positions if producer is not None else {}
            while pending_confirms and self._commit_log.is_producer_durable(
                pending_confirms[0][0], remote_positions
            ):
                _, number = pending_confirms.popleft()
            pending_replies = session.pending_replies
            if (
                not session.is_closed
                and pending_replies
                and pending_replies[0][0] <= durable_position
            ):
                self._send_due_replies(session, durable_position)
            if session.is_closed or not (pending_confirms or pending_replies):
                del self._waiting_sessions[session]
            if number is not None and not session.is_closed:
                session.confirm(number)
                self._send_confirm(session, number)

    def journal_failed(self, reason: Reason, detail: str) -> None:
        """Warn every waiting session that writing fails for now."""
        for session in self._waiting_sessions:
            if not session.is_closed:
                self._send_warning(session, (reason, detail))

    def _send_warning(self, session: Session, write_error: tuple[Reason, str]) -> None:
        reason, sentence = write_error
        message = f"{sentence}; messages accepted before are confirmed when they are written"
        reply = ErrorReply(code=reason, message=message)
        session.outbox.queue_reply(frames.encode(frames.ERROR, content=reply.encode()))

    def _send_due_replies(self, session: Session, durable_position: int) -> None:
        pending_replies, outbox = session.pending_replies, session.outbox
        while pending_replies and pending_replies[0][0] <= durable_position:
            _, frame, feed = pending_replies.popleft()
            outbox.queue_reply(frame)
            if feed is not None:
                outbox.resume(feed)

    def _send_confirm(self, session: Session, number: int) -> None:
        durability = Durability.MEMORY if self._commit_log is None else self._commit_log.durability
        decoder = session.version2
        if decoder is None or not decoder.may_confirm_wait:
            session.outbox.queue_confirm(number, durability)
            return
        if session.outbox.hold_confirm(number, durability):
            self._held_since.pop(session, None)  # Of a confirm that was sent with other bytes.
            self._held_since[session] = self._clock.now

    @property
    def next_wakeup(self) -> float:
        """Time at which `release_due` is to be called; infinite if no confirm is held."""
        return next(iter(self._held_since.values()), NEVER) + CONFIRM_WAIT_SECONDS

    def release_due(self) -> None:
        """Send the confirms that have waited long enough."""
        while self.next_wakeup <= self._clock.now:
            session = next(iter(self._held_since))
            del self._held_since[session]
            if not session.is_closed:
                session.outbox.release_confirm()
