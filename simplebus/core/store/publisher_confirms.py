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

from simplebus.core.commit_log import Ledger, Level
from simplebus.core.errors import Reason
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import ErrorReply
from simplebus.core.session.outbox import Feed, Outbox
from simplebus.core.session.session import Session
from simplebus.core.session.version2 import Version2


class Confirming:
    """Of one broker."""

    def __init__(
        self, ledger: Ledger | None, refused: Counter[Reason], ready: Callable[[Outbox], None]
    ) -> None:
        self._ledger = ledger
        self._refused = refused
        self._ready = ready
        """Called with outboxes that have something new."""
        self._waiting: dict[Session, None] = {}
        """Whose confirms wait for the ledger."""

    def confirm(self, session: Session) -> None:
        """Tell a version 2 publisher how far its messages are stored, if that is news, once they
        are."""
        dialect, ledger = session.dialect, self._ledger
        if not isinstance(dialect, Version2) or session.closed:
            return
        stored = dialect.stored
        if stored == session.claimed and not dialect.repeated:
            return
        self._refused.update({Reason.DUPLICATE: dialect.repeated} if dialect.repeated else {})
        dialect.repeated = 0
        session.claimed = stored
        if ledger is None or not ledger.is_awaited:
            session.unsaid.clear()
            self._say(session, stored)
            return
        # What was refused because nothing can be kept is to be known at once.
        mark = ledger.mark if ledger.failure is None else session.kept_mark
        if ledger.has_reached(mark, dialect.publisher.owed):
            session.unsaid.clear()
            self._say(session, stored)
            return
        if session.unsaid and session.unsaid[-1][0] == mark:
            session.unsaid.pop()
        session.unsaid.append((mark, stored))
        self._waiting[session] = None

    def answer(self, session: Session, frame: bytes, mark: int, feed: Feed | None) -> None:
        """Say this once the ledger has come to this mark, and after the answers before it. What a
        feed sends comes behind it."""
        ledger = self._ledger
        if not session.unanswered and (ledger is None or not ledger.owes(mark)):
            session.outbox.reply(frame)
            self._ready(session.outbox)
            return
        if feed is not None:
            session.outbox.hold(feed)
        session.unanswered.append((mark, frame, feed))
        self._waiting[session] = None
        if ledger is not None and ledger.failure is not None:
            self._warn(session, ledger.failure)

    def reach(self) -> None:
        """The ledger has come further."""
        assert self._ledger is not None
        reached = self._ledger.reached
        for session in list(self._waiting):
            unsaid, number = session.unsaid, None
            owed = session.dialect.publisher.owed if isinstance(session.dialect, Version2) else {}
            while unsaid and self._ledger.has_reached(unsaid[0][0], owed):
                _, number = unsaid.popleft()
            unanswered = session.unanswered
            if not session.closed and unanswered and unanswered[0][0] <= reached:
                self._answer(session, reached)
            if session.closed or not (unsaid or unanswered):
                del self._waiting[session]
            if number is not None and not session.closed:
                self._say(session, number)

    def fail(self, reason: Reason, sentence: str) -> None:
        """Nothing can be kept for now: tell who waits for a confirm, which will come later."""
        for session in self._waiting:
            if not session.closed:
                self._warn(session, (reason, sentence))

    def _warn(self, session: Session, failure: tuple[Reason, str]) -> None:
        reason, sentence = failure
        said = f"{sentence}; what was accepted before is confirmed when it is written"
        reply = ErrorReply(code=reason, message=said, count=0)
        session.outbox.reply(frames.encode(frames.ERROR, content=reply.encode()))
        self._ready(session.outbox)

    def _answer(self, session: Session, reached: int) -> None:
        """Say what waits for no later lot."""
        unanswered, outbox = session.unanswered, session.outbox
        while unanswered and unanswered[0][0] <= reached:
            _, frame, feed = unanswered.popleft()
            outbox.reply(frame)
            if feed is not None:
                outbox.let_go(feed)
        self._ready(outbox)

    def _say(self, session: Session, number: int) -> None:
        session.confirmed = number
        level = Level.MEMORY if self._ledger is None else self._ledger.level
        session.outbox.confirm(number, level)
        self._ready(session.outbox)
