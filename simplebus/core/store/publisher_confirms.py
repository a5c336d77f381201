"""When a version 2 peer is told what is promised: how far its messages are stored, and that its
durables are there.

Rule 1: a Confirm says nothing that is not true yet: where messages are kept past the process, it
waits until they are as safe as was asked for.
Rule 2: confirms of a session leave in their order; of several that have come due only the last one
is said.
Rule 3: an answer that promises something about a durable waits like a Confirm. Other answers do not
wait for it, but for those about subscriptions behind it; its messages do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from simplebus.core.commit_log import CommitLog, Durability
from simplebus.core.errors import Reason
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import ErrorReply
from simplebus.core.session.outbox import SendSource, Outbox
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2Decoder


class PublisherConfirms:
    """Of one broker."""

    def __init__(
        self,
        commit_log: CommitLog | None,
        refusal_counts: Counter[Reason],
        mark_ready: Callable[[Outbox], None],
    ) -> None:
        self._commit_log = commit_log
        self._refusal_counts = refusal_counts
        self._mark_ready = mark_ready
        """Called with outboxes that have something new."""
        self._waiting_sessions: dict[Session, None] = {}
        """Whose confirms wait for the ledger."""

    def confirm_stored(self, session: Session) -> None:
        """Tell a version 2 publisher how far its messages are stored, if that is news, once they
        are."""
        dialect, ledger = session.decoder, self._commit_log
        if not isinstance(dialect, Version2Decoder) or session.is_closed:
            return
        stored = dialect.stored_before
        if stored == session.promised_number and not dialect.duplicate_count:
            return
        self._refusal_counts.update(
            {Reason.DUPLICATE: dialect.duplicate_count} if dialect.duplicate_count else {}
        )
        dialect.duplicate_count = 0
        session.promised_number = stored
        if ledger is None or not ledger.is_awaited:
            session.pending_confirms.clear()
            self._send_confirm(session, stored)
            return
        # What was refused because nothing can be kept is to be known at once.
        mark = ledger.mark if ledger.failure is None else session.last_log_position
        if ledger.has_reached(mark, dialect.producer.owed):
            session.pending_confirms.clear()
            self._send_confirm(session, stored)
            return
        if session.pending_confirms and session.pending_confirms[-1][0] == mark:
            session.pending_confirms.pop()
        session.pending_confirms.append((mark, stored))
        self._waiting_sessions[session] = None

    def reply_when_durable(
        self, session: Session, reply: bytes, log_position: int, held_feed: SendSource | None
    ) -> None:
        """Say this once the ledger has come to this mark, and after the answers before it. What a
        feed sends comes behind it."""
        ledger = self._commit_log
        if not session.pending_replies and (ledger is None or not ledger.owes(log_position)):
            session.outbox.queue_reply(reply)
            self._mark_ready(session.outbox)
            return
        if held_feed is not None:
            session.outbox.pause(held_feed)
        session.pending_replies.append((log_position, reply, held_feed))
        self._waiting_sessions[session] = None
        if ledger is not None and ledger.failure is not None:
            self._send_warning(session, ledger.failure)

    def journal_advanced(self) -> None:
        """The ledger has come further."""
        assert self._commit_log is not None
        reached = self._commit_log.reached
        for session in list(self._waiting_sessions):
            unsaid, number = session.pending_confirms, None
            owed = (
                session.decoder.producer.owed
                if isinstance(session.decoder, Version2Decoder)
                else {}
            )
            while unsaid and self._commit_log.has_reached(unsaid[0][0], owed):
                _, number = unsaid.popleft()
            unanswered = session.pending_replies
            if not session.is_closed and unanswered and unanswered[0][0] <= reached:
                self._send_due_replies(session, reached)
            if session.is_closed or not (unsaid or unanswered):
                del self._waiting_sessions[session]
            if number is not None and not session.is_closed:
                self._send_confirm(session, number)

    def journal_failed(self, reason: Reason, detail: str) -> None:
        """Nothing can be kept for now: tell who waits for a confirm, which will come later."""
        for session in self._waiting_sessions:
            if not session.is_closed:
                self._send_warning(session, (reason, detail))

    def _send_warning(self, session: Session, failure: tuple[Reason, str]) -> None:
        reason, sentence = failure
        said = f"{sentence}; what was accepted before is confirmed when it is written"
        reply = ErrorReply(code=reason, message=said, count=0)
        session.outbox.queue_reply(frames.encode(frames.ERROR, content=reply.encode()))
        self._mark_ready(session.outbox)

    def _send_due_replies(self, session: Session, durable_position: int) -> None:
        """Say what waits for no later lot."""
        unanswered, outbox = session.pending_replies, session.outbox
        while unanswered and unanswered[0][0] <= durable_position:
            _, frame, feed = unanswered.popleft()
            outbox.queue_reply(frame)
            if feed is not None:
                outbox.resume(feed)
        self._mark_ready(outbox)

    def _send_confirm(self, session: Session, number: int) -> None:
        session.confirmed_number = number
        level = Durability.MEMORY if self._commit_log is None else self._commit_log.level
        session.outbox.queue_confirm(number, level)
        self._mark_ready(session.outbox)
