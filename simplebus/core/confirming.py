"""When a version 2 publisher is told how far its messages are stored.

Rule 1: a Confirm says nothing that is not true yet: where messages are kept past the process, it
waits until they are as safe as was asked for.
Rule 2: confirms of a session leave in their order; of several that have come due only the last one
is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from simplebus.core import frames
from simplebus.core.errors import Reason
from simplebus.core.ledger import Ledger, Level
from simplebus.core.outbox import Outbox
from simplebus.core.requests import ErrorReply
from simplebus.core.session import Session
from simplebus.core.version2 import Version2


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
        if mark <= ledger.reached:
            self._say(session, stored)
            return
        if session.unsaid and session.unsaid[-1][0] == mark:
            session.unsaid.pop()
        session.unsaid.append((mark, stored))
        self._waiting[session] = None

    def reach(self) -> None:
        """The ledger has come further."""
        assert self._ledger is not None
        reached = self._ledger.reached
        for session in list(self._waiting):
            unsaid, number = session.unsaid, None
            while unsaid and unsaid[0][0] <= reached:
                _, number = unsaid.popleft()
            if not unsaid or session.closed:
                del self._waiting[session]
            if number is not None and not session.closed:
                self._say(session, number)

    def fail(self, reason: Reason, sentence: str) -> None:
        """Nothing can be kept for now: tell who waits for a confirm, which will come later."""
        said = f"{sentence}; what was accepted before is confirmed when it is written"
        reply = ErrorReply(code=reason, message=said, count=0)
        for session in self._waiting:
            if not session.closed:
                session.outbox.reply(frames.encode(frames.ERROR, content=reply.encode()))
                self._ready(session.outbox)

    def _say(self, session: Session, number: int) -> None:
        session.confirmed = number
        level = Level.MEMORY if self._ledger is None else self._ledger.level
        session.outbox.confirm(number, level)
        self._ready(session.outbox)
